"""``gradveil reproduce``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil import experiments
from gradveil.cli._output import table
from gradveil.errors import ConfigError

if TYPE_CHECKING:
    from gradveil.experiments.compare import Report
    from gradveil.experiments.experiment import Experiment
    from gradveil.experiments.plan import Plan
    from gradveil.experiments.runner import Store, Workers


@click.command("reproduce")
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--list", "listed", is_flag=True, help="List the experiments.")
@click.option(
    "--quick",
    "scale",
    flag_value="quick",
    default=True,
    help="Digits data set and few steps; takes minutes.  [default]",
)
@click.option("--full", "scale", flag_value="full", help="The paper's data sets, steps and batch sizes.")
@click.option("--sets", help="Comma-separated data sets.  [default: the experiment's]")
@click.option("--seeds", type=int, help="Seeds per cell.  [default: the experiment's]")
@click.option("--lr", type=float, help="Learning rate of every training run.  [default: the paper's, 0.05]")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or several: cuda:0,cuda:1.")
@click.option("--jobs", type=int, help="Cells to run in parallel.  [default: one per core or GPU]")
@click.option(
    "--backend",
    type=click.Choice(["loky", "dask", "ray"]),
    default="loky",
    show_default=True,
    help="Backend of joblib.",
)
@click.option("--scheduler", metavar="ADDRESS", help="Address of the Dask or Ray cluster.  [default: start one here]")
@click.option("--data-dir", help="Directory of the data sets.  [default: GRADVEIL_DATA]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("reproduction"),
    show_default=True,
    help="Directory for cells, tables and figures; an existing one is resumed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    names: tuple[str, ...],
    listed: bool,
    scale: str,
    sets: str | None,
    seeds: int | None,
    lr: float | None,
    device: str,
    jobs: int | None,
    backend: str,
    scheduler: str | None,
    data_dir: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Rerun tables and figures of the paper (NAME "all": every one) and compare with the published values.

    Each run is one cell, kept in --out. An interrupted command continues where it stopped; experiments
    share the cells that they have in common.
    """
    if listed:
        _list(as_json)
        return
    if not names:
        raise ConfigError("no experiment is named. Give one or more, or all; gradveil reproduce --list shows them.")
    from gradveil.experiments.plan import Plan
    from gradveil.experiments.runner import Store, Workers

    chosen = [experiments.get(name) for name in (experiments.NAMES if "all" in names else names)]
    devices = [part.strip() for part in device.split(",")]
    picked = tuple(part.strip() for part in sets.split(",")) if sets else None
    plan = Plan(scale=scale, sets=picked, seeds=seeds, lr=lr, device=devices[0])  # type: ignore[arg-type]
    workers = Workers(devices=devices, jobs=jobs, backend=backend, scheduler=scheduler, data_dir=data_dir)
    store = Store(out)
    results = {}
    for experiment in chosen:
        report, ran = _run(experiment, plan, store, workers)
        results[experiment.name] = _write(experiment, plan, report, ran, out)
        if not as_json:
            _show(experiment, report)
    if as_json:
        click.echo(json.dumps(results))
    else:
        click.echo(f"written to {out}", err=True)


def _list(as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(experiments.NAMES))
        return
    table(["experiment", "what it shows"], [[name, what] for name, what in experiments.NAMES.items()])


def _run(experiment: Experiment, plan: Plan, store: Store, workers: Workers) -> tuple[Report, list[dict[str, Any]]]:
    """The report, and the results of the cells that it is made of."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gradveil.experiments.experiment import Found

    cells = list(experiment.cells(plan))
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        total = len({cell.key for cell in cells})
        task = bar.add_task(experiment.name, total=total)
        bar.update(task, completed=len({c.key for c in cells if store.get(c) is not None}))

        def told(done: int, of: int, result: dict[str, Any]) -> None:
            bar.update(task, completed=done)
            if not console.is_terminal:
                named = [str(result["settings"].get(key, "")) for key in ("dataset", "strategy", "attack")]
                click.echo(f"{experiment.name} {done}/{of}: {' '.join(filter(None, named))}", err=True)

        results = store.run(cells, workers, told)
    return experiment.report(plan, Found(results, store.path, store.folder)), list(results.values())


def _write(experiment: Experiment, plan: Plan, report: Report, ran: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    from dataclasses import asdict

    from gradveil import __version__
    from gradveil.training.run_directory import write_whole

    found = {
        "experiment": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "plan": asdict(plan),
        "cells": len(ran),
        "seeds": sorted({r["settings"]["seed"] for r in ran if "seed" in r["settings"]}),
        "learning_rates": sorted({r["settings"]["lr"] for r in ran if "lr" in r["settings"]}),
        "machines": sorted({r["machine"] for r in ran}),
        "seconds": round(sum(r["seconds"] for r in ran), 1),
        "versions": {"gradveil": __version__, "torch": ", ".join(sorted({r["torch"] for r in ran}))},
        **report.to_dict(),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{experiment.name}.json", (json.dumps(found, indent=1) + "\n").encode())
    text = f"# {experiment.title}\n\n{report.to_markdown()}\n"
    write_whole(out / f"{experiment.name}.md", text.encode())
    return found


def _show(experiment: Experiment, report: Report) -> None:
    from gradveil.experiments.compare import CLAIMED

    click.echo(f"\n{experiment.title}")
    for found in report.tables:
        table(found.head, found.rows, title=found.title, note=found.note)
    if report.claims:
        rows = [[c.name, c.text, c.verdict, c.evidence] for c in report.claims]
        table(["", "claim", "here", "figures"], rows, title=CLAIMED)
