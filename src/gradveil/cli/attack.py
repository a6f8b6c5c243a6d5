"""``gradveil attack``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil.cli._attack_files import attack_files
from gradveil.cli._file_options import FILE_OPTIONS, file_options, files_from
from gradveil.cli._options import attack_names, completing, dataset_names, given, strategy_names
from gradveil.cli._output import table, upper
from gradveil.errors import ConfigError
from gradveil.reports.facts import ATTACKS, RESULT

if TYPE_CHECKING:
    from gradveil.attacks.trial import AttackConfig, AttackResult


@click.command("attack")
@click.argument("run_dir", required=False, metavar="[RUN]", type=click.Path(path_type=Path))
@click.option(
    "--dataset",
    shell_complete=completing(dataset_names),
    help="Data set of the victims.  [default: digits, or the run's]",
)
@click.option(
    "--strategy",
    shell_complete=completing(strategy_names),
    help="Strategy that releases the gradients.  [default: non-private, or the run's]",
)
@click.option("--compare", help="Comma-separated strategies, attacked with the same effort.")
@click.option(
    "--attack",
    shell_complete=completing(attack_names),
    default="cpl",
    show_default=True,
    help="cpl, dlg, idlg, inverting, map, analytic or prior; text for a --model that takes token ids.",
)
@click.option("--victims", default=20, show_default=True, help="Number of gradients to attack, in parallel.")
@click.option("--batch", default=1, show_default=True, help="Examples per attacked gradient.")
@click.option(
    "--observe",
    "view",
    type=click.Choice(["per-example", "per-example-noised", "batch"]),
    default="per-example-noised",
    show_default=True,
    help="What the adversary observes.",
)
@click.option("--clip", default=4.0, show_default=True, help="Initial clip bound C.")
@click.option("--sigma", default=6.0, show_default=True, help="Initial noise scale.")
@click.option("--steps", default=1000, show_default=True, help="Total steps of the run, for its schedules.")
@click.option("--step", default=0, show_default=True, help="First observed step; for a RUN, its next step.")
@click.option(
    "--steps-seen", default=1, show_default=True, help="Number of consecutive observed steps; the victims are in each."
)
@click.option("--lr", default=0.1, show_default=True, help="Learning rate between observed steps.")
@click.option(
    "--reading", type=click.Choice(["example", "batch"]), help="Interpretation of l2-max.  [default: example]"
)
@click.option(
    "--training-batch",
    "--batch-size",
    default=600,
    show_default=True,
    help="Expected training batch size: divisor of the sum and of the noise.",
)
@click.option("--iterations", default=300, show_default=True, help="Maximum number of iterations.")
@click.option(
    "--network",
    help="Untrained network: cpl-net or relu-convnet (images), sigmoid-mlp (tables).  [default: by data set]",
)
@click.option("--seed", default=0, show_default=True, help="Seed of victims, weights, noise and initial guesses.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--data-dir", help="Directory of the data sets.  [default: GRADVEIL_DATA]")
@click.option("--data", "data_factory", metavar="PKG:FUNCTION", help="For a RUN of your own model: returns x and y.")
@file_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory for the results.  [default: attacks/<data set>-<attack>-<time>, inside RUN if given]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    run_dir: Path | None,
    dataset: str | None,
    strategy: str | None,
    compare: str | None,
    data_dir: str | None,
    data_factory: str | None,
    out: Path | None,
    as_json: bool,
    **rest: Any,
) -> None:
    """Reconstruct training examples from gradients, as a strategy would release them, and score the result.

    The gradients are those of an untrained network or, with RUN, of a run's model at its next step. Prints one row per
    strategy; writes result.json and an image of the first victim.

    A RUN of your own model names the functions that build model and data; --model and --data override them.

    To attack gradients of your own model, give --model and either --gradients or --captured. --clip, --sigma,
    --sensitivity, --batch-size and --observe then describe how they were released (none given: no defence). The
    result is scored if --truth is given. For a model of token ids, use --attack text: --input-shape is the number of
    tokens, and --truth has the ids as x.
    """
    from gradveil.api import keep_attack
    from gradveil.attacks.from_run import load_target
    from gradveil.attacks.trial import AttackConfig, run
    from gradveil.attacks.untrained import network_for
    from gradveil.mechanism import strategies
    from gradveil.training import data

    ctx = click.get_current_context()
    own_run = run_dir is not None and given(ctx) & FILE_OPTIONS == {"model"}
    if given(ctx) & FILE_OPTIONS and not own_run:
        attack_files(files_from(ctx), out, as_json)
        return
    model = rest["model"]
    rest = {name: value for name, value in rest.items() if name not in FILE_OPTIONS}
    if data_factory is not None and run_dir is None:
        raise ConfigError("--data makes the data of a RUN of your own model: give the run too.")
    names = compare.split(",") if compare else [strategy] if strategy else []
    chosen = [strategies.get(name.strip()).name for name in names]
    outcomes = []
    if run_dir is not None:
        target = load_target(run_dir, data_dir=data_dir, model_factory=model, data_factory=data_factory)
        if dataset is not None and dataset != target.data.name:
            raise ConfigError(f"the run was trained on {target.data.name}, not on {dataset}: leave --dataset out.")
        dataset, model_name = target.data.name, target.network
        settled = target.recorded().keys() - given(ctx)  # at their defaults on the command line: the run has its own
        for name in chosen or [target.plan.strategy.name]:
            trial = target.settings({"strategy": name} | {k: v for k, v in rest.items() if k not in settled})
            with told(trial) as progress:
                outcomes.append(target.attack(trial, progress))
    else:
        dataset = dataset or "digits"
        trials = [AttackConfig(strategy=name, **rest) for name in chosen or ["non-private"]]
        loaded = data.load(dataset, data_dir=data_dir)
        model_name = network_for(loaded, trials[0].network)
        for trial in trials:
            with told(trial) as progress:
                outcomes.append(run(trial, loaded, progress=progress))
    named = f"{outcomes[0].trial.attack}-{time.strftime('%Y%m%d-%H%M%S')}"
    where = out or (Path("attacks") / f"{dataset}-{named}" if run_dir is None else run_dir / ATTACKS / named)
    keep_attack(outcomes, where, dataset=dataset, model=model_name, run=run_dir if out is None else None)
    if as_json:
        click.echo((where / RESULT).read_text().rstrip())
        return
    _table(outcomes, dataset)
    click.echo(f"written to {where}", err=True)


@contextmanager
def told(trial: AttackConfig) -> Iterator[Callable[[int], None]]:
    """A line on stderr that says what is being attacked and how far it is; without a terminal, only what."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    what = f"{trial.attack} on {trial.victims} victims, {trial.strategy}, {trial.view}"
    console = Console(stderr=True)
    if not console.is_terminal:
        click.echo(f"{what} ...", err=True)
        yield lambda iteration: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=trial.iterations)

        def progress(iteration: int) -> None:  # several attempts: the bar grows with each
            total = -(-iteration // trial.iterations) * trial.iterations
            bar.update(task, completed=iteration, total=total)

        yield progress


def _table(outcomes: list[AttackResult], dataset: str) -> None:
    from gradveil.attacks.scoring.evaluate import table_rows

    rows = []
    for outcome in outcomes:
        bound = "no bound" if outcome.bound is None else upper(outcome.bound, 3)
        row = table_rows([(outcome.trial.strategy, outcome.score)])[0]
        rows.append([*row, bound, f"{outcome.seconds:.1f}"])
    guesses = table_rows(list(outcomes[0].controls.items()))
    rows += [[f"(guess) {row[0]}", *row[1:-1], "-", "-", "-"] for row in guesses]
    first = outcomes[0].trial
    headings = ["success at least" if h == "success" else h for h in outcomes[0].score.headings]
    table(
        ["", *headings, "at most", "s"],
        rows,
        title=f"{first.attack} on {dataset}, {first.victims} victims of {first.batch}, seen: {first.view}",
        note=f"success: {outcomes[0].score.success_means}. at least: this attack's share; a better attack may do more. "
        "at most: a proved limit for every attack with this observation that knows the example took part, given how "
        f"often guessing succeeds (at most {outcomes[0].kappa:.3g}: the upper 95 % limit for the best guess found); no "
        "limit without noise, or if the noise depends on the data (l2-max). found again: the right one is the nearest "
        "among 1 000 training examples.",
    )
