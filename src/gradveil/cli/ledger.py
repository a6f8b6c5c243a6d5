"""``gradveil ledger verify RUN`` and ``gradveil ledger show RUN``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from gradveil.accounting.ledger import Contents
from gradveil.accounting.manifest import FileState, State, file_states
from gradveil.cli._output import number, table
from gradveil.cli.account import open_run
from gradveil.errors import LedgerError, RunDirectoryError
from gradveil.mechanism.records import Release
from gradveil.reports.facts import read_run
from gradveil.training.run_directory import RunDirectory


@click.group("ledger")
def command() -> None:
    """Verify or show the ledger of a run, from which every privacy claim is computed."""


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
@click.option("--key", type=click.Path(path_type=Path), metavar="PUB", help="RUN must be signed by this public key.")
@click.option("--head", metavar="HASH", help="A line of the ledger must have this hash, which you kept elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(run: Path, key: Path | None, head: str | None, as_json: bool) -> None:
    """Check every line's hash, the chain, and every file that the ledger names. Exit code 4 if anything is off.

    Says which files are bound to the ledger, and which are not. A chain of hashes shows that a line or a file was
    changed; that the whole directory was not written anew, only a signature (--key; exit code 1 where there is none by
    that key) or a head kept elsewhere (--head) shows. Noise and bounds that were chosen from releases (dyn-adaptive)
    are computed again from what the ledger says the rule had seen.
    """
    contents = open_run(run)
    replayed = _replayed(contents)
    writer = RunDirectory(run.parent if run.is_file() else run).writer() if contents.ended is None else None
    files = file_states(run, contents) if run.is_dir() else []
    wrong = list(read_run(run).contradictions) if run.is_dir() else []
    if as_json:
        more = {"running": writer is not None} | ({} if replayed is None else {"choices_replayed": replayed})
        click.echo(json.dumps(_facts(contents, files, wrong) | more))
    else:
        _print(contents, files, writer, replayed)
    if wrong:
        raise LedgerError(f"{run} is not as its ledger says: {' '.join(wrong)}")
    for told in authenticated(run, contents, key, head):
        click.echo(told, err=as_json)


def verified(run: Path) -> Contents:
    """The ledger of a run directory in which nothing is wrong."""
    contents = open_run(run)
    if not run.is_dir():
        raise RunDirectoryError(f"{run} is a file: give the run directory, whose files the ledger names.")
    if wrong := read_run(run).contradictions:
        raise LedgerError(f"{run} is not as its ledger says: {' '.join(wrong)}")
    return contents


def authenticated(run: Path, contents: Contents, key: Path | None, head: str | None) -> Iterator[str]:
    """What a key and a head that were kept elsewhere show, in sentences; refused where they do not fit."""
    from gradveil.reports import signatures

    if key is not None:
        found = signatures.verify(run, contents, key)
        yield f"signed by {found.key}: {found.lines} lines"
        if found.later:
            yield f"bound later, not signed: {', '.join(found.later)}"
    if head is not None:
        number = signatures.head_line(run.parent if run.is_file() else run, contents, head)
        yield f"head {head[:16]} is that of line {number} of {contents.length}"


def _facts(contents: Contents, files: list[FileState], wrong: list[str]) -> dict[str, Any]:
    return {
        "valid": not wrong,
        "problems": wrong,
        "lines": contents.length,
        "releases": len(contents.releases),
        "head": contents.head,
        "half_written_last_line": contents.torn,
        "ended": contents.ended,
        "files": [{"path": file.path, "state": file.state, "why": file.why} for file in files],
    }


def _print(contents: Contents, files: list[FileState], writer: object, replayed: int | None) -> None:
    click.echo(f"ledger valid: {contents.length} lines, {len(contents.releases)} releases, head {contents.head[:16]}")
    if replayed is not None:
        click.echo(f"noise and bounds of {replayed} releases follow from earlier releases and public settings alone")
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
    for state in get_args(State):
        named = [f"{file.path}{file.why and f' ({file.why})'}" for file in files if file.state == state]
        if named:
            click.echo(f"{state + ':':<13}{f'{chr(10)}{chr(32) * 13}'.join(named)}")
    if files and not any(file.state == "bound" for file in files):
        click.echo("the ledger binds no file: an older version wrote it, or an engine that was given a ledger alone.")


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
