"""Damaged inputs to every parser, very many of them.

    python tests/fuzz/campaign.py --inputs 100000 --out benchmarks/results/fuzz.json

Each input is a whole file of a small run, damaged by a seeded generator (targets.py): bytes changed, cut, put in; JSON
values exchanged, with hashes and chains computed anew where there are such. Counted for each parser: inputs that were
refused with one of gradveil's errors, that were taken (the damage does not show, or the content is only shown), and
what is wrong: another exception, more than ten seconds, more than 500 MiB, a changed ledger that was accepted. The
seed of an input that went wrong is kept: ``--target NAME --seed N --inputs 1`` repeats it, with its traceback.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "benchmarks")]

from machine import description, write  # noqa: E402
from targets import TARGETS, Samples, made_samples, outcome  # noqa: E402

LONGEST = 10.0  # seconds
MOST = 500  # MiB, beyond what the process has at the start


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {LONGEST:g} s")


def tried(name: str, samples: Samples, seed: int, *, show: bool) -> str:
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        return outcome(TARGETS[name], samples, seed)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if show:
            traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {str(error)[:80]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first input")
    parser.add_argument("--target", choices=list(TARGETS), action="append")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time, with what there is")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _too_long)
    warnings.simplefilter("ignore")
    names = args.target or list(TARGETS)
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    wrong: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        samples = made_samples(Path(folder))
        here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for number in range(args.inputs):
            name, seed = names[number % len(names)], args.seed + number // len(names)
            found = tried(name, samples, seed, show=args.out is None)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            if peak > here + MOST:
                found, here = f"more than {MOST} MiB", peak
            counts[name][found if found in ("refused", "taken") else "wrong"] += 1
            if found not in ("refused", "taken"):
                wrong.setdefault(f"{name}: {found}", {"seed": seed, "times": 0})["times"] += 1
            last = number + 1 == args.inputs or time.monotonic() - began > args.seconds
            if args.out is not None and (last or number % 2000 == 1999):
                tried_so_far = {"inputs": number + 1, "asked": args.inputs, "first_seed": args.seed}
                facts = {"seconds": round(time.monotonic() - began), "peak_mib": round(peak), **tried_so_far}
                told = {name: dict(sorted(count.items())) for name, count in counts.items()}
                write(args.out, description("cpu", 1) | facts | {"targets": told, "wrong": wrong})
                print(f"{number + 1} inputs, wrong: {wrong}", flush=True)
            if last:
                break
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
