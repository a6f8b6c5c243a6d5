"""``gradveil export``: a run for a registry, a model hub, a bill of materials, or another program."""

from __future__ import annotations

from pathlib import Path

import click

from gradveil.cli._options import completing, export_forms


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "form",
    required=True,
    metavar="FORM",
    shell_complete=completing(export_forms),
    help="registry (OpenDP deployments, YAML), model-card (Hugging Face), cyclonedx (ML-BOM), statement (JSON).",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="[default: stdout]")
def command(run: Path, form: str, out: Path | None) -> None:
    """Write RUN as another tool reads it. Its ledger and files are verified first: exit code 4 if they do not hold.

    What only a person can say (name, curator, purpose, data, region, license, owner, tuning) is taken from [about] in
    the run's settings, and is "not stated" where it is not there; stderr names what is missing.
    """
    from gradveil.reports.exports import export
    from gradveil.reports.facts import read_run
    from gradveil.training.run_directory import write_whole

    made = export(read_run(run), form)
    if out is None:
        click.echo(made.text, nl=False)
    else:
        write_whole(out, made.text.encode())
        click.echo(f"written to {out}", err=True)
    if made.missing:
        click.echo(f"gradveil: note: for a person to fill in: {', '.join(made.missing)}.", err=True)
