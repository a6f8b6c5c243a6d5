"""GPT-2 small (124M, random weights) as a language model: a private step beside a plain one, and beside Opacus.

    python benchmarks/gpt2.py --device cuda --out benchmarks/results/gpt2_cuda.json

Sequences of 512 random tokens, batch 16, bfloat16 autocast, AdamW; every parameter trains, or LoRA adapters of rank 8
(peft). One loss per example, the mean over its tokens. Modes take turns; the median of their steps, and peak memory
of each by itself. A mode that fails (Opacus knows neither tied weights nor every layer) is noted with its error.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import description, write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

Step = Callable[[], None]


def model_of(args: argparse.Namespace, lora: bool) -> nn.Module:
    import transformers

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 101} if args.small else {}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_positions=max(64, args.length), use_cache=False, **drops, **sizes)
    config.bos_token_id = config.eos_token_id = config.vocab_size - 1
    torch.manual_seed(0)
    with torch.device(args.device):  # where random weights take no time
        model: Any = transformers.GPT2LMHeadModel(config)
    if lora:
        import peft

        settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(model, settings)
    return model.to(args.device)  # type: ignore[no-any-return]


def example_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean over the tokens of each example."""
    flat = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return flat.view(len(tokens), -1).mean(1)


def tokens_of(model: Any, args: argparse.Namespace, examples: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = model.config.vocab_size if hasattr(model, "config") else model.base_model.config.vocab_size
    return torch.randint(0, size, (examples, args.length), generator=generator).to(args.device)


def plain(args: argparse.Namespace, lora: bool) -> Step:
    model = model_of(args, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    tokens = tokens_of(model, args, args.batch)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.bf16):
            losses = example_losses(model(tokens).logits, tokens)
        losses.mean().backward()
        optimizer.step()

    return step


def private(args: argparse.Namespace, lora: bool, clipping: str) -> Step:
    import gradveil

    model = model_of(args, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    tokens = tokens_of(model, args, args.batch)
    engine = gradveil.PrivacyEngine(
        clip=1.0, sigma=1.0, steps=10_000, delta=1e-5, clipping=clipping, sampling="without-replacement"
    )
    model, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(tokens), batch_size=args.batch
    )
    batches = iter(loader)

    def step() -> None:
        (x,) = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.bf16):
            losses = example_losses(model(x).logits, x)
        losses.mean().backward()
        optimizer.step()

    return step


def opacus(args: argparse.Namespace, lora: bool, mode: str) -> Step:
    from opacus import PrivacyEngine

    model = model_of(args, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    tokens = tokens_of(model, args, args.batch)
    loader = torch.utils.data.DataLoader(TensorDataset(tokens), batch_size=args.batch)
    criterion = nn.CrossEntropyLoss(reduction="mean")
    made = PrivacyEngine().make_private(
        module=model.train(),
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    module, optimizer = made[0], made[1]
    loss_of: Any = made[2] if mode == "ghost" else criterion
    positions = torch.arange(args.length, device=args.device).expand(args.batch, -1)  # it needs them for every example

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.bf16):
            logits = module(tokens, position_ids=positions).logits
        shifted, targets = logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        shape = {"shape": (args.batch, args.length - 1)} if mode == "ghost" else {}
        loss_of(shifted, targets, **shape).backward()
        optimizer.step()

    return step


MODES: dict[str, Callable[[argparse.Namespace, bool], Step]] = {
    "plain": plain,
    "gradveil per-layer": lambda a, lora: private(a, lora, "per-layer"),
    "gradveil flat": lambda a, lora: private(a, lora, "flat"),
    "opacus hooks": lambda a, lora: opacus(a, lora, "hooks"),
    "opacus ghost": lambda a, lora: opacus(a, lora, "ghost"),
}


def wait(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def peak(args: argparse.Namespace, step: Step) -> int | None:
    if args.device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def measured(args: argparse.Namespace, lora: bool, modes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in modes:  # memory first: each mode by itself
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        try:
            step = MODES[mode](args, lora)
            for _ in range(args.warm_up):
                step()
            found[mode] = {"peak_bytes": peak(args, step), "seconds": []}
        except Exception as error:
            found[mode] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        step = None  # type: ignore[assignment]
        print(lora, mode, found[mode], flush=True)
    steps: dict[str, Step] = {}
    for mode in modes:
        if "failed" not in found[mode]:
            steps[mode] = MODES[mode](args, lora)
            for _ in range(args.warm_up):
                steps[mode]()
    for _ in range(args.rounds):
        for mode, step in steps.items():
            wait(args)
            begun = time.perf_counter()
            step()
            wait(args)
            found[mode]["seconds"].append(time.perf_counter() - begun)
    base = statistics.median(found["plain"]["seconds"])
    for mode in steps:
        middle = statistics.median(found[mode]["seconds"])
        found[mode] |= {"median": middle, "ratio": middle / base}
        if found[mode]["peak_bytes"] is not None:
            found[mode]["memory_ratio"] = found[mode]["peak_bytes"] / found["plain"]["peak_bytes"]
        print("LoRA" if lora else "whole", mode, {k: v for k, v in found[mode].items() if k != "seconds"}, flush=True)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--small", action="store_true", help="A tiny network: to see whether it runs.")
    parser.add_argument("--float32", dest="bf16", action="store_false", help="Without autocast.")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    modes = args.modes.split(",")
    results = {kind: measured(args, kind == "lora", modes) for kind in ("whole", "lora")}
    if args.out:
        settings = {"batch": args.batch, "length": args.length, "bf16": args.bf16, "rounds": args.rounds}
        write(args.out, {"machine": description(args.device, torch.get_num_threads()), **settings, "results": results})


if __name__ == "__main__":
    main()
