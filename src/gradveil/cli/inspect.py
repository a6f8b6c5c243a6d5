"""``gradveil inspect``: pre-flight of a user's model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from gradveil.cli._options import shape
from gradveil.cli._output import table, upper

if TYPE_CHECKING:
    from gradveil.attacks.preflight import Preflight


@click.command("inspect")
@click.argument("model", metavar="PKG:FUNCTION")
@click.option("--input-shape", metavar="C,H,W", required=True, callback=shape, help="Of one example, such as 1,28,28.")
@click.option("--classes", type=click.IntRange(min=2), help="[default: as many as the model has outputs]")
@click.option("--clip", type=float, help="The clip bound C that is planned.")
@click.option("--sigma", type=float, help="The noise scale that is planned.")
@click.option("--batch-size", default=1, show_default=True, help="The expected batch size that is planned.")
@click.option("--seconds", default=20.0, show_default=True, help="For all attacks together.")
@click.option("--seed", default=0, show_default=True, help="Of weights, examples, noise and starts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    model: str,
    input_shape: tuple[int, ...],
    classes: int | None,
    clip: float | None,
    sigma: float | None,
    batch_size: int,
    seconds: float,
    seed: int,
    as_json: bool,
) -> None:
    """Look at a model before it is trained: what of it leaks, what is refused, and what attacks get out of it.

    PKG:FUNCTION is a function without arguments that makes the model; modules in the working directory are found. It
    is attacked as it is made, on examples that are made up, undefended and with what is planned.
    """
    from gradveil.attacks.observation.from_files import load_factory
    from gradveil.attacks.preflight import inspect_model

    module = load_factory(model, seed=seed)
    click.echo(f"{model}: attacks for {seconds:g} s ...", err=True)
    found = inspect_model(
        module,
        input_shape=input_shape,
        classes=classes,
        clip=clip,
        sigma=sigma,
        batch_size=batch_size,
        seconds=seconds,
        seed=seed,
    )
    if as_json:
        click.echo(json.dumps({"model": model, "input_shape": input_shape, **found.to_dict()}))
        return
    _print(model, found)


def _print(model: str, found: Preflight) -> None:
    anatomy = found.anatomy
    frozen = f", {anatomy.frozen} of them frozen" if anatomy.frozen else ""
    table(
        ["layer", "kind", "parameters", "clipped by", "gives away"],
        [
            [
                part.name,
                part.kind,
                str(part.parameters),
                "refused" if part.refused else part.clipped_by + (" (slow)" if part.clipped_by == "torch.func" else ""),
                ", ".join(part.leaks) or "-",
            ]
            for part in anatomy.parts
        ],
        title=f"{model}: {anatomy.parameters} parameters{frozen}, {anatomy.groups} group(s), one for each layer",
        note="clipped by: how each example's norm is found; torch.func runs every example by itself. gives away: what "
        "can be read off one example's gradient without any search.",
    )
    told = [("tied", ", ".join(same)) for same in anatomy.tied]
    told += [("mixes examples", why) for why in anatomy.mixes]
    told += [("unsupported", why) for why in anatomy.unsupported]
    told += [("slow", why) for why in anatomy.warnings]
    if told:
        table(["", "to know before private training"], told)
    if found.tried:
        _print_attacks(found)
    for sentence in found.verdict:
        click.echo(sentence)


def _print_attacks(found: Preflight) -> None:
    table(
        ["what is seen", "attack", "reached, median", "success", "at most", "iterations", "s"],
        [
            [
                t.seen,
                t.attack,
                t.note or t.reached,
                "-" if t.success is None else f"{t.success:.0%}",
                upper(t.bound, 3),
                str(t.iterations),
                f"{t.seconds:.1f}",
            ]
            for t in found.tried
        ],
        note="success: 6 dB nearer than every guess. at most: proved for any attack on one step, where guessing "
        "succeeds in 1 of 100.",
    )
