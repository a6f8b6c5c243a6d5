"""How often a batch that mixes examples is found, and how often a clean one is refused.

    python benchmarks/mixing.py --seconds 60 --seeds 20 --out benchmarks/results/mixing.json
    python benchmarks/mixing.py --quick --out /tmp/mixing.json

Detection. For each family of mixing models and losses, the strength is drawn log-uniformly from 1e-4 to 1, and a fresh
network and batch for every seed. Reported: the share found by one check, by decade of the strength, and the mean number
of checks until one finds it (over those that are found within MOST checks of fresh batches). A gate that opens late is
checked at random steps: reported are the steps between its opening and the refusal.

False alarms. Clean networks and losses, in float32, under bf16 autocast and with dropout, for as long as --seconds
allows; n is the number of checked batches (each is a check of the model and of the loss).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import description, write
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.clipping.validation.loss_watch import LossWatch
from gradveil.clipping.validation.mixing import check_model
from gradveil.errors import UnsupportedModelError

ROWS, FEATURES, HIDDEN, CLASSES = 16, 8, 32, 4
MOST = 20  # checks of one model before it is given up
CHECK_PROBABILITY = 0.05  # per step, for gates that open late


class Net(nn.Module):
    """Two layers with dropout, and something between them that may mix examples."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor] | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(FEATURES, HIDDEN), nn.Dropout(dropout)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.between, self.steps = between, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.dropout(torch.tanh(self.first(x)))
        out: Tensor = self.head(h if self.between is None else self.between(self, h))
        return out


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(64, 16), nn.GRU(16, 16, batch_first=True)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.gru(self.embed(tokens))[0]).mean(1))
        return out


class Experts(nn.Module):
    """Each row goes to one of three experts: their products have other sizes when other rows change."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(FEATURES, 3), nn.Linear(HIDDEN, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        h = x.new_zeros(len(x), HIDDEN)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().flatten()
            h = h.index_add(0, rows, (weights[rows, None] * torch.tanh(expert(x[rows]))).to(h.dtype))
        out: Tensor = self.head(h)
        return out


class Patches(nn.Module):
    """A small vision transformer with class token and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(1, 16, 4, 4), nn.Linear(16, CLASSES)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.positions
        out: Tensor = self.head(self.block(h)[:, 0])
        return out


def _blend(s: float, h: Tensor, mixed: Tensor) -> Tensor:
    return (1 - s) * h + s * mixed


def _attention(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h[None], h[None], h[None])[0]


def _mix_style(s: float, h: Tensor) -> Tensor:
    return _blend(s * torch.rand(len(h), 1), h, h[torch.randperm(len(h))])  # type: ignore[arg-type]


MODELS: dict[str, Callable[[float], Callable[[Net, Tensor], Tensor]]] = {
    "mean subtraction": lambda s: lambda m, h: h - s * h.mean(0),
    "batch normalisation, in training only": lambda s: (
        lambda m, h: _blend(s, h, (h - h.mean(0)) / (h.std(0) + 1e-3)) if m.training else h
    ),
    "attention along the batch": lambda s: lambda m, h: _blend(s, h, _attention(h)),
    "cumulative sum": lambda s: lambda m, h: h + s * h.cumsum(0),
    "sort": lambda s: lambda m, h: _blend(s, h, h.sort(0).values),
    "MixStyle": lambda s: lambda m, h: _mix_style(s, h),
    "neighbouring row": lambda s: lambda m, h: h + s * h.roll(1, 0),
    "batch size": lambda s: lambda m, h: h * (1 + s * len(h)),
}


def _per_example(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def _normalised(s: float, out: Tensor, y: Tensor) -> Tensor:
    losses = _per_example(out, y)
    return (losses / (1 + s * losses.detach().mean())).mean()


def _hinge(s: float, out: Tensor, y: Tensor) -> Tensor:
    half = len(out) // 2
    return _per_example(out, y).mean() + s * F.relu(1 + out[:half, 0] - out[half : 2 * half, 0]).mean()


def _contrastive(s: float, out: Tensor, y: Tensor) -> Tensor:
    return _per_example(out, y).mean() + s * F.cross_entropy(out @ out.T, torch.arange(len(out)))


def _counted(s: float, out: Tensor, y: Tensor) -> Tensor:
    return _per_example(out, y).mean() / (1 + s * (out > 0).float().mean())


LOSSES: dict[str, Callable[[float, Tensor, Tensor], Tensor]] = {
    "standardised outputs": lambda s, out, y: _per_example(_blend(s, out, (out - out.mean(0)) / out.std(0)), y).mean(),
    "normalised by its mean": _normalised,
    "pairwise hinge": _hinge,
    "contrastive": _contrastive,
    "softmax over the batch": lambda s, out, y: _per_example(out, y).mean() + s * (out.softmax(0) * out).sum(),
    "counts positive outputs": _counted,
}

CLEAN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": F.cross_entropy,
    "label smoothing": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "squares": lambda out, y: F.mse_loss(out, F.one_hot(y, CLASSES).float()),
    "focal": lambda out, y: ((1 - torch.exp(-_per_example(out, y))) ** 2 * _per_example(out, y)).mean(),
    "dropout": lambda out, y: F.cross_entropy(F.dropout(out, 0.1), y, reduction="sum"),
}

CLEAN_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "MLP": (lambda: Net(dropout=0.0), lambda n: torch.randn(n, FEATURES)),
    "MLP, dropout": (lambda: Net(dropout=0.5), lambda n: torch.randn(n, FEATURES)),
    "CNN": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(72, CLASSES)
        ),
        lambda n: torch.randn(n, 1, 5, 5),
    ),
    "GRU and transformer": (Words, lambda n: torch.randint(0, 64, (n, 6))),
    "experts": (Experts, lambda n: torch.randn(n, FEATURES)),
    "vision transformer": (Patches, lambda n: torch.randn(n, 1, 8, 8)),
}


def found_in_model(model: nn.Module, x: Tensor) -> bool:
    return check_model(model, (x,), {}, len(x)).mixes


def found_in_loss(model: nn.Module, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[bool, str]:
    watch, y = LossWatch(model), torch.randint(0, CLASSES, (len(x),))
    try:
        loss(watch.wrap(model(x), len(x), scaled=False), y).backward()
    except UnsupportedModelError:
        return True, watch.status
    return False, watch.status


def checks_until_found(check: Callable[[], bool]) -> int | None:
    return next((k for k in range(1, MOST + 1) if check()), None)


def summary(found: list[tuple[float, int | None]]) -> dict[str, Any]:
    """Of pairs of a strength, and the number of the check that found it."""
    decades = {}
    for low in range(-4, 0):
        inside = [k for s, k in found if low <= math.log10(s) < low + 1 or (low == -1 and s >= 1)]
        if inside:
            share = sum(k == 1 for k in inside) / len(inside)
            decades[f"1e{low}..1e{low + 1}"] = {"n": len(inside), "found_by_one_check": round(share, 4)}
    counts = [k for _, k in found if k is not None]
    return {
        "n": len(found),
        "found_by_one_check": round(sum(k == 1 for _, k in found) / len(found), 4),
        "mean_checks_until_found": round(statistics.fmean(counts), 3) if counts else None,
        f"not_found_in_{MOST}": len(found) - len(counts),
        "by_strength": decades,
    }


def detection(seeds: int, precision: str) -> dict[str, Any]:
    results: dict[str, Any] = {"models": {}, "losses": {}}
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "float32"):
        for kind, families in (("models", MODELS), ("losses", LOSSES)):
            for name, family in families.items():
                found: list[tuple[float, int | None]] = []
                for seed in range(seeds):
                    torch.manual_seed(seed)
                    s = 10 ** random.Random(f"{name} {seed}").uniform(-4, 0)
                    found.append((s, checks_until_found(_check_of(kind, family, s))))
                results[kind][name] = summary(found)
    return results


def _check_of(kind: str, family: Any, s: float) -> Callable[[], bool]:
    if kind == "models":
        mixing = Net(family(s))
        return lambda: found_in_model(mixing, torch.randn(ROWS, FEATURES))
    clean = Net()
    return lambda: found_in_loss(clean, torch.randn(ROWS, FEATURES), lambda out, y: family(s, out, y))[0]


def late_gates(seeds: int) -> dict[str, Any]:
    """Steps from the opening of a gate to its refusal, with a check at every step with a small probability."""
    steps = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        draw = random.Random(seed)
        opens, s = draw.randrange(20, 200), 10 ** draw.uniform(-2, 0)
        model = Net(lambda m, h, opens=opens, s=s: h - s * h.mean(0) if m.steps > opens else h)  # type: ignore[misc]
        for step in range(opens + int(20 / CHECK_PROBABILITY)):
            x = torch.randn(ROWS, FEATURES)
            if draw.random() < CHECK_PROBABILITY and found_in_model(model, x):
                steps.append(step - opens)
                break
            model(x)
    mean = round(statistics.fmean(steps), 2) if steps else None
    return {
        "n": seeds,
        "found": len(steps),
        "check_probability": CHECK_PROBABILITY,
        "mean_steps_after_opening": mean,
        "expected": 1 / CHECK_PROBABILITY - 1,
    }


def false_alarms(seconds: float, most: int) -> dict[str, Any]:
    end = time.perf_counter() + seconds
    counts: dict[str, Counter[str]] = {}
    turn = 0
    spent = {"model": 0.0, "loss": 0.0}
    while time.perf_counter() < end and turn < most:
        for name, (make, batch) in CLEAN_MODELS.items():
            for precision in ("float32", "bf16 autocast"):
                count = counts.setdefault(f"{name}, {precision}", Counter())
                loss_name = random.Random(turn).choice(list(CLEAN_LOSSES))
                with torch.autocast("cpu", torch.bfloat16, enabled=precision != "float32"):
                    torch.manual_seed(turn)
                    rows, start = random.Random(turn).randrange(2, 2 * ROWS), time.perf_counter()
                    model, x = make(), batch(rows)
                    verdict = check_model(model, (x,), {}, rows)
                    middle = time.perf_counter()
                    refused, status = found_in_loss(model, x, CLEAN_LOSSES[loss_name])
                spent["model"] += middle - start
                spent["loss"] += time.perf_counter() - middle
                count.update(n=1, model_false_alarms=verdict.mixes, loss_false_alarms=refused)
                count.update(model_not_comparable=not verdict.comparable, loss_not_checked=status != "checked")
        turn += 1
    n = sum(c["n"] for c in counts.values())
    alarms = sum(c["model_false_alarms"] + c["loss_false_alarms"] for c in counts.values())
    return {
        "n": n,
        "false_alarms": alarms,
        "upper_bound_95": round(1 - 0.05 ** (1 / n), 8) if n and not alarms else None,
        "mean_ms": {k: round(1e3 * v / max(n, 1), 3) for k, v in spent.items()},
        "by_network": {name: dict(count) for name, count in counts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=50, help="networks per family")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the false alarms")
    parser.add_argument("--batches", type=int, default=100_000, help="no more checked batches than this")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="3 seeds and 5 seconds: does it run?")
    options = parser.parse_args()
    seeds, seconds = (3, 5.0) if options.quick else (options.seeds, options.seconds)
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {
        "what": "detection of models and losses that mix examples, and false alarms on those that do not",
        **description("cpu", options.threads),
        "seeds": seeds,
        "strengths": "log-uniform from 1e-4 to 1",
        "rows": ROWS,
        "detection": {precision: detection(seeds, precision) for precision in ("float32", "bf16 autocast")},
        "late_gates": late_gates(seeds),
    }
    results["false_alarms"] = false_alarms(seconds, math.ceil(options.batches / (2 * len(CLEAN_MODELS))))
    write(options.out, results)
    alarms = results["false_alarms"]
    print(f"{options.out}: {alarms['false_alarms']} false alarms in {alarms['n']} checked batches")


if __name__ == "__main__":
    main()
