"""``gradveil datasets``: what there is, and ``gradveil datasets download NAME``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gradveil.cli._output import table
from gradveil.errors import ConfigError, UnknownNameError


@click.group("datasets", invoke_without_command=True)
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Directory of the data sets.  [default: GRADVEIL_DATA]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(ctx: click.Context, data_dir: Path | None, as_json: bool) -> None:
    """List the data sets and whether their files are present."""
    from gradveil.training.data import CATALOGUE, data_directory

    ctx.obj = data_dir
    if ctx.invoked_subcommand is not None:
        return
    directory = data_directory(data_dir)
    entries = list(CATALOGUE.values())
    if as_json:
        keys = (
            "name",
            "title",
            "kind",
            "train",
            "test",
            "input_shape",
            "classes",
            "formats",
            "source",
            "licence",
        )
        found = [{k: getattr(e, k) for k in keys} | {"available": e.available(data_dir)} for e in entries]
        click.echo(json.dumps(found, indent=1))
        return
    table(
        ["data set", "kind", "train", "test", "shape", "classes", "here", "format"],
        [
            [
                e.name,
                e.kind,
                str(e.train),
                str(e.test),
                "x".join(map(str, e.input_shape)),
                str(e.classes),
                "yes" if e.available(data_dir) else "no",
                e.formats,
            ]
            for e in entries
        ],
        note=f"data directory: {directory or 'none (set GRADVEIL_DATA or --data-dir)'}",
    )


@command.command("download")
@click.argument("name")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Directory to write to.  [default: GRADVEIL_DATA]")
@click.pass_context
def download(ctx: click.Context, name: str, data_dir: Path | None) -> None:
    """Download a data set from its publisher and verify its checksum."""
    from gradveil.training.data import CATALOGUE, data_directory
    from gradveil.training.data import download as fetch

    if name not in CATALOGUE:
        raise UnknownNameError("data set", name, CATALOGUE)
    directory = data_directory(data_dir or ctx.obj)
    if directory is None:
        raise ConfigError("no data directory is named. Set GRADVEIL_DATA or give --data-dir.")
    last = {"file": ""}

    def tell(file: str, done: int, total: int | None) -> None:
        if file != last["file"]:
            last["file"] = file
            click.echo(f"fetching {file} ({total or '?'} bytes)", err=True)

    click.echo(str(fetch(name, directory, tell)))
