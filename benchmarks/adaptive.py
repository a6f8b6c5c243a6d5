"""dyn-adaptive beside other proved strategies at equal epsilon, judged by training examples that are held out.

    python benchmarks/adaptive.py --setting digits --out benchmarks/results/adaptive.json
    python benchmarks/adaptive.py --setting mnist --out benchmarks/results/adaptive.json

Each strategy is calibrated to the same proved epsilon (dyn-adaptive by its filter, the others by PLD), and trained at
every learning rate with every seed. The best rate of each strategy is the one with the best mean; the test set is not
read. Runs that are in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import description, write

from gradveil.training.config import RunConfig
from gradveil.training.inputs import hold_out, prepare
from gradveil.training.loop import train

STRATEGIES = ("baseline", "dyn-s-decay", "dyn-sigma", "dyn-private", "dyn-adaptive")
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {
        "run": {"dataset": "digits", "model": "paper-cnn", "clip": 2.0, "batch_size": 64, "steps": 300, "delta": 1e-4},
        "epsilons": (1.0, 3.0),
        "lrs": (0.05, 0.1, 0.2, 0.5),
        "held_out": 300,
    },
    "mnist": {
        "run": {
            "dataset": "mnist",
            "features": "balanced-scattering",
            "model": "linear",
            "clipping": "flat",
            "clip": 0.1,
            "batch_size": 2400,
            "steps": 200,
            "momentum": 0.9,
        },
        "epsilons": (0.823,),
        "lrs": (1.0, 2.0, 4.0, 8.0),
        "held_out": 5000,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=list(SETTINGS), required=True)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    setting, inputs = SETTINGS[args.setting], None
    wanted = [
        (seed, epsilon, strategy, lr)
        for seed in args.seeds
        for epsilon in setting["epsilons"]
        for strategy in args.strategies
        for lr in setting["lrs"]
    ]
    for seed, epsilon, strategy, lr in wanted:
        key = {"setting": args.setting, "strategy": strategy, "epsilon": epsilon, "lr": lr, "seed": seed}
        if any(all(row[k] == v for k, v in key.items()) for row in found["rows"]):
            continue
        steps = setting["run"]["steps"]
        once = {"evaluate_every": steps, "checkpoint_every": steps, "data_dir": args.data_dir}
        config = RunConfig.check({**setting["run"], "strategy": strategy, "epsilon": epsilon, "lr": lr, **once})
        if inputs is None:
            inputs = hold_out(prepare(config), setting["held_out"])
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as where:
            result = train(config, run_dir=Path(where) / "run", seed=seed, inputs=inputs)
        row = {
            **key,
            "accuracy": result.accuracy,
            "steps": result.steps,
            "ended": result.ended,
            "proved": result.statement.proved.epsilon,
            "noise_first": result.noise_std_first,
            "noise_last": result.noise_std_last,
            "seconds": round(time.perf_counter() - began, 1),
        }
        found["rows"].append(row)
        found |= {"machine": description("cpu", torch.get_num_threads()), "settings": SETTINGS}
        write(args.out, found)
        print(row, flush=True)


if __name__ == "__main__":
    main()
