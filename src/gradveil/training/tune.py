"""A search for settings whose selection is charged: accounting/repeat_and_select.py says by which theorem.

What may be tried are settings that do not change what a run spends. Runs are judged by their test accuracy: the test
set must hold none of the examples that are protected.
"""

from __future__ import annotations

import itertools
import json
import random
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.accounting.ledger import read
from gradveil.accounting.manifest import bind_written
from gradveil.accounting.repeat_and_select import selected_epsilon
from gradveil.errors import ConfigError, RunDirectoryError
from gradveil.training.config import RunConfig
from gradveil.training.loop import Result, train
from gradveil.training.run_directory import write_whole

FREE = ("lr", "clip", "momentum", "weight_decay", "optimizer", "activation", "dropout", "average")
FILE_NAME = "tune.json"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The run that was selected; ``epsilon`` is that of the whole search, ``one_run`` that of a run by itself."""

    run_dir: Path
    accuracy: float
    chosen: Mapping[str, Any]
    epsilon: float
    one_run: float
    delta: float


def candidates(base: Mapping[str, Any], tried: Mapping[str, Sequence[Any]]) -> list[RunConfig]:
    """Every combination, checked; refused where a setting changes what is spent."""
    wrong = sorted(set(tried) - set(FREE))
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} cannot be tried: the theorem is for runs that all spend the same. What can: "
            f"{', '.join(FREE)}."
        )
    if not tried or not all(tried.values()):
        raise ConfigError("nothing is to be tried. Give at least one --try NAME=VALUE,VALUE.")
    made = itertools.product(*tried.values())
    return [RunConfig.check({**base, **dict(zip(tried, values, strict=True))}) for values in made]


def tune(
    base: Mapping[str, Any],
    tried: Mapping[str, Sequence[Any]],
    *,
    run_dir: Path,
    mean: float,
    seed: int | None = None,
    tell: Callable[[int, RunConfig, Result | None], None] = lambda *_: None,
) -> Tuned:
    """Train a random number of runs (geometric with ``mean``), each with settings drawn from ``tried``; keep the best.

    The others are deleted, and how many there were is written nowhere: the theorem covers the release of the best run
    alone. ``seed`` makes the search repeatable, and then K is known to anyone who knows it: for experiments.
    """
    configs = candidates(base, tried)
    if mean < 1:
        raise ConfigError(f"{mean:g} runs on average: a search has at least one.")
    if run_dir.exists() and any(run_dir.iterdir()):
        raise RunDirectoryError(f"{run_dir} is not empty. Give another --run-dir.")
    chance = random.Random(seed) if seed is not None else secrets.SystemRandom()
    count = 1
    while chance.random() >= 1 / mean:
        count += 1
    best: tuple[Result, RunConfig] | None = None
    for number in range(count):
        config = configs[chance.randrange(len(configs))]
        tell(number, config, None)
        result = train(
            config, run_dir=run_dir / f"try-{secrets.token_hex(4)}", seed=None if seed is None else seed + number
        )
        tell(number, config, result)
        if best is None or result.accuracy > best[0].accuracy:
            best, loser = (result, config), best[0] if best is not None else None
        else:
            loser = result
        if loser is not None:
            shutil.rmtree(loser.run_dir)
    assert best is not None
    return _selected(*best, run_dir, tried, mean)


def _selected(result: Result, config: RunConfig, run_dir: Path, tried: Mapping[str, Any], mean: float) -> Tuned:
    where = run_dir / "selected"
    result.run_dir.rename(where)
    contents = read(where / "ledger.jsonl")
    found = Tuned(
        run_dir=where,
        accuracy=result.accuracy,
        chosen={name: getattr(config, name) for name in tried},
        epsilon=selected_epsilon(contents.header, contents.charged(), mean=mean),
        one_run=result.statement.proved.epsilon,
        delta=contents.header.delta,
    )
    told = {
        "theorem": "Papernot and Steinke 2022 (arXiv 2110.03620): repeat and select, geometric number of runs; by RDP",
        "mean_runs": mean,
        "tried": {name: list(values) for name, values in tried.items()},
        "chosen": dict(found.chosen),
        "epsilon": found.epsilon,
        "epsilon_of_one_run": found.one_run,
        "delta": found.delta,
        "neighbours": "add-remove",
        "assumes": "the test set, by which runs were compared, holds none of the protected examples; only the selected "
        "run is released, and not how many were tried",
    }
    write_whole(where / FILE_NAME, (json.dumps(told, indent=1) + "\n").encode())
    bind_written(where, [where / FILE_NAME])
    return found
