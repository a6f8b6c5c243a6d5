"""``gradveil check``: a gate for continuous integration."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import click

from gradveil.errors import ConfigError


@click.command("check")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--max-epsilon", type=float, help="Maximum proved epsilon. An unproved one fails.")
@click.option(
    "--neighbours",
    type=click.Choice(["add-remove", "replace-one"]),
    help="Neighbouring relation of the epsilon.  [default: by sampler]",
)
@click.option("--max-delta", type=float, help="Maximum delta.")
@click.option("--max-attack-psnr", type=float, help="Maximum PSNR, in dB, of the best attack on the run.")
@click.option("--min-accuracy", type=float, help="Minimum test accuracy at the end.")
@click.option("--allow-unfinished", is_flag=True, help="Pass a run that has not ended, or has released nothing.")
@click.option("--require-bound", is_flag=True, help="Use only files that the ledger names with their hash.")
@click.option(
    "--signed-by", type=click.Path(path_type=Path), metavar="PUB", help="Each RUN must be signed by this key."
)
@click.option("--head", metavar="HASH", help="A line of RUN's ledger must have this hash, which you kept elsewhere.")
@click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Write the gates as JUnit XML.")
@click.option("--json", "as_json", is_flag=True, help="Print the gates as JSON.")
def command(
    runs: tuple[Path, ...],
    max_epsilon: float | None,
    neighbours: str | None,
    max_delta: float | None,
    max_attack_psnr: float | None,
    min_accuracy: float | None,
    allow_unfinished: bool,
    require_bound: bool,
    signed_by: Path | None,
    head: str | None,
    junit: Path | None,
    as_json: bool,
) -> None:
    """Check each RUN against limits.

    Exit code 0 if all pass, 1 and the reasons if not, 4 if a ledger is invalid or the files beside it contradict it.
    """
    from gradveil.reports.facts import read_run
    from gradveil.reports.gates import Limits, judge, to_junit
    from gradveil.training.run_directory import write_whole

    asked = {
        "max_epsilon": max_epsilon,
        "max_delta": max_delta,
        "max_attack_psnr": max_attack_psnr,
        "min_accuracy": min_accuracy,
    }
    for name, value in asked.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; a limit that nothing exceeds is none.")
    if not any(value is not None for value in (*asked.values(), signed_by, head)):
        raise ConfigError("no limit was given. Give --max-epsilon, --max-attack-psnr or --min-accuracy.")
    if neighbours is not None and max_epsilon is None:
        raise ConfigError("--neighbours says under which --max-epsilon is meant: give that too.")
    limits = Limits(
        neighbours=neighbours,
        unfinished=allow_unfinished,
        bound=require_bound,
        signed_by=signed_by,
        head=head,
        **asked,
    )
    facts = [read_run(path) for path in runs]
    gates = [gate for run in facts for gate in judge(run, limits)]
    if junit is not None:
        write_whole(junit, to_junit(gates).encode())
    if as_json:
        passed = all(gate.passed for gate in gates)
        click.echo(json.dumps({"passed": passed, "gates": [asdict(gate) for gate in gates]}))
    else:
        for gate in gates:
            click.echo(f"{'pass' if gate.passed else 'FAIL'}  {gate.run}  {gate.name}: {gate.reason}")
    if any(run.ledger_problem is not None or run.contradictions for run in facts) or any(g.invalid for g in gates):
        sys.exit(4)
    if not all(gate.passed for gate in gates):
        sys.exit(1)
