"""``gradveil train``."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil.cli._options import completing, dataset_names, recipe_names, strategy_names
from gradveil.cli._output import number, upper
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.mechanism import schedules, strategies
from gradveil.mechanism.records import SAMPLINGS
from gradveil.training.config import RunConfig, read_toml

if TYPE_CHECKING:
    from gradveil.training.loop import Result

_DECAYS = click.Choice(list(schedules.DECAYS))


def _option(*names: str, **settings: Any) -> Any:
    return click.option(*names, default=None, **settings)


@click.command("train")
@_option("--recipe", shell_complete=completing(recipe_names), help="Start from a recipe (see: gradveil recipes).")
@_option(
    "--config",
    type=click.Path(path_type=Path),
    help="TOML file of settings. Overrides a recipe; options override both.",
)
@_option(
    "--dataset", shell_complete=completing(dataset_names), help="Data set (see: gradveil datasets).  [default: digits]"
)
@_option(
    "--features",
    type=click.Choice(["none", "scattering", "balanced-scattering", "centred-scattering"]),
    help="Fixed features as the input of the model.  [default: none]",
)
@_option("--model", help="auto, paper-cnn, paper-mlp, linear, scatter-cnn or tempered-cnn.  [default: auto]")
@_option(
    "--strategy",
    shell_complete=completing(strategy_names),
    help="Strategy (see: gradveil strategies).  [default: baseline]",
)
@_option("--clip", type=float, help="Initial clip bound C.  [default: 4]")
@_option("--sigma", type=float, help="Initial noise scale.  [default: 6]")
@_option("--epsilon", type=float, help="Calibrate sigma so that the run spends this proved epsilon.")
@_option("--delta", type=float, help="Delta; must be below 1/N.  [default: 1e-5]")
@_option("--steps", type=int, help="Training steps T.  [default: the data set's]")
@_option("--batch-size", type=int, help="Expected batch size B.  [default: the data set's]")
@_option("--physical-batch-size", type=int, help="Microbatch size: split larger batches; the result is the same.")
@_option("--lr", type=float, help="Learning rate.  [default: 0.05]")
@_option("--optimizer", type=click.Choice(["sgd", "adam"]), help="[default: sgd]")
@_option("--momentum", type=float, help="Momentum of SGD.  [default: 0]")
@_option("--weight-decay", type=float, help="[default: 0]")
@_option("--dropout", type=float, help="Dropout before the last layer of paper-cnn.  [default: 0]")
@_option("--activation", help="relu, tanh, sigmoid or elu.  [default: relu]")
@_option(
    "--views", type=int, help="Augmentation multiplicity: views per example, averaged before clipping.  [default: 1]"
)
@_option("--augment", help="Augmentation of the views: flip, shift or flip-shift.  [default: none]")
@_option("--average", type=float, help="Decay of the exponential moving average of the weights.  [default: 0, off]")
@_option("--sampling", help=f"{', '.join(SAMPLINGS)}.  [default: poisson]")
@_option("--clipping", help="per-layer or flat.  [default: per-layer]")
@_option("--reading", type=click.Choice(strategies.READINGS), help="Interpretation of l2-max.  [default: example]")
@_option("--decay", type=_DECAYS, help="Shape of every decay: clip bound and sigma.")
@_option("--clip-decay", type=_DECAYS, help="Shape of the clip bound's decay.  [default: linear]")
@_option("--clip-end", type=float, help="Clip bound at the last step.  [default: half of --clip]")
@_option("--sigma-decay", type=_DECAYS, help="Shape of sigma's decay.  [default: exponential]")
@_option("--sigma-end", type=float, help="Sigma at the last step.  [default: 4/15 of --sigma]")
@_option("--fixed-variance", is_flag=True, help="Keep the noise std constant: sigma_t = varsigma / S_t.")
@_option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Strategy-specific setting; may be repeated.")
@_option(
    "--noise", help="lattice: private in floating point, too; float; auto: lattice where it is cheap.  [default: auto]"
)
@_option("--budget", type=float, help="Stop before the step that would exceed this proved epsilon.")
@_option(
    "--accountant",
    type=click.Choice(["PLD", "filter"]),
    help="filter: noise and the last step may depend on released values.  [default: PLD; filter for dyn-adaptive]",
)
@_option(
    "--allow-unproved",
    is_flag=True,
    help="Allow settings without a proof: shuffling, a budget of the published epsilon.",
)
@_option("--stop-at-accuracy", type=float, help="Stop once the test accuracy reaches this value.")
@_option(
    "--stop-data",
    type=click.Choice(["private", "public"]),
    help="Whether the test set is private; if so, all declared steps are charged.  [default: private]",
)
@_option("--device", help="cpu or cuda.  [default: cpu]")
@_option("--evaluate-every", type=int, help="Steps between evaluations.  [default: T/20]")
@_option("--checkpoint-every", type=int, help="Steps between checkpoints.  [default: T/20]")
@_option("--data-dir", help="Directory of the data sets.  [default: GRADVEIL_DATA]")
@_option("--seed", type=int, help="Make the run reproducible. Anyone who knows the seed can subtract the noise.")
@_option("--run-dir", type=click.Path(path_type=Path), help="[default: runs/<data set>-<strategy>-<time>]")
@_option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Resume an interrupted run.")
@click.option("--new-noise", is_flag=True, help="With --resume: continue with fresh noise instead of the run's seed.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    recipe: str | None,
    config: Path | None,
    seed: int | None,
    run_dir: Path | None,
    resume: Path | None,
    new_noise: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train a model and write a run directory: configuration, ledger, metrics, checkpoints."""
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    if "options" in given:
        given["options"] = _options(given["options"])
    from_file = read_toml(config) if config is not None else {}
    if "seed" in from_file:
        raise ConfigError(f"{config} holds a seed. A seed is a secret and {config} is not: give it with --seed.")
    if resume is None and from_file.pop("calibrated", False):
        from_file.pop("sigma", None)  # found for another run: this one may have other steps or batches
    if recipe is not None:
        from_file = _recipe(recipe) | from_file
    if resume is not None:
        if run_dir is not None:
            raise ConfigError("--resume already names the run directory; remove --run-dir.")
        result = _train(lambda tell, _: _resume(resume, from_file | given, seed, new_noise, tell), None)
    else:
        if new_noise:
            raise ConfigError("--new-noise needs --resume: a new run without --seed always has fresh noise.")
        settings = RunConfig.check(from_file | given)
        _check_names(settings)
        where = run_dir or Path("runs") / f"{settings.dataset}-{settings.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"
        result = _train(lambda tell, c: _new(c, where, seed, tell), settings)
    if _is_first():
        report(result, as_json)
    if result.budget_exhausted:
        click.echo(f"gradveil: {result.ended}", err=True)
        sys.exit(3)


def _is_first() -> bool:
    """Whether this process speaks to the user: the only one, or the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def _recipe(name: str) -> dict[str, Any]:
    """Its settings; how they were chosen is said first."""
    from gradveil.training import recipes

    chosen = recipes.get(name)
    click.echo(f"recipe {name}: {chosen.summary}; {chosen.declaration}", err=True)
    return dict(chosen.settings)


def _check_names(settings: RunConfig) -> None:
    """Names are checked before torch is loaded: a typo is answered at once."""
    from gradveil.training.data import CATALOGUE

    strategies.get(settings.strategy)
    if settings.dataset not in CATALOGUE:
        raise UnknownNameError("data set", settings.dataset, CATALOGUE)
    if settings.sampling not in SAMPLINGS:
        raise UnknownNameError("sampling", settings.sampling, SAMPLINGS)
    if settings.clipping not in ("per-layer", "flat"):
        raise UnknownNameError("clipping", settings.clipping, ("per-layer", "flat"))
    if not 0 < settings.delta < 1:
        raise ConfigError(f"delta is {settings.delta}: give a number between 0 and 1, well below 1/N.")
    if settings.batch_size is not None and settings.batch_size < 1:
        raise ConfigError(f"batch_size is {settings.batch_size}; give at least 1.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again when the run begins
        stand_in = {"sigma": settings.sigma_end or 1.0} if settings.awaits_sigma else {}
        strategies.parameters(**settings.plan_settings() | stand_in)


def _options(pairs: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--option {pair!r}: give NAME=NUMBER, such as quantile=0.5.") from None
        if not equals:
            raise ConfigError(f"--option {pair!r}: give NAME=NUMBER, such as quantile=0.5.")
    return found


def _new(settings: RunConfig, where: Path, seed: int | None, tell: Any) -> Result:
    from gradveil.training.loop import train

    return train(settings, run_dir=where, seed=seed, progress=tell)


def _resume(where: Path, given: dict[str, Any], seed: int | None, new_noise: bool, tell: Any) -> Result:
    from gradveil.training.loop import resume

    return resume(where, settings=given, seed=seed, new_noise=new_noise, progress=tell)


def _train(run: Any, settings: RunConfig | None) -> Result:
    """Run with a live progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (  # fits 80 columns
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.fields[steps]}"),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
    )
    if settings is None or settings.strategy != "non-private":
        from gradveil.clipping.backends import cuda, layers, native

        kernels = native.status() if settings is None or settings.device == "cpu" else cuda.status()
        if _is_first():
            click.echo(f"{kernels}; {layers.status()}", err=True)
    label = settings.strategy if settings is not None else "resumed"
    with Progress(*columns, console=Console(stderr=True), transient=False, disable=not _is_first()) as bar:
        task = bar.add_task(label, total=None, figures="", steps="?")

        def tell(p: Any) -> None:
            figures = f"loss {p.loss:.3f}"
            if p.accuracy is not None:
                figures += f" acc {p.accuracy:.3f}"
            if p.epsilon is not None:
                figures += f" eps {upper(p.epsilon.value)} {p.epsilon.kind}"
            bar.update(task, total=p.steps, completed=p.step, figures=figures, steps=p.steps)

        return run(tell, settings)  # type: ignore[no-any-return]


def report(result: Result, as_json: bool) -> None:
    """The result on stdout."""
    if as_json:
        click.echo(json.dumps(result.to_dict()))
        return
    click.echo(f"run directory     {result.run_dir}")
    click.echo(f"steps             {result.steps}  ({result.ended})")
    averaged = result.accuracy_unaveraged is not None
    click.echo(
        f"test accuracy     {result.accuracy:.4f}"
        + (f"  (averaged weights; {result.accuracy_unaveraged:.4f} without)" if averaged else "")
    )
    click.echo(f"seconds per step  {number(result.seconds_per_step)}")
    if result.noise_std_first is not None:
        click.echo(
            f"noise std         {number(result.noise_std_first)} at the first step, "
            f"{number(result.noise_std_last)} at the last"
        )
    if result.not_finite_examples:
        click.echo(f"not finite        {result.not_finite_examples} per-example gradients counted as zero")
    if result.ledger_head is not None:
        click.echo(f"ledger head       {result.ledger_head}")
        click.echo("                  keep it elsewhere: gradveil check --head tells a rewritten ledger by it")
    click.echo()
    click.echo(str(result.statement))
