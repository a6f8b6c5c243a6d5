"""``gradveil demo``: four strategies on digits, one table."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil.cli._output import number, table
from gradveil.config import RunConfig

if TYPE_CHECKING:
    from gradveil.training import Result

# Digits has 1347 training examples, so a batch of 128 is a large share of them and epsilon is large too: the demo shows
# how the strategies differ, not a setting to copy. The batch reading of l2-max is the one with the published accuracy.
SHARED: dict[str, Any] = {
    "dataset": "digits",
    "clip": 1.0,
    "sigma": 3.0,
    "lr": 0.5,
    "steps": 600,
    "batch_size": 128,
}
RUNS: dict[str, dict[str, Any]] = {
    "non-private": {},
    "baseline": {},
    "dyn-s-decay": {},
    "dyn-s-sigma": {"reading": "batch", "sigma_end": 2.0},
}


@click.command("demo")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where to keep the runs (default: a new folder).")
@click.option("--seed", type=int, default=None, help="Make it repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(run_dir: Path | None, seed: int | None, as_json: bool) -> None:
    """Train non-private, baseline, dyn-s-decay and dyn-s-sigma on digits and compare them."""
    from gradveil.cli.train import _train
    from gradveil.training import train

    where = run_dir or Path(tempfile.mkdtemp(prefix="gradveil-demo-"))
    results: dict[str, Result] = {}
    for strategy, extra in RUNS.items():
        config = RunConfig.check(SHARED | {"strategy": strategy} | extra)
        results[strategy] = _train(
            lambda tell, c, s=strategy: train(c, run_dir=where / s, seed=seed, progress=tell), config
        )
    if as_json:
        click.echo(json.dumps({name: r.to_dict() for name, r in results.items()}))
        return
    rows = []
    for name, r in results.items():
        paper = r.statement.paper
        rows.append(
            [
                name,
                f"{r.accuracy:.3f}",
                number(r.statement.proved.epsilon),
                number(paper["MA"].epsilon) if paper else "-",
                "not run",
                f"{number(r.noise_std_first)} / {number(r.noise_std_last)}",
                number(r.seconds_per_step, 3),
            ]
        )
    table(
        [
            "strategy",
            "accuracy",
            "eps proved",
            "eps as published (MA)",
            "eps audited",
            "noise std first/last",
            "s/step",
        ],
        rows,
        title="digits: what each strategy costs and what it proves",
        note="eps proved: add or remove one example, delta 1e-5, PLD. Infinite where the noise depends on the data "
        "(l2-max) or there is none. The published figure is not a guarantee.",
    )
    click.echo(f"\nThe runs, with their ledgers, are in {where}. Try: gradveil ledger show {where / 'baseline'}")
