"""Every command on transformers and token models: it works, or is refused in a sentence with exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

SOURCE = """
import torch
from torch import nn


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.places = nn.Conv2d(1, 16, 4, 4), nn.Parameter(torch.randn(1, 4, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder, self.out = nn.TransformerEncoder(layer, 1), nn.Linear(16, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.out(self.encoder(x).mean(1))


class Words(nn.Module):
    def __init__(self, outputs=3):
        super().__init__()
        self.words, self.places = nn.Embedding(60, 48), nn.Embedding(8, 48)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 2, 64, batch_first=True), 2)
        self.out = nn.Linear(48, outputs)

    def forward(self, ids):
        return self.out(self.encoder(self.words(ids) + self.places(torch.arange(ids.shape[1]))).mean(1))


class Rounding(Words):
    def forward(self, x):
        return super().forward((x * 59).long())


class Held(Words):
    def forward(self, ids):
        return {"logits": super().forward(ids)}


def vision():
    return Vision()


def words():
    return Words()


def rounding():
    return Rounding()


def held():
    return Held()


def language():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 60, "n_positions": 8, "n_embd": 48, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def hugging_vision():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens_of_mine.py").write_text(SOURCE)
    return tmp_path


def released(here: Path, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """A plain gradient of the model as the command makes it, and the truth behind it."""
    from gradveil.attacks.observation.from_files import load_factory

    model = load_factory(f"tokens_of_mine:{name}").eval()
    out = model(x)
    logits = out if isinstance(out, torch.Tensor) else out["logits"]
    labels = x[:, 1:] if logits.dim() == 3 else y
    F.cross_entropy(logits[:, :-1].transpose(1, 2) if logits.dim() == 3 else logits, labels).backward()
    save_file({n: p.grad for n, p in model.named_parameters()}, here / "gradients.safetensors")
    save_file({n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}, here / "weights.safetensors")
    save_file({"x": x, "y": y}, here / "truth.safetensors")


def ids(count: int) -> torch.Tensor:
    return torch.stack([torch.randperm(60, generator=torch.Generator().manual_seed(s))[:8] for s in range(count)])


FILES = ("--gradients", "gradients.safetensors", "--weights", "weights.safetensors", "--truth", "truth.safetensors")


@pytest.mark.parametrize("name", ["words", "held", "language"])
def test_attack_reads_sentences_off_a_gradient(gradveil: Callable[..., Any], here: Path, name: str) -> None:
    if name == "language":
        pytest.importorskip("transformers")
    x = ids(3)
    released(here, name, x, torch.tensor([0, 1, 2]))
    model = ("--model", f"tokens_of_mine:{name}", "--input-shape", "8", "--batch", "3")
    outcome = gradveil("attack", *model, *FILES, "--out", "out")
    assert outcome.code == 0 and "chance" in outcome.out and "ROUGE-L" in outcome.out
    (attacked,) = json.loads((here / "out" / "result.json").read_text())["attacked"]
    assert attacked["result"]["tokens"] == attacked["result"]["sentences"] == 1.0 and attacked["sure"] == 1.0
    assert attacked["result"]["chance"]["tokens"] < 0.6
    found = load_file(here / "out" / "reconstruction.safetensors")["x"]
    assert sorted(found[0].tolist()) == sorted(x.tolist())
    again = gradveil("attack", *model, *FILES[:2], "--clip", "1", "--sigma", "1", "--out", "noised", "--json")
    assert again.code == 0 and json.loads(again.out)["attacked"][0]["noise_std"][0] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["vision", "hugging_vision"])
@pytest.mark.parametrize("attack", ["cpl", "map", "inverting"])
def test_attack_on_attention_between_patches(gradveil: Callable[..., Any], here: Path, name: str, attack: str) -> None:
    if name == "hugging_vision":
        pytest.importorskip("transformers")
    released(here, name, torch.rand(1, 1, 8, 8), torch.tensor([3]))
    model = ("--model", f"tokens_of_mine:{name}", "--input-shape", "1,8,8", "--iterations", "2", "--attack", attack)
    outcome = gradveil("attack", *model, *FILES, "--out", "out")
    assert outcome.code == 0 and "PSNR" in outcome.out


WRONG: dict[str, tuple[str, list[str], str]] = {
    "an attack for numbers": ("words", ["--attack", "map"], "the model takes token ids, and map searches for numbers"),
    "too many tokens": ("words", ["--input-shape", "9"], "does not take inputs of shape (9,)"),
    "a truth that is not ids": ("words", ["--truth", "gradients.safetensors"], "the truth is x, token ids"),
    "ids that are rounded": ("rounding", [], "cannot be run on this model"),
    "another batch": ("words", ["--batch", "2"], "(1, 2, 8)"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_cannot_be_attacked_exits_2_with_a_reason(gradveil: Callable[..., Any], here: Path, case: str) -> None:
    name, extra, words = WRONG[case]
    x = ids(3) if name == "words" else torch.rand(1, 8)
    released(here, name, x, torch.tensor([0, 1, 2])[: len(x)])
    batch = [] if name == "rounding" else ["--batch", "3"]
    model = ["--model", f"tokens_of_mine:{name}", "--input-shape", "8", *batch]
    outcome = gradveil("attack", *model, *FILES, *extra, "--out", "out")
    assert outcome.code == 2 and words in outcome.message
    assert "Traceback" not in outcome.err and not (here / "out").exists()


def test_text_is_refused_on_a_model_of_numbers(gradveil: Callable[..., Any], here: Path) -> None:
    released(here, "vision", torch.rand(1, 1, 8, 8), torch.tensor([3]))
    model = ("--model", "tokens_of_mine:vision", "--input-shape", "1,8,8", "--attack", "text")
    outcome = gradveil("attack", *model, *FILES)
    assert outcome.code == 2 and "takes numbers" in outcome.message


@pytest.mark.parametrize("name", ["words", "held", "language", "vision", "hugging_vision", "rounding"])
def test_inspect_looks_at_transformers(gradveil: Callable[..., Any], here: Path, name: str) -> None:
    if name in ("language", "hugging_vision"):
        pytest.importorskip("transformers")
    shape = "1,8,8" if "vision" in name else "8"
    planned = ("--clip", "1", "--sigma", "1", "--batch-size", "4", "--seconds", "1" if "vision" in name else "60")
    outcome = gradveil("inspect", f"tokens_of_mine:{name}", "--input-shape", shape, *planned, "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["can_be_trained"] is True
    if shape == "8" and name != "rounding":
        undefended, *_, noised = found["tried"]
        assert undefended["attack"] == "text" and undefended["success"] == 1.0
        assert noised["success"] == 0.0 and noised["bound"] is not None
        assert [layer for layer, what in found["anatomy"]["leaks"] if what == "tokens"] in (
            ["words"],
            ["transformer.wte"],
        )


def test_commands_that_take_no_model_of_ones_own_say_so(gradveil: Callable[..., Any], here: Path) -> None:
    for command in ("train", "audit"):
        outcome = gradveil(command, "--model", "tokens_of_mine:words", "--dataset", "digits")
        assert outcome.code == 2 and "Traceback" not in outcome.err
