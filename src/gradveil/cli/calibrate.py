"""``gradveil calibrate``: the noise, the decay or the number of steps that meets a target epsilon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil.cli._output import number, upper
from gradveil.cli.account import SAMPLERS
from gradveil.errors import ConfigError
from gradveil.mechanism import schedules

if TYPE_CHECKING:
    from gradveil.accounting import Calibrated, Setting, Target

_VIEW_RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
_VIEW_STEPS = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


@click.command("calibrate")
@click.option("--epsilon", type=float, help="Target epsilon; the result never exceeds it.")
@click.option(
    "--like-sigma", type=float, help="Alternative target: what this constant sigma spends over the same steps."
)
@click.option("--sample-rate", type=float, help="Expected batch size / number of examples.")
@click.option("--batch-size", type=int, help="With --data-size, instead of --sample-rate: expected batch size.")
@click.option("--data-size", type=int, help="With --batch-size: number of examples.")
@click.option("--steps", type=int, help="Training steps T. Omit to find them.")
@click.option("--sigma", type=float, help="Noise scale at the first step. Omit to find it.")
@click.option("--delta", type=float, default=1e-5, show_default=True)
@click.option("--accountant", default="PLD", show_default=True, help="PLD, RDP; BaseC, AdvC, OptC, zCDP, MA.")
@click.option("--neighbours", help="add-remove or replace-one.  [default: the sampler's]")
@click.option("--layers", type=int, default=1, help="Number of layers clipped separately, each at C.  [default: 1]")
@click.option(
    "--count-noise", type=float, help="Noise std on the counts of quantile-clip and dyn-private, which are charged."
)
@click.option("--sampling", type=SAMPLERS, default="poisson", show_default=True)
@click.option("--population", type=int, help="Number of examples, for fixed-size batches.  [default: very large]")
@click.option("--decay", type=click.Choice(list(schedules.DECAYS)), help="Shape of sigma's decay.")
@click.option("--ratio", type=float, help="Last sigma / first sigma (or its inverse: 3.75 is 4/15).")
@click.option("--sigma-end", type=float, help="Sigma at the last step. With --sigma, omit to find it.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Plot sigma against steps and sampling rate for this target."
)
@click.option("--details", is_flag=True, help="With --json: include all details.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(plot: Path | None, details: bool, as_json: bool, **given: Any) -> None:
    """Find sigma (give --steps), the steps (give --sigma), or the decay (give both, and --decay).

    The result never spends more than the target. Counted by PLD or RDP it is proved; by one of the
    published accountants it is for comparison with the paper, and guarantees nothing.
    """
    from gradveil import accounting
    from gradveil.cli import _plots

    if plot is not None:
        _plots.check_file(plot)
    given |= _sampling(given)
    names = ("sample_rate", "layers", "sampling", "population", "count_noise")
    setting = accounting.Setting(**{n: given[n] for n in names})
    target = _target(given, setting)
    found, what = _find(given, target, setting)
    if as_json:
        click.echo(json.dumps(_to_json(found, what, details), allow_nan=False))
    else:
        _print(found, setting)
    if plot is not None:
        rates = [r for r in (setting.sample_rate * k for k in _VIEW_RATES) if r <= 1]
        view = accounting.budget_view(target, setting, rates=rates, steps=_VIEW_STEPS)
        _plots.budget_curves(plot, view, found, setting.sample_rate)
        click.echo(f"gradveil: wrote {plot}", err=True)


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """The sample rate, from itself or from the sizes of batch and data; with these, the population too."""
    rate, batch, data = given["sample_rate"], given.pop("batch_size"), given.pop("data_size")
    if (rate is None) == (batch is None and data is None) or (batch is None) != (data is None):
        raise ConfigError("give either --sample-rate, or --batch-size and --data-size.")
    if rate is not None:
        return {"sample_rate": rate}
    if not 1 <= batch <= data:
        raise ConfigError(f"a batch of {batch} out of {data} examples: give 1 <= --batch-size <= --data-size.")
    if given["population"] not in (None, data):
        raise ConfigError(f"--population {given['population']} and --data-size {data} are the same thing: give one.")
    return {"sample_rate": batch / data, "population": data}


def _target(given: dict[str, Any], setting: Setting) -> Target:
    from gradveil import accounting

    settings = {n: given[n] for n in ("delta", "accountant", "neighbours")}
    if (given["epsilon"] is None) == (given["like_sigma"] is None):
        raise ConfigError("give the target either as --epsilon, or as --like-sigma: what that constant sigma spends.")
    if given["epsilon"] is not None:
        return accounting.Target(epsilon=given["epsilon"], **settings)
    if given["steps"] is None:
        raise ConfigError("--like-sigma needs --steps: the target is what that sigma spends over them.")
    constant = accounting.sigma_schedule(given["like_sigma"], steps=given["steps"])
    sigmas = accounting.sigmas_of(constant, given["steps"])
    spent = accounting.spent_by(sigmas, setting, accounting.Target(epsilon=1.0, **settings))
    return accounting.Target(epsilon=spent, **settings)


def _find(given: dict[str, Any], target: Target, setting: Setting) -> tuple[Calibrated, str]:
    from gradveil import accounting

    sigma, steps, decay = given["sigma"], given["steps"], given["decay"]
    shape = {"decay": decay, "ratio": given["ratio"], "end": given["sigma_end"]}
    if sigma is None and steps is None:
        raise ConfigError(
            "give --steps to find sigma, --sigma to find the steps, or both and --decay to find how fast."
        )
    if sigma is None:
        return accounting.calibrate_sigma(target, setting, steps=steps, **shape), "sigma"
    if steps is None:
        return accounting.calibrate_steps(target, setting, sigma=sigma, **shape), "steps"
    if decay is None or given["ratio"] is not None or given["sigma_end"] is not None:
        raise ConfigError(
            "--sigma and --steps are both given: what is left to find is the decay. Name its shape with --decay, and "
            "leave --ratio and --sigma-end out; or leave --sigma or --steps out."
        )
    return accounting.calibrate_decay(target, setting, sigma=sigma, steps=steps, decay=decay), "decay"


def _to_json(found: Calibrated, what: str, details: bool) -> dict[str, Any]:
    everything = found.to_dict()
    if details:
        return everything
    data = {"sigma": found.sigma, "epsilon": found.epsilon}
    if what == "steps":
        data["steps"] = found.steps
    if what == "decay":
        data |= {n: everything[n] for n in ("sigma_end", "schedule")}
    if not found.target.is_proved:
        data |= {n: everything[n] for n in ("accountant", "kind")}
    return data


def _print(found: Calibrated, setting: Setting) -> None:
    constant = found.schedule.is_constant
    click.echo(f"sigma       {number(found.sigma, 5)}" + ("" if constant else " at the first step"))
    if not constant:
        rate = found.schedule.to_dict().get("rate")
        how = f", {found.schedule.kind}" + (f" with rate {number(rate, 5)} a step" if rate is not None else "")
        click.echo(f"            {number(found.sigma_end, 5)} at the last step{how}")
    click.echo(f"steps       {found.steps}")
    click.echo(
        f"epsilon     {upper(found.epsilon, 5)} of {number(found.target.epsilon, 5)} at delta = "
        f"{found.target.delta:g}, by {found.accountant}"
    )
    if found.target.is_proved:
        layers = f", {setting.layers} layers clipped apart" if setting.layers > 1 else ""
        click.echo(f"            proved, under {found.neighbours}, for {setting.sampling} sampling{layers}")
    else:
        click.echo("            as published, not a guarantee")
    click.echo(f"noise       on the mean gradient, first step: {number(found.sigma / setting.sample_rate)} x C/N")
