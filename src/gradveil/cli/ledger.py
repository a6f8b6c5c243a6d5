"""``gradveil ledger verify RUN`` and ``gradveil ledger show RUN``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from gradveil.accounting.ledger import Contents
from gradveil.cli._output import number, table
from gradveil.mechanism.records import Release
from gradveil.training.run_directory import RunDirectory


@click.group("ledger")
def command() -> None:
    """Verify or show the ledger of a run: the record that every privacy claim is computed from."""


def _open(run: Path) -> Contents:
    """A run directory's ledger checked against its checkpoints, or a ledger file by itself."""
    from gradveil.accounting import ledger

    if run.is_file():
        return ledger.read(run)
    return RunDirectory(run).verified_ledger()


def _replayed(contents: Contents) -> int | None:
    """How many releases have the noise that their rule gives for earlier ones; None where no rule chose it."""
    from gradveil.mechanism import strategies
    from gradveil.mechanism.adaptive import replay

    declared = contents.header.plan.get("rule")
    if declared is None or contents.header.strategy not in strategies.names():
        return None  # the rule of a strategy that somebody has registered is in their code
    rule = strategies.get(contents.header.strategy).rule
    if rule is None or declared.get("name") != type(rule).__name__:
        return None
    fields = {name: value for name, value in declared.items() if name != "name"}
    return replay(replace(rule, **fields), contents.header, contents.releases)


@command.command("verify")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(run: Path, as_json: bool) -> None:
    """Check every line's hash, the chain, and the newest checkpoint's pin. Exit code 4 if anything is off.

    Where noise and bounds were chosen from releases (dyn-adaptive), they are computed again from what the ledger says
    the rule had seen.
    """
    contents = _open(run)
    replayed = _replayed(contents)
    if as_json:
        facts = {
            "valid": True,
            "lines": contents.length,
            "releases": len(contents.releases),
            "head": contents.head,
            "half_written_last_line": contents.torn,
            "ended": contents.ended,
            **({} if replayed is None else {"choices_replayed": replayed}),
        }
        click.echo(json.dumps(facts))
        return
    click.echo(f"ledger valid: {contents.length} lines, {len(contents.releases)} releases, head {contents.head[:16]}")
    if replayed is not None:
        click.echo(f"noise and bounds of {replayed} releases follow from earlier releases and public settings alone")
    if contents.torn:
        click.echo(
            f"line {contents.length + 1} is half-written: the process was stopped while writing it. It counts as one "
            "release spent; resuming the run repairs the file."
        )
    if contents.ended is None:
        click.echo("the run has not ended: it is running, or was interrupted (gradveil train --resume).")
    else:
        click.echo(f"the run ended: {contents.ended}")


@command.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--last", type=int, default=20, show_default=True, help="How many of the newest releases; 0 for all.")
@click.option("--json", "as_json", is_flag=True, help="Print header and releases as JSON.")
def show(run: Path, last: int, as_json: bool) -> None:
    """Show the header and the releases."""
    contents = _open(run)
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
