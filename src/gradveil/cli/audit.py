"""``gradveil audit``: lower bounds on epsilon, measured, beside what is proved."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil.cli._options import completing, given, strategy_names
from gradveil.cli._options import flags as shown
from gradveil.cli._output import lower, number, table, upper
from gradveil.cli.train import _options as strategy_options
from gradveil.errors import ConfigError
from gradveil.mechanism import schedules, strategies
from gradveil.reports.facts import AUDIT
from gradveil.training.config import RunConfig
from gradveil.training.recorded import read_recorded
from gradveil.training.run_directory import RunDirectory, write_whole

if TYPE_CHECKING:
    from gradveil.audit import Audit, Setting

_DECAYS = click.Choice(list(schedules.DECAYS))
# What a run's ledger says, and flags say in its place.
_OF_A_RUN = {
    "dataset", "model", "strategy", "clip", "sigma", "delta", "clipping", "reading", "decay", "clip_end", "sigma_end",
    "fixed_variance", "options", "lr",
}  # fmt: skip


@click.command("audit")
@click.argument("run", required=False, metavar="[RUN]", type=click.Path(path_type=Path))
@click.option("--strategy", shell_complete=completing(strategy_names), help="Strategy (see: gradveil strategies).")
@click.option("--clip", type=float, help="Initial clip bound C.  [default: 4]")
@click.option("--sigma", type=float, help="Initial noise scale.  [default: 6]")
@click.option("--delta", type=float, help="[default: 1e-5]")
@click.option("--clipping", help="per-layer or flat.  [default: per-layer]")
@click.option("--reading", type=click.Choice(strategies.READINGS), help="Interpretation of l2-max.  [default: example]")
@click.option("--decay", type=_DECAYS, help="Shape of every decay: clip bound and sigma.")
@click.option("--clip-end", type=float, help="Clip bound at the last step.  [default: half of --clip]")
@click.option("--sigma-end", type=float, help="Sigma at the last step.  [default: 4/15 of --sigma]")
@click.option(
    "--fixed-variance", is_flag=True, default=None, help="Keep the noise std constant: sigma_t = varsigma / S_t."
)
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="Strategy-specific setting; may be repeated."
)
@click.option("--dataset", help="Data set whose test examples are used.  [default: digits, or the run's]")
@click.option(
    "--model",
    help="Network (as in gradveil train); for a RUN of your own model, PKG:FUNCTION.  [default: auto, or the run's]",
)
@click.option("--lr", type=float, help="Learning rate.  [default: 0.05]")
@click.option("--steps", default=2000, show_default=True, help="Steps of the per-step audit; each is one coin flip.")
@click.option("--runs", default=0, show_default=True, help="Whole runs to audit as well, half of them with the canary.")
@click.option("--run-steps", default=10, show_default=True, help="Steps of each of these runs.")
@click.option("--sample-rate", default=0.5, show_default=True, help="Sampling rate of these runs.")
@click.option("--jobs", default=1, show_default=True, help="Number of processes for these runs.")
@click.option("--examples", default=16, show_default=True, help="Number of examples, including the canary.")
@click.option("--as-they-are", is_flag=True, help="Do not scale down the other examples.")
@click.option("--confidence", default=0.95, show_default=True, help="Joint confidence of all bounds.")
@click.option("--seed", default=0, show_default=True, help="Seed of coins, noise and initial weights.")
@click.option("--data-dir", help="Directory of the data sets.  [default: GRADVEIL_DATA]")
@click.option("--data", "data_factory", metavar="PKG:FUNCTION", help="For a RUN of your own model: returns x and y.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="[default: audit.json in RUN; without RUN, no file]"
)
@click.option("--json", "as_json", is_flag=True, help="Print audit.json instead of a table.")
def command(run: Path | None, out: Path | None, as_json: bool, **rest: Any) -> None:
    """Measure a lower bound on the epsilon of a strategy.

    A canary is added to private training at random, and an auditor who knows everything except the noise guesses when.
    The result is a lower bound on epsilon. A bound above the proved epsilon shows a fault (exit code 1); one below it
    proves nothing. With RUN, the strategy and settings of that run are audited: the audit trains its own models and
    does not read the run's training data.
    """
    from gradveil.api import bind_evidence
    from gradveil.audit import audit_json, audit_runs, audit_steps
    from gradveil.audit.runs import check_runs

    strategy, setting_of = _subject(run, rest)
    where = out or (None if run is None else run / AUDIT)
    if where is not None and not where.parent.is_dir():
        raise ConfigError(f"{where.parent} is not a directory: what is found could not be written. Give another --out.")
    if rest["runs"]:
        check_runs(rest["runs"])  # before the steps, which take a while
    calm = None if rest["as_they_are"] else 0.1
    shared = {"seed": rest["seed"], "confidence": rest["confidence"]}
    setting = {"examples": rest["examples"], "calm": calm, "seed": rest["seed"]}
    audits = []
    with _told(f"{strategy}, a coin for every step", rest["steps"]) as progress:
        audits.append(audit_steps(setting_of(**setting), steps=rest["steps"], progress=progress, **shared))
    if rest["runs"]:
        runs = {"runs": rest["runs"], "steps": rest["run_steps"], "jobs": rest["jobs"]}
        with _told(f"{strategy}, whole runs", rest["runs"]) as progress:
            sampled = setting_of(sample_rate=rest["sample_rate"], **setting)
            audits.append(audit_runs(sampled, progress=progress, **runs, **shared))
    found = audit_json(audits)
    if where is not None:
        write_whole(where, (json.dumps(found, indent=1, allow_nan=False) + "\n").encode())
        if run is not None and out is None:
            bind_evidence(run, where)
    if as_json:
        click.echo(json.dumps(found, allow_nan=False))
    else:
        for audit in audits:
            _print(audit)
    if where is not None:
        click.echo(f"written to {where}", err=True)
    if any(audit.is_broken for audit in audits):
        sys.exit(1)


def _subject(run: Path | None, rest: dict[str, Any]) -> tuple[str, Callable[..., Setting]]:
    """The strategy's name, and what makes the setting in which it is audited."""
    from gradveil.attacks.own_run import OwnRun
    from gradveil.audit import setting_of
    from gradveil.audit.from_config import setting_of_own

    ctx = click.get_current_context()
    told = {name: rest[name] for name in given(ctx) & _OF_A_RUN}
    if "options" in told:
        told["options"] = strategy_options(told["options"])
    if run is None:
        if rest["data_factory"] is not None:
            raise ConfigError("--data makes the data of a RUN of your own model: give the run too.")
        if "strategy" not in told:
            raise ConfigError("nothing to audit. Give --strategy or a run directory.")
        strategies.get(told["strategy"])
        config = RunConfig.check(told)
    else:
        contents, recorded = read_recorded(RunDirectory.open(run))
        own = not isinstance(recorded, RunConfig)
        if extra := set(told) - ({"model"} if own else set()):
            raise ConfigError(
                f"{run} has its own settings in its ledger: leave {shown(ctx, extra)} out, or give the settings of "
                "a strategy and no run."
            )
        if not isinstance(recorded, RunConfig):
            made = OwnRun.of(recorded, told.get("model"), rest["data_factory"])
            return contents.header.strategy, partial(setting_of_own, contents, made)
        config = recorded
    if rest["data_dir"] is not None:
        config = config.model_copy(update={"data_dir": rest["data_dir"]})
    return config.strategy, partial(setting_of, config)


@contextmanager
def _told(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; without a terminal, one line that says what goes on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        click.echo(f"{what}: {total} ...", err=True)
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _print(audit: Audit) -> None:
    first = audit.strongest
    rows = [
        [
            bound.statistic,
            bound.method,
            f">= {lower(bound.epsilon, 3)}",
            upper(audit.proved, 3),
            number(audit.as_published, 3),
            audit.verdict(bound),
        ]
        for bound in audit.bounds
    ]
    because = "" if audit.reason is None else f"Nothing is proved: {audit.reason}. "
    table(
        ["statistic", "bound", f"epsilon of {audit.unit}", "proved", "as published", "verdict"],
        rows,
        title=f"{audit.strategy}: {audit.unit}, {first.trials} trials",
        note=f"At delta = {first.delta:g}, neighbours add-remove, {100 * first.confidence:g} % confidence for all rows "
        f"together, shared out among {audit.tests} tests. The auditor {first.threat_model}. {because}What is published "
        "is not a guarantee. A lower bound shows what leaks; that it is low proves nothing.",
    )
