"""Accuracy on digits with noise on a lattice and in floating point: the same runs, over several seeds.

python benchmarks/noise_accuracy.py --seeds 20 --out benchmarks/results/noise_accuracy.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from machine import description, write
from scipy import stats

from gradveil.training.config import RunConfig
from gradveil.training.loop import train

SETTINGS = {"dataset": "digits", "steps": 200, "batch_size": 200, "lr": 0.5, "clip": 1.0, "sigma": 2.0}


def accuracy(noise: str, seed: int) -> float:
    config = RunConfig.check({**SETTINGS, "noise": noise, "evaluate_every": 200, "checkpoint_every": 200})
    with tempfile.TemporaryDirectory() as folder:
        found = train(config, run_dir=Path(folder) / "run", seed=seed).accuracy
    assert found is not None
    return float(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    for noise in ("float", "lattice"):
        found = [accuracy(noise, seed) for seed in range(given.seeds)]
        rows[noise] = {
            "mean": round(statistics.mean(found), 4),
            "standard_deviation": round(statistics.stdev(found), 4),
            "of_seeds": [round(value, 4) for value in found],
        }
        print(noise, rows[noise]["mean"], rows[noise]["standard_deviation"], flush=True)
    test = stats.ttest_ind(rows["float"]["of_seeds"], rows["lattice"]["of_seeds"])
    results = {**description("cpu", 1), "settings": SETTINGS, "seeds": given.seeds, "noise": rows}
    results["p_of_t_test_for_equal_means"] = round(float(test.pvalue), 4)
    print("p", results["p_of_t_test_for_equal_means"])
    if given.out is not None:
        write(given.out, results)


if __name__ == "__main__":
    main()
