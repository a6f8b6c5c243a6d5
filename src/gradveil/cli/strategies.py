"""``gradveil strategies``: the table of strategies."""

from __future__ import annotations

import dataclasses
import json

import click

from gradveil.cli._output import table
from gradveil.mechanism import strategies


@click.command("strategies")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(as_json: bool) -> None:
    """List the strategies: clip bound, sensitivity, noise scale and guarantee of each."""
    rows = [strategies.get(name) for name in strategies.names()]
    if as_json:
        click.echo(json.dumps([{**dataclasses.asdict(s), "guarantee": s.guarantee} for s in rows], indent=1))
        return
    table(
        ["strategy", "clip bound", "sensitivity", "noise", "guarantee", "what it does"],
        [[s.name, s.bounds, s.sensitivity, s.noise, s.guarantee, s.summary] for s in rows],
        note="l2max strategies take --reading example|batch. Their noise depends on the data, so no finite epsilon "
        "is proved for them: the published figures are reported as published.",
    )
