"""``gradveil compare``: runs side by side."""

from __future__ import annotations

import csv
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from gradveil.errors import ConfigError


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
def command(runs: tuple[Path, ...], as_json: bool, as_csv: bool) -> None:
    """Compare runs: accuracy, the three epsilons, noise and attack results, one row per RUN."""
    from gradveil.cli._output import table
    from gradveil.reports.comparison import BRIEF, HEADINGS, brief, row_of
    from gradveil.reports.facts import read_run

    if as_json and as_csv:
        raise ConfigError("--json and --csv were both given. Give one of them.")
    rows = [row_of(read_run(path)) for path in runs]
    if as_json:
        click.echo(json.dumps(rows))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, fieldnames=list(HEADINGS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif Console().width < 120 and (Console().is_terminal or "COLUMNS" in os.environ):
        _blocks(rows)
    else:
        table(
            list(BRIEF),
            [brief(row) for row in rows],
            note=_NOTE,
        )


_NOTE = (
    "eps proved: from the verified ledger, under the neighbours that fit the sampler; infinite if nothing is proved. "
    "The published figure is not a guarantee. Attack: median PSNR of the best attack."
)


def _blocks(rows: list[dict[str, Any]]) -> None:
    """For a narrow terminal: each run by itself, one line for each figure."""
    from gradveil.reports.comparison import BRIEF, brief

    for row in rows:
        name, *values = brief(row)
        click.echo(name)
        for heading, value in zip(BRIEF[1:], values, strict=True):
            click.echo(f"  {heading:<16}{value}")
        click.echo()
    click.echo(textwrap.fill(_NOTE, width=78))
