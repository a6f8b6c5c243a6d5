"""What becomes of AdaClip's estimated spread, by the number of coordinates of a layer: noise alone decides it.

python benchmarks/adaclip_spread.py --out benchmarks/results/adaclip_spread.json

The released mean of a layer is noise and the mean of clipped examples. Here every example is longer than its bound, as
from the start of training, and points in a random direction. The spread is followed for some hundred steps; its growth
per step, measured and predicted, is a function of coordinates, batch and sigma alone.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from machine import description, write

from gradveil.clipping import Group
from gradveil.mechanism.clip_bounds import AdaClip
from gradveil.mechanism.strategies import parameters

RECTIFIED = 2.0 * math.exp(-0.5) / math.sqrt(2 * math.pi)  # E max(z^2 - 1, 0) of a standard normal z
LAYERS = {"conv 3x3x32 on MNIST": 288, "conv 3x3x64": 18_432, "linear on MNIST": 31_360}
SETTINGS = ((600, 6.0), (600, 2.0), (600, 20.0), (64, 6.0))  # batch, sigma
BETA2 = 0.9


def predicted(coordinates: int, batch: int, sigma: float) -> float:
    """By what the squared spread is multiplied in a step: rectified noise, and the sampling of clipped directions."""
    return BETA2 + (1 - BETA2) * (RECTIFIED * coordinates * (sigma / batch) ** 2 + 1 / batch)


def measured(coordinates: int, batch: int, sigma: float, *, steps: int, seed: int, length: float = 1e3) -> float:
    """The same, over ``steps`` of the rule itself on clipped examples and noise."""
    generator = torch.Generator().manual_seed(seed)
    plan = parameters("adaclip", steps=steps, sigma=sigma)
    group = Group("layer", ("w",))
    rule = AdaClip(plan, [group], parameters={"w": torch.zeros(coordinates)}, h1=1e-300, h2=1e300)
    rule.spread["w"].fill_(1.0)
    rule.spread["w"] = rule.spread["w"].double()
    rule.mean["w"] = rule.mean["w"].double()
    rule.whitening = None
    rule._refresh()
    start = float(rule.spread["w"].square().mean())
    for _ in range(steps):
        assert rule.whitening is not None
        mean, scale = rule.whitening["w"]
        # A sum of ``batch`` clipped directions, drawn at once: in whitened coordinates each has length 1.
        directions = torch.randn(coordinates, generator=generator, dtype=torch.float64) * math.sqrt(batch / coordinates)
        noise = sigma * torch.randn(coordinates, generator=generator, dtype=torch.float64)
        rule.learn((), {"w": mean + scale * (directions + noise) / batch}, sigma, float(batch))
    return float((rule.spread["w"].square().mean() / start) ** (1 / steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for batch, sigma in SETTINGS:
        for name, size in LAYERS.items():
            row = {"layer": name, "coordinates": size, "batch": batch, "sigma": sigma}
            row |= {"predicted": predicted(size, batch, sigma)}
            row |= {"measured": measured(size, batch, sigma, steps=args.steps, seed=1)}
            rows.append(row)
            print(row, flush=True)
    write(args.out, {"machine": description("cpu", 1), "steps": args.steps, "rows": rows})


if __name__ == "__main__":
    main()
