"""``gradveil attack``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil.attacks.scoring.pictures import draw_grid
from gradveil.cli._attack_files import attack_files
from gradveil.cli._file_options import FILE_OPTIONS, file_options, files_from
from gradveil.cli._options import given
from gradveil.cli._output import number, table
from gradveil.errors import ConfigError
from gradveil.reports.facts import ATTACKS, RESULT

if TYPE_CHECKING:
    from gradveil.attacks.trial import AttackConfig, AttackResult


@click.command("attack")
@click.argument("run_dir", required=False, metavar="[RUN]", type=click.Path(path_type=Path))
@click.option("--dataset", help="Whose training examples are attacked.  [default: digits, or the run's]")
@click.option("--strategy", help="How their gradients are released.  [default: non-private, or as the run does]")
@click.option("--compare", help="Several strategies, separated by commas, attacked with equal means.")
@click.option("--attack", default="cpl", show_default=True, help="cpl, dlg, idlg, inverting, map, analytic or prior.")
@click.option("--victims", default=20, show_default=True, help="Gradients attacked side by side.")
@click.option("--batch", default=1, show_default=True, help="Examples behind each gradient.")
@click.option(
    "--observe",
    "view",
    type=click.Choice(["per-example", "per-example-noised", "batch"]),
    default="per-example-noised",
    show_default=True,
    help="What the adversary sees.",
)
@click.option("--clip", default=4.0, show_default=True, help="Clip bound C, at the start.")
@click.option("--sigma", default=6.0, show_default=True, help="Noise scale, at the start.")
@click.option("--steps", default=1000, show_default=True, help="Steps of the run, over which schedules span.")
@click.option("--step", default=0, show_default=True, help="The step that is seen; of a RUN, the one that comes next.")
@click.option("--steps-seen", default=1, show_default=True, help="Steps from --step on that the victims are all in.")
@click.option("--lr", default=0.1, show_default=True, help="Learning rate between the steps that are seen.")
@click.option("--reading", type=click.Choice(["example", "batch"]), help="Reading of l2-max.  [default: example]")
@click.option(
    "--training-batch",
    "--batch-size",
    default=600,
    show_default=True,
    help="Expected batch size of the training, by which mean and noise are divided.",
)
@click.option("--iterations", default=300, show_default=True, help="At most.")
@click.option("--network", help="Untrained network: cpl-net or relu-convnet (images), sigmoid-mlp.  [default: first]")
@click.option("--seed", default=0, show_default=True, help="Of victims, weights, noise and starts.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--data-dir", help="Where the data sets lie.  [default: GRADVEIL_DATA]")
@file_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for the results.  [default: attacks/<data set>-<attack>-<time>, in RUN if there is one]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    run_dir: Path | None,
    dataset: str | None,
    strategy: str | None,
    compare: str | None,
    data_dir: str | None,
    out: Path | None,
    as_json: bool,
    **rest: Any,
) -> None:
    """Attack gradients as a strategy would release them, and judge what comes back.

    Of an untrained network or, with RUN, of the model that a run has trained so far, at its next step. Prints one row
    for each strategy and writes result.json and a picture of the first victim.

    With --model and --gradients or --captured, of your own model: what of --clip, --sigma, --sensitivity, --batch-size
    and --observe is given says how the gradients were released (nothing: undefended), and what comes back is judged
    where --truth is given.
    """
    from gradveil.api import keep_attack
    from gradveil.attacks.from_run import load_target
    from gradveil.attacks.trial import AttackConfig, run
    from gradveil.attacks.untrained import network_for
    from gradveil.mechanism import strategies
    from gradveil.training import data

    ctx = click.get_current_context()
    if given(ctx) & FILE_OPTIONS:
        attack_files(files_from(ctx), out, as_json)
        return
    rest = {name: value for name, value in rest.items() if name not in FILE_OPTIONS}
    names = compare.split(",") if compare else [strategy] if strategy else []
    chosen = [strategies.get(name.strip()).name for name in names]
    outcomes = []
    if run_dir is not None:
        target = load_target(run_dir, data_dir=data_dir)
        if dataset is not None and dataset != target.config.dataset:
            raise ConfigError(f"the run was trained on {target.config.dataset}, not on {dataset}: leave --dataset out.")
        if rest["network"] is not None:
            raise ConfigError("a RUN has its own network: leave --network out.")
        dataset, model_name = target.config.dataset, target.config.model
        theirs = {"step": target.step, "steps": target.plan.steps, "training_batch": target.config.batch_size}
        for name in chosen or [target.config.strategy]:
            trial = AttackConfig(strategy=name, **(rest | theirs))
            own = not chosen and name != "non-private"
            plan, state = (target.plan, target.rule_state) if own else (None, None)
            with told(trial) as progress:
                outcomes.append(
                    run(trial, target.data, model=target.model, plan=plan, rule_state=state, progress=progress)
                )
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
    keep_attack(outcomes, where, dataset=dataset, model=model_name)
    _draw(outcomes, where / "frames.png")
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
        bound = "no bound" if outcome.bound is None else number(outcome.bound, 3)
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
        note=f"success: {outcomes[0].score.success_means}; at least: this attack's, and a better one may do more; at "
        "most: a proved limit for every attack that sees what is seen here and knows that the example took part, given "
        f"how often guessing succeeds (at most {outcomes[0].kappa:.3g}: the upper 95 % limit for the best guess "
        "that was found); no bound without noise, or where it follows the data (l2-max). found again: nearest, "
        "among 1 000 training examples, to the right one.",
    )


def _draw(outcomes: list[AttackResult], path: Path) -> None:
    """A row for each strategy: the first victim's original, its reconstruction at some iterations, and the end."""
    lines = []
    for outcome in outcomes:
        if outcome.secret.x.dim() == 5:
            pictures = [("original", outcome.secret.x[0, 0])]
            pictures += [(str(i), frame[0, 0]) for i, frame in outcome.reconstruction.frames.items()]
            lines.append((outcome.trial.strategy, [*pictures, ("end", outcome.reconstruction.x[0, 0])]))
    if lines:
        path.touch(mode=0o600)  # it shows training examples
        path.chmod(0o600)
        draw_grid(lines, path)
