"""``gradveil statement RUN``: what is proved, what is only as published, what is not covered."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gradveil.accounting._checks import trusted
from gradveil.cli.account import open_run
from gradveil.errors import DataError
from gradveil.reports.facts import AUDIT, read_audit, read_run


@click.command("statement")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--delta", type=float, help="[default: the run's]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: Path, delta: float | None, as_json: bool) -> None:
    """Print the privacy statement of RUN, a run directory or a ledger file."""
    from gradveil.accounting import check_delta, statement_of

    if delta is not None:
        check_delta(delta)
    contents = open_run(run)
    try:
        audited = read_audit(run / AUDIT) if run.is_dir() else None
    except DataError as error:
        raise DataError(f"{error} It is damaged, or gradveil audit did not write it: audit the run again.") from None
    result = trusted(lambda: statement_of(contents, delta=delta, audited=audited))
    for problem in read_run(run).contradictions if run.is_dir() else ():
        click.echo(f"gradveil: note: the run directory is not as its ledger says: {problem}", err=True)
    click.echo(json.dumps(result.to_dict(), allow_nan=False) if as_json else str(result))
