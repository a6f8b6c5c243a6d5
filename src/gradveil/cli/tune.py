"""``gradveil tune``: choose settings by a search that is charged."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gradveil.cli._output import upper
from gradveil.errors import ConfigError


@click.command("tune")
@click.option("--config", type=click.Path(path_type=Path), required=True, help="Settings of every run, as for train.")
@click.option(
    "--try", "tried", multiple=True, required=True, metavar="NAME=V,V,...", help="Values of a setting to try."
)
@click.option("--mean-runs", type=float, default=5.0, show_default=True, help="How many runs are trained on average.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), required=True, help="A new folder; the best run stays in it."
)
@click.option("--seed", type=int, help="Make the search repeatable. For experiments: the number of runs is then known.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    config: Path, tried: tuple[str, ...], mean_runs: float, run_dir: Path, seed: int | None, as_json: bool
) -> None:
    """Search for settings, privately: train a random number of runs, keep the best, and charge the selection.

    By the theorem of Papernot and Steinke (2022) the best of a geometric number of runs spends little more than one.
    The other runs are deleted, and their number is not kept: only the selected run may be shown. Runs are compared by
    test accuracy, so the test set must hold none of the protected examples. What may be tried: lr, clip, momentum,
    weight_decay, optimizer, activation, dropout, average.
    """
    from gradveil.training.config import read_toml
    from gradveil.training.tune import tune

    base, values = read_toml(config), _tried(tried)
    found = tune(base, values, run_dir=run_dir, mean=mean_runs, seed=seed, tell=_tell)
    if as_json:
        click.echo(json.dumps(asdict(found) | {"run_dir": str(found.run_dir)}, default=str))
        return
    chosen = ", ".join(f"{name} = {value}" for name, value in found.chosen.items())
    click.echo(f"selected          {found.run_dir}  ({chosen})")
    click.echo(f"test accuracy     {found.accuracy:.4f}")
    click.echo(
        f"epsilon           {upper(found.epsilon)} with the search charged, {upper(found.one_run)} for the run alone"
    )
    click.echo(f"                  at delta = {found.delta:g}, add or remove one example; written to tune.json")


def _tried(pairs: tuple[str, ...]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for pair in pairs:
        name, equals, values = pair.partition("=")
        if not equals or not values:
            raise ConfigError(f"--try {pair!r}: give NAME=VALUE,VALUE, such as lr=0.1,0.5.")
        found[name] = [_value(value.strip()) for value in values.split(",")]
    return found


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _tell(number: int, config: Any, result: Any) -> None:
    if result is None:
        click.echo(f"a run with lr = {config.lr:g}, clip = {config.clip:g} ...", err=True)
