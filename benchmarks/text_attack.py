"""How much text gradients give away: GPT-2, BERT and a model with LoRA, undefended, clipped and noised, beside chance.

    python benchmarks/text_attack.py            # writes results/text_attack.json; a few minutes on two cores
    python benchmarks/text_attack.py --large    # with GPT-2 at its published size (random weights)

Needs transformers and peft (pip install 'gradveil[transformers]').
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import ROOT, description, write
from torch import Tensor, nn

from gradveil.attacks.text import TextAttack, chance, observe_text, ranking_score, score_text

SENTENCES, LENGTH, VOCABULARY = 4, 16, 1000
SEEDS = (0, 1, 2)
NOISE = (1e-4, 1e-3, 1e-2, 0.1, 1.0)


def gpt2(width: int = 128, layers: int = 2, vocabulary: int = VOCABULARY, heads: int = 4) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=2, **sizes))


def adapted(rank: int) -> nn.Module:
    """GPT-2 with adapters after some steps: at the start the second factor is zero, and the first has no gradient."""
    import peft

    config = peft.LoraConfig(r=rank, target_modules=["c_attn"], fan_in_fan_out=True)
    made = peft.get_peft_model(gpt2(), config)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return made


def sentences(seed: int, vocabulary: int) -> Tensor:
    """Drawn as a language draws its words: the k-th most frequent with probability 1/k."""
    often = 1.0 / torch.arange(1, vocabulary + 1)
    drawn = torch.multinomial(often, SENTENCES * LENGTH, True, generator=torch.Generator().manual_seed(seed))
    return drawn.view(1, SENTENCES, LENGTH)


def cells(large: bool) -> list[tuple[str, str, Callable[[], nn.Module], dict[str, Any]]]:
    found: list[tuple[str, str, Callable[[], nn.Module], dict[str, Any]]] = [
        ("GPT-2, 128 features", "none", gpt2, {}),
        ("GPT-2, 128 features", "clip 1", gpt2, {"clip": 1.0}),
        *(("GPT-2, 128 features", f"clip 1, sigma {s:g}", gpt2, {"clip": 1.0, "sigma": s}) for s in NOISE),
        ("GPT-2, 128 features", "none, but dropout .1", gpt2, {"train": True}),
        ("GPT-2, 32 features", "none", lambda: gpt2(width=32), {}),
        ("BERT, 128 features", "none", bert, {"seeds": (0,)}),
        ("GPT-2, LoRA of rank 96", "none", lambda: adapted(96), {}),
        ("GPT-2, LoRA of rank 8", "none", lambda: adapted(8), {}),
    ]
    if large:
        found.append(("GPT-2, 768 features, 12 layers", "none", lambda: gpt2(768, 12, 50257, 12), {"seeds": (0,)}))
    return found


def measure(make: Callable[[], nn.Module], settings: dict[str, Any]) -> dict[str, Any]:
    scores, guesses, ranks, seconds, sure = [], [], [], [], []
    settings = dict(settings)
    train, seeds = settings.pop("train", False), settings.pop("seeds", SEEDS)
    for seed in seeds:
        torch.manual_seed(seed)
        model = make().train(train)
        vocabulary = next(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
        ids = sentences(seed, vocabulary)
        labels = torch.arange(SENTENCES).unsqueeze(0) % 2
        public = torch.cat([sentences(1000 + i, vocabulary)[0] for i in range(50)])
        generator = torch.Generator().manual_seed(seed)
        seen = observe_text(model, ids, labels, generator=generator, public=public, **settings)
        started = time.perf_counter()
        found = TextAttack().run(seen, seed=seed)
        seconds.append(time.perf_counter() - started)
        scores.append(score_text(found.ids, ids).to_dict())
        guesses.append(chance(ids, vocabulary, public=public, seed=seed).to_dict())
        ranks.append(ranking_score(found.ranking, ids))
        sure.append(float(found.sure.double().mean()))
    mean = statistics.fmean
    return {
        "seeds": list(seeds),
        "score": {k: mean(s[k] for s in scores) for k in scores[0]},
        "least_tokens": min(s["tokens"] for s in scores),
        "chance": {k: mean(g[k] for g in guesses) for k in guesses[0]},
        "ranked_above_absent": mean(ranks),
        "sure": mean(sure),
        "seconds": mean(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "text_attack.json")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", FutureWarning)  # of peft against transformers
    rows = []
    for model, defence, make, settings in cells(args.large):
        rows.append({"model": model, "defence": defence, **measure(make, settings)})
        print(model, "|", defence, "|", rows[-1]["score"], flush=True)
    about = {"sentences": SENTENCES, "length": LENGTH, **description("cpu", args.threads)}
    write(args.out, {**about, "cells": rows})


if __name__ == "__main__":
    main()
