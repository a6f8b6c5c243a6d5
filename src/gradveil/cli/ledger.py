"""``gradveil ledger verify RUN`` and ``gradveil ledger show RUN``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gradveil.cli._output import number, table
from gradveil.cli.account import open_run
from gradveil.mechanism.records import Release
from gradveil.training.run_directory import RunDirectory


@click.group("ledger")
def command() -> None:
    """Verify or show the ledger of a run, from which every privacy claim is computed."""


@command.command("verify")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(run: Path, as_json: bool) -> None:
    """Verify hashes, chain and newest checkpoint. Exit code 4 if anything does not match."""
    contents = open_run(run)
    writer = RunDirectory(run.parent if run.is_file() else run).writer() if contents.ended is None else None
    if as_json:
        facts = {
            "valid": True,
            "lines": contents.length,
            "releases": len(contents.releases),
            "head": contents.head,
            "half_written_last_line": contents.torn,
            "ended": contents.ended,
            "running": writer is not None,
        }
        click.echo(json.dumps(facts))
        return
    click.echo(f"ledger valid: {contents.length} lines, {len(contents.releases)} releases, head {contents.head[:16]}")
    if contents.torn:
        click.echo(
            f"line {contents.length + 1} is half-written: the process was stopped while writing it. It counts as one "
            "release spent; resuming the run repairs the file."
        )
    if writer is not None:
        click.echo(f"the run is still running: {writer} writes to it.")
    elif contents.ended is None:
        click.echo("the run has not ended: it was interrupted. To go on: gradveil train --resume RUN")
    else:
        click.echo(f"the run ended: {contents.ended}")


@command.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--last", type=int, default=20, show_default=True, help="How many of the newest releases; 0 for all.")
@click.option("--json", "as_json", is_flag=True, help="Print header and releases as JSON.")
def show(run: Path, last: int, as_json: bool) -> None:
    """Show the header and the releases."""
    contents = open_run(run)
    releases = contents.releases[-last:] if last else contents.releases
    if as_json:
        shown = {"header": contents.header.to_dict(), "releases": [r.to_dict() for r in releases]}
        click.echo(json.dumps(shown))
        return
    h = contents.header
    click.echo(
        f"strategy {h.strategy} ({h.guarantee}), {h.sampling} sampling, q = {h.sample_rate:.6g}, N = {h.population}, "
        f"expected batch {h.expected_batch_size:g}, delta = {h.delta:g}, {h.steps} steps declared, "
        f"{len(contents.releases)} releases, groups: {', '.join(h.groups)}"
    )
    table(
        [
            "step",
            "sampler",
            "clip bound",
            "rule",
            "S",
            "sigma",
            "noise std",
            "multiplier",
            "public",
            "beside",
        ],
        [_row(r) for r in releases],
    )


def _row(r: Release) -> list[str]:
    def per_group(values: tuple[float, ...]) -> str:
        return number(values[0]) if len(set(values)) == 1 else " ".join(number(v) for v in values)

    beside = "; ".join(f"{s.name} (noise {s.noise_std:g})" for s in r.side)
    return [
        f"{r.step}{' (recovered)' if r.recovered else ''}",
        r.sampler,
        per_group(r.clip),
        r.sensitivity_rule,
        per_group(r.sensitivity),
        number(r.sigma),
        per_group(r.noise_std),
        number(r.multiplier),
        "yes" if r.scale_is_public else "no",
        beside,
    ]
