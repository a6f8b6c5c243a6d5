"""Tries settings for a recipe: a grid at one epsilon on one data set, one line of JSON for each run.

    python benchmarks/tune_recipes.py --dataset mnist --epsilon 0.823 --device cuda --minutes 10 \\
        --models linear scatter-cnn --sizes 2400x1200 6000x600 --lrs 0.5 1 2 4 --out tuning.jsonl
    python benchmarks/tune_recipes.py --dataset mnist --epsilon 0.823 --device cuda --top 3 --seeds 1 2 3 \\
        --out tuning.jsonl

The first command runs the grid with one seed, the second the best three of what is in the file with three. Runs that
are in the file are not repeated. Each is an ordinary `gradveil train` run with that seed, on all training examples but
5 000 that are held out (--held-out), and its accuracy is of those: the test set is not read. Features are computed once
for all runs. The number of lines for a data set is the ``tried`` of its recipe: each is a run on the same data that was
looked at. What was chosen is then run once more, on all training examples:

    python benchmarks/tune_recipes.py --dataset mnist --epsilon 0.823 --top 1 --publish --seeds 1 2 3 --out tuning.jsonl

which reads the test set, for the figure that is published and for nothing else.

Sizes are expected batch x steps. Averages are decays of the moving average of the weights; 0 keeps none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import description

from gradveil.training.config import RunConfig
from gradveil.training.inputs import Inputs, hold_out, prepare
from gradveil.training.loop import train


def main() -> None:
    args = _arguments()
    done = _read(args.out, args)
    if args.publish and not args.top:
        raise SystemExit("--publish reads the test set: choose by held-out examples first, then add --top 1.")
    wanted = _best([x for x in done if x.get("held_out")], args.top) if args.top else list(_grid(args))
    tuner = _Tuner(args, done)
    for seed in args.seeds:
        for settings in wanted:
            if not tuner.run(settings, seed):
                print("out of time; the same command goes on from here")
                return _show(tuner.done)
    _show(tuner.done)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--features", default="scattering")
    parser.add_argument("--models", nargs="+", default=["linear"])
    parser.add_argument("--activation", default="tanh", help="of the convolutional models")
    parser.add_argument("--sizes", nargs="+", default=["2400x1200"])
    parser.add_argument("--lrs", nargs="+", type=float, default=[1.0])
    parser.add_argument("--clips", nargs="+", type=float, default=[0.1])
    parser.add_argument("--momentums", nargs="+", type=float, default=[0.9])
    parser.add_argument("--averages", nargs="+", type=float, default=[0.0])
    parser.add_argument("--strategies", nargs="+", default=["baseline"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--top", type=int, default=0, help="instead of the grid: the best so many in the file")
    parser.add_argument("--held-out", type=int, default=5000, help="training examples to judge by")
    parser.add_argument("--publish", action="store_true", help="with --top: train on everything, judge by the test set")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after so long")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--physical-batch-size", type=int)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _grid(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    axes = (args.models, args.strategies, args.sizes, args.clips, args.momentums, args.averages, args.lrs)
    for model, strategy, size, clip, momentum, average, lr in itertools.product(*axes):
        batch, _, steps = size.partition("x")
        yield {
            "dataset": args.dataset,
            "features": args.features,
            "model": model,
            **({} if model == "linear" else {"activation": args.activation}),
            "strategy": strategy,
            "clipping": "flat",
            "clip": clip,
            "epsilon": args.epsilon,
            "delta": args.delta,
            "batch_size": int(batch),
            "steps": int(steps),
            "lr": lr,
            "momentum": momentum,
            "average": average,
        }


class _Tuner:
    """Runs what is not in the file, and adds it there."""

    def __init__(self, args: argparse.Namespace, done: list[dict[str, Any]]) -> None:
        self.args, self.done = args, done
        self.began = time.perf_counter()
        self.inputs: Inputs | None = None

    def run(self, settings: dict[str, Any], seed: int) -> bool:
        """False where there is no time for it."""
        held_out = 0 if self.args.publish else self.args.held_out
        run = (settings, seed, held_out)
        if any((line["settings"], line["seed"], line.get("held_out", 0)) == run for line in self.done):
            return True
        if time.perf_counter() - self.began > 60 * self.args.minutes:
            return False
        args, steps = self.args, settings["steps"]
        once = {"evaluate_every": steps, "checkpoint_every": steps, "physical_batch_size": args.physical_batch_size}
        config = RunConfig.check({**settings, **once, "device": args.device, "data_dir": args.data_dir})
        if self.inputs is None or self.inputs.features != config.features:
            self.inputs = prepare(config)
            if held_out:
                self.inputs = hold_out(self.inputs, held_out)
        began = time.perf_counter()
        where = Path(tempfile.mkdtemp())
        try:
            result = train(config, run_dir=where / "run", seed=seed, inputs=self.inputs)
        finally:
            shutil.rmtree(where)
        line = {
            "settings": settings,
            "seed": seed,
            "held_out": held_out,
            "accuracy": result.accuracy,
            "accuracy_unaveraged": result.accuracy_unaveraged,
            "proved": result.statement.proved.epsilon,
            "seconds": round(time.perf_counter() - began, 2),
            **description(args.device, torch.get_num_threads()),
        }
        self.done.append(line)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with open(args.out, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(_told(settings), f"seed {seed}  {result.accuracy:.4f}  {line['seconds']} s", flush=True)
        return True


def _read(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs in the file that are of this data set and epsilon."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may have been cut off
    return [x for x in whole if (x["settings"]["dataset"], x["settings"]["epsilon"]) == (args.dataset, args.epsilon)]


def _by_settings(done: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[float]]]:
    """Settings with the accuracies of their seeds, the best mean first."""
    found: dict[str, list[float]] = {}
    for line in done:
        if not line.get("held_out"):
            continue  # judged by the test set: nothing is chosen by that
        found.setdefault(json.dumps(line["settings"]), []).append(line["accuracy"])
    return [(json.loads(k), v) for k, v in sorted(found.items(), key=lambda kv: -statistics.fmean(kv[1]))]


def _best(done: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return [settings for settings, _ in _by_settings(done)[:count]]


def _told(settings: dict[str, Any]) -> str:
    names = ("model", "strategy", "batch_size", "steps", "clip", "lr", "momentum", "average")
    return "  ".join(f"{name} {settings[name]}" for name in names)


def _show(done: list[dict[str, Any]]) -> None:
    print(f"\n{len(done)} runs; the best settings:")
    for settings, accuracies in _by_settings(done)[:10]:
        print(f"{statistics.fmean(accuracies):.4f} ({len(accuracies)} seeds)  {_told(settings)}")


if __name__ == "__main__":
    main()
