"""``gradveil account``: every epsilon of a run, or of a run described by its parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gradveil.accounting._checks import trusted
from gradveil.accounting._release_table import sigmas_of
from gradveil.accounting.ledger import Contents
from gradveil.cli._output import number, table, upper
from gradveil.errors import ConfigError, RunDirectoryError
from gradveil.mechanism import schedules
from gradveil.mechanism.strategies import SIGMA_END_RATIO
from gradveil.training.run_directory import RunDirectory

SAMPLERS = click.Choice(["poisson", "without-replacement", "with-replacement", "shuffle"])
_TABLED = ("BaseC", "AdvC", "OptC", "zCDP", "MA")


def open_run(run: Path) -> Contents:
    """A run directory's ledger checked against its checkpoints, or a ledger file by itself."""
    from gradveil.accounting import ledger
    from gradveil.accounting._run_lock import steady

    if run.is_file():
        return steady(lambda: ledger.read(run), run, lambda contents: contents.torn)
    if not run.exists():
        raise RunDirectoryError(
            f"{run} is not a run directory: there is nothing at that path. Give the directory that gradveil train "
            "wrote, the run_dir of a PrivacyEngine, or a ledger."
        )
    return RunDirectory(run).verified_ledger()


@dataclass(frozen=True)
class _Account:
    """What is printed, and the curves that are computed only for a plot."""

    title: str
    delta: float
    paper: dict[str, Any]
    paper_curve: Callable[[], dict[str, Any]]
    no_paper: str
    proved: dict[str, dict[str, Any]]
    bounds: Sequence[Any]
    curves: Callable[..., Any]


@click.command("account")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--sigma", type=float, help="Noise scale at the first step.")
@click.option("--sample-rate", type=float, help="Expected batch size / number of examples.")
@click.option("--steps", type=int, help="Training steps T.")
@click.option("--delta", type=float, help="[default: 1e-5, or the run's]")
@click.option("--layers", type=int, help="Number of layers clipped separately, each at C.  [default: 1]")
@click.option(
    "--count-noise", type=float, help="Noise std on the counts of quantile-clip and dyn-private, which are charged."
)
@click.option("--sampling", type=SAMPLERS, help="[default: poisson]")
@click.option("--population", type=int, help="Number of examples, for fixed-size batches.  [default: very large]")
@click.option("--decay", type=click.Choice(list(schedules.DECAYS)), help="Shape of sigma's decay.")
@click.option("--sigma-end", type=float, help="Sigma at the last step.  [default: 4/15 of --sigma]")
@click.option(
    "--kappa",
    type=float,
    multiple=True,
    help="Success rate of guessing, for the reconstruction bounds; may be repeated.  [default: 0.1, 0.01]",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Plot epsilon against steps into this file.")
@click.option("--details", is_flag=True, help="With --json: include the deltas really spent, warnings and assumptions.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    run: Path | None, kappa: tuple[float, ...], plot: Path | None, details: bool, as_json: bool, **given: Any
) -> None:
    """Compute every epsilon of RUN, or of the settings given as options: proved, and as published.

    Published figures are for comparison with the paper and guarantee nothing.
    """
    from gradveil.cli import _plots

    if plot is not None:
        _plots.check_file(plot)
    flags = {name: value for name, value in given.items() if value is not None}
    kappas = kappa or (0.1, 0.01)
    account = _of_parameters(flags, kappas) if run is None else _of_run(run, flags, kappas)
    if as_json:
        click.echo(json.dumps(_to_json(account, details), allow_nan=False))
    else:
        _print(account)
    for warning in dict.fromkeys(w for value in account.paper.values() for w in value.warnings):
        click.echo(f"gradveil: note: zCDP and MA: {warning}.", err=True)
    if plot is not None:
        published = account.paper_curve()
        wanted = [(n, a) for n in ("add-remove", "replace-one") for a in ("PLD", "RDP")]
        _plots.epsilon_by_step(
            plot,
            proved=[account.curves(neighbours=n, accountant=a) for n, a in wanted],
            paper={m: published[m] for m in _TABLED if m in published},
            delta=account.delta,
            title=account.title,
        )
        click.echo(f"gradveil: wrote {plot}", err=True)


def _of_parameters(flags: dict[str, Any], kappas: Sequence[float]) -> _Account:
    from gradveil import accounting

    missing = [f"--{n.replace('_', '-')}" for n in ("sigma", "sample_rate", "steps") if n not in flags]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} missing: an epsilon needs the noise, the sampling rate and the number of steps. "
            "Give them, or name a run directory: gradveil account RUN."
        )
    sigma, steps, delta, decay = flags["sigma"], flags["steps"], flags.get("delta", 1e-5), flags.get("decay")
    accounting.check_steps(steps)
    end = flags.get("sigma_end", None if decay is None else SIGMA_END_RATIO * sigma)
    schedule = accounting.sigma_schedule(sigma, steps=steps, decay=decay, end=end)
    sigmas = accounting.sigmas_of(schedule, steps)
    names = ("sample_rate", "layers", "sampling", "population", "count_noise")
    setting = accounting.Setting(**{n: flags[n] for n in names if n in flags})
    noise = f"sigma = {sigma:g}" if decay is None else f"sigma = {sigma:g} to {end:g}, {decay}"
    layers = f", {setting.layers} layers" if setting.layers > 1 else ""
    layers += f", noise on counts {setting.count_noise:g}" if setting.count_noise is not None else ""
    return _Account(
        title=f"{noise}, q = {setting.sample_rate:g}, T = {steps}, {setting.sampling}{layers}",
        delta=delta,
        paper=accounting.paper_epsilons(sigmas, setting.sample_rate, delta),
        paper_curve=lambda: accounting.paper_curve(sigmas, setting.sample_rate, delta),
        no_paper="",
        proved=accounting.all_views(lambda **v: accounting.planned_epsilon(sigmas, setting, delta=delta, **v)),
        bounds=[accounting.planned_reconstruction_bound(sigmas, setting, kappa=k) for k in kappas],
        curves=lambda **v: accounting.planned_curve(sigmas, setting, delta=delta, **v),
    )


def _of_run(run: Path, flags: dict[str, Any], kappas: Sequence[float]) -> _Account:
    from gradveil import accounting

    extra = [f"--{n.replace('_', '-')}" for n in flags if n != "delta"]
    if extra:
        raise ConfigError(
            f"{run} records how it was noised and sampled: leave {', '.join(extra)} out, or give parameters and no run."
        )
    if "delta" in flags:
        accounting.check_delta(flags["delta"])
    for kappa in kappas:
        accounting.check_kappa(kappa)
    contents = open_run(run)
    header, releases = contents.header, trusted(contents.charged)
    delta = flags.get("delta", header.delta)

    def compute() -> _Account:
        sigmas = sigmas_of(releases)
        noised = accounting.is_noised(header, releases)
        proved = accounting.all_views(lambda **v: accounting.proved_epsilon(header, releases, delta=delta, **v))
        charged = max(view.steps_charged for views in proved.values() for view in views.values())
        steps = f"{len(releases)}" + (f" taken, {charged} charged" if charged > len(releases) else "")
        return _Account(
            title=f"{run}: {header.strategy}, {header.sampling}, q = {header.sample_rate:.4g}, T = {steps}",
            delta=delta,
            paper=accounting.from_releases(header, releases, delta=delta) if noised else {},
            paper_curve=lambda: accounting.paper_curve(sigmas, header.sample_rate, delta) if noised else {},
            no_paper="" if noised else "the run adds no noise, so there is nothing to account for",
            proved=proved,
            bounds=[accounting.reconstruction_bound(header, releases, kappa=k) for k in kappas],
            curves=lambda **v: accounting.proved_curve(header, releases, delta=delta, **v),
        )

    return trusted(compute)


def _epsilon(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _to_json(account: _Account, details: bool) -> dict[str, Any]:
    """The published, the proved and the reconstruction bounds; "inf" has its reason beside it."""
    from gradveil.accounting import reconstruction_json

    paper: dict[str, Any] = {m: _epsilon(account.paper[m].epsilon) if account.paper else "inf" for m in _TABLED}
    if "inf" in paper.values():
        paper["reason"] = account.no_paper or "the noise is so small that the published formula has no finite value"
    proved: dict[str, dict[str, Any]] = {}
    for neighbours, views in account.proved.items():
        proved[neighbours] = {a: _epsilon(p.epsilon) for a, p in views.items()}
        reasons = {a: p.reason for a, p in views.items() if p.reason is not None}
        if len(set(reasons.values())) == 1:
            proved[neighbours]["reason"] = next(iter(reasons.values()))
        elif reasons:
            proved[neighbours]["reason"] = "; ".join(f"{a}: {why}" for a, why in reasons.items())
    data: dict[str, Any] = {"paper": paper, "proved": proved, "rero": reconstruction_json(account.bounds)}
    if details:
        data["details"] = {
            "delta": account.delta,
            "paper_is_a_guarantee": False,
            "paper": {m: value.to_dict() for m, value in account.paper.items()},
            "proved": {n: {a: p.to_dict() for a, p in views.items()} for n, views in account.proved.items()},
        }
    return data


def _print(account: _Account) -> None:
    names = {"add_remove": "add or remove one", "replace_one": "replace one"}
    views = account.proved
    click.echo(f"{account.title}\n\nProved epsilon at delta = {account.delta:g}")
    table(
        ["neighbours", "PLD", "RDP"],
        [[names[n], *(upper(views[n][a].epsilon) for a in ("PLD", "RDP"))] for n in views],
    )
    whole = [p for v in views.values() for p in v.values()]
    for reason in dict.fromkeys(p.reason for p in whole if p.reason is not None):
        where = [f"{p.neighbours} {p.accountant}" for p in whole if p.reason == reason]
        click.echo(f"infinite ({', '.join(where)}): {reason}.\n")
    if account.paper:
        click.echo(f"As published, not a guarantee; quoted at delta = {account.delta:g}")
        table(
            ["method", "epsilon", "delta really spent"],
            [[m, number(value.epsilon), f"{value.delta_total:.3g}"] for m, value in account.paper.items()],
        )
    else:
        click.echo(f"As published: nothing, because {account.no_paper}.\n")
    click.echo("Reconstruction: no attack succeeds more often than this, whatever else it knows")
    table(
        ["prior success", "one step, known member", "whole run"],
        [[number(b.kappa), *(_gamma(g) for g in (b.one_step, b.whole_run))] for b in account.bounds],
    )
    for reason in dict.fromkeys(b.reason for b in account.bounds if b.reason is not None):
        click.echo(f"no bound: {reason}.")


def _gamma(value: float | None) -> str:
    return "no bound" if value is None else upper(value)
