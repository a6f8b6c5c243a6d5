"""How far the audit's bounds get on a plain Gaussian mechanism whose epsilon is known: medians over many seeds.

python benchmarks/audit_bounds.py --out benchmarks/results/audit_bounds.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from machine import description, write

from gradveil.audit import Trials, clopper_pearson, gaussian_epsilon, gaussian_family, one_run

SIGMAS = (0.7, 1.0, 2.0, 3.0, 5.0)
BOUNDS = {"one-run": one_run, "Gaussian family": gaussian_family, "Clopper-Pearson": clopper_pearson}
DELTA = 1e-5


def trials(sigma: float, bits: int, seed: int) -> Trials:
    rng = np.random.default_rng([seed, round(1000 * sigma)])
    present = rng.random(bits) < 0.5
    scores = present + sigma * rng.standard_normal(bits)
    return Trials(scores=scores, present=present, statistic="output", threat_model="sees it", scale_is_public=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--bits", type=int, default=10_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for sigma in SIGMAS:
        truth = gaussian_epsilon(1.0 / sigma, DELTA)
        made = [trials(sigma, args.bits, seed) for seed in range(args.seeds)]
        for name, bound in BOUNDS.items():
            found = np.array([bound(each, delta=DELTA).epsilon for each in made])
            row = {"sigma": sigma, "truth": truth, "bound": name, "median": float(np.median(found))}
            row |= {"low": float(np.quantile(found, 0.05)), "above": int((found > truth).sum())}
            rows.append(row)
            print(row, flush=True)
    settings = {"seeds": args.seeds, "bits": args.bits, "delta": DELTA}
    write(args.out, {"machine": description("cpu", 1), **settings, "rows": rows})


if __name__ == "__main__":
    main()
