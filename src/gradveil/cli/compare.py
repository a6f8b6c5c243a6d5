"""``gradveil compare``: runs side by side."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import click

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
    else:
        table(
            list(BRIEF),
            [brief(row) for row in rows],
            note="eps proved: from the verified ledger, under the neighbours that fit the sampler; infinite if nothing "
            "is proved. The published figure is not a guarantee. Attack: median PSNR of the best attack.",
        )
