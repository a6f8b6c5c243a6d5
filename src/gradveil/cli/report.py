"""``gradveil report``: runs as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gradveil.errors import ConfigError


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="[default: RUN/report.html, or report.html for several]",
)
@click.option(
    "--examples",
    metavar="N|all",
    default="0",
    help="Show images of N victims per attack. They are training examples.  [default: none]",
)
@click.option("--title", help="Title of the page.")
def command(runs: tuple[Path, ...], out: Path | None, examples: str, title: str | None) -> None:
    """Write one HTML page about each RUN: what is proved, what leaks, what was not tested.

    The page is one file and loads nothing from the network. Without --examples it shows no training images; with it,
    the file is readable by its owner only. It contains the training loss, which no epsilon covers.
    """
    from gradveil.api import report

    count = _count(examples)
    where = report(*runs, out=out, examples=count, title=title)
    if count:
        click.echo("The page shows training examples: only you may read the file.", err=True)
    click.echo(where)


def _count(examples: str) -> int:
    if examples == "all":
        return sys.maxsize
    if not examples.isdecimal():
        raise ConfigError(f"--examples {examples!r}: give a number of victims, such as 4, or all.")
    return int(examples)
