"""How strong map is, on victims, weights and noise of seeds that nothing was tuned on.

    python benchmarks/attack_strength.py --out benchmarks/results/attack_strength.json
    python benchmarks/attack_strength.py --cells mnist-6,trained --victims 4 --out /tmp/strength.json

Noised cells: an untrained CPL net, C = 4, noise for a batch of 600, 5 000 public images (LFW: what is left of 2 267),
one example behind each gradient. Undefended cells: a trained paper CNN, an untrained vision transformer, batches of an
untrained CPL net on CIFAR-10, batches of a fully connected ReLU network (analytic). Victims are never among the public
images. Every cell is written when it is done.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import description, write
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.attacks.methods.analytic import Analytic
from gradveil.attacks.methods.inversion import MAP
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.observation.views import Public
from gradveil.attacks.scoring.evaluate import score
from gradveil.attacks.trial import AttackConfig, run
from gradveil.training import data, models

SETS = ("mnist", "fashion-mnist", "cifar10", "lfw")


class VisionTransformer(nn.Module):
    """Patches of 4, two blocks of width 64, mean pooling."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(shape[0], 64, 4, 4)
        self.position = nn.Parameter(0.02 * torch.randn(1, (shape[1] // 4) * (shape[2] // 4), 64))
        block = nn.TransformerEncoderLayer(
            64, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x).mean(1)))


def noised(name: str, sigma: float, options: argparse.Namespace) -> dict[str, Any]:
    settings = {"strategy": "baseline", "view": "per-example-noised", "attack": "map", "sigma": sigma}
    size = {"victims": options.victims, "iterations": options.iterations, "seed": options.seed}
    outcome = run(AttackConfig(**settings, **size), data.load(name))
    below = outcome.score.guess_psnr - outcome.score.psnr
    return outcome.to_dict()["result"] | {"most_below_guess": float(below.max()), "kappa": outcome.kappa}


def undefended(name: str, module: nn.Module, attack: Any, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    loaded = data.load(name)
    victims = max(1, options.victims // batch)
    order = torch.randperm(len(loaded.x_train), generator=torch.Generator().manual_seed(options.seed))
    x, y = loaded.x_train[order], loaded.y_train[order]
    count, shape = victims * batch, (victims, batch)
    public = Public(x[count : count + 5000], y[count : count + 5000])
    view = "per-example" if batch == 1 else "batch"
    seen, secret = observe(
        module,
        x[:count].unflatten(0, shape),
        y[:count].unflatten(0, shape),
        view=view,
        classes=loaded.classes,
        generator=torch.Generator().manual_seed(options.seed),
        public=public,
    )
    found = attack.run(seen, iterations=options.iterations, seed=options.seed)
    near = x[: max(1000, count)]
    index = torch.arange(count).view(shape)
    judged = score(found, secret, mean_image=public.x.mean(0), candidates=near, candidate_index=index)
    return judged.summary() | {"above_25_db": judged.success_at(25.0), "least_psnr": float(judged.psnr.min())}


def trained_cnn(options: argparse.Namespace) -> dict[str, Any]:
    loaded = data.load("mnist")
    module = models.paper_cnn(loaded.input_shape, 10, generator=torch.Generator().manual_seed(options.seed))
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(250):
        rows = torch.randint(len(loaded.x_train), (200,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(module(loaded.x_train[rows]), loaded.y_train[rows]).backward()
        optimizer.step()
    module.eval()
    with torch.no_grad():
        accuracy = float((module(loaded.x_test[:2000]).argmax(1) == loaded.y_test[:2000]).double().mean())
    return undefended("mnist", module, MAP(restarts=1), 1, options) | {"accuracy": accuracy}


def transformer(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    return undefended("mnist", VisionTransformer((1, 28, 28), 10).eval(), MAP(restarts=1), 1, options)


def colour_batches(batch: int, options: argparse.Namespace) -> dict[str, Any]:
    module = models.cpl_net((3, 32, 32), 10, generator=torch.Generator().manual_seed(options.seed))
    return undefended("cifar10", module, MAP(restarts=1), batch, options)


def relu_batches(batch: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    sizes = (784, 300, 100, 10)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return undefended("mnist", nn.Sequential(nn.Flatten(), *layers[:-1]), Analytic(), batch, options)


def cells() -> dict[str, Callable[[argparse.Namespace], dict[str, Any]]]:
    found: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "trained": trained_cnn,
        "transformer": transformer,
    }
    for batch in (8, 16):
        found[f"relu-B{batch}"] = lambda options, batch=batch: relu_batches(batch, options)
    for name in SETS:
        for sigma in (6.0, 1.0):
            found[f"{name}-{sigma:g}"] = lambda options, name=name, sigma=sigma: noised(name, sigma, options)
    for batch in (4, 8):
        found[f"cifar10-B{batch}"] = lambda options, batch=batch: colour_batches(batch, options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", type=int, default=8, help="examples in each cell")
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--seed", type=int, default=20261)
    parser.add_argument("--cells", default=",".join(cells()))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    every = cells()
    results: dict[str, Any] = {**description("cpu", options.threads), "cells": {}}
    results["settings"] = {"victims": options.victims, "iterations": options.iterations, "seed": options.seed}
    for name in options.cells.split(","):
        started = time.perf_counter()
        found = every[name](options)
        results["cells"][name] = found | {"seconds": round(time.perf_counter() - started, 1)}
        print(f"{name}: {found['psnr_median']:.1f} dB", flush=True)
        write(options.out, results)


if __name__ == "__main__":
    main()
