"""``gradveil inspect``: pre-flight of a user's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradveil.cli._options import shape
from gradveil.cli._output import table, upper

if TYPE_CHECKING:
    from gradveil.attacks.preflight import Preflight


@click.command("inspect")
@click.argument("model", metavar="PKG:FUNCTION")
@click.option(
    "--input-shape",
    metavar="C,H,W",
    required=True,
    callback=shape,
    help="Of one example, such as 1,28,28; of tokens, 16.",
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="Its weights, as a server has sent them: a safetensors file.  [default: as returned]",
)
@click.option("--classes", type=click.IntRange(min=2), help="[default: as many as the model has outputs]")
@click.option("--clip", type=float, help="Planned clip bound C.")
@click.option("--sigma", type=float, help="Planned noise scale.")
@click.option("--batch-size", default=1, show_default=True, help="Planned expected batch size.")
@click.option("--seconds", default=20.0, show_default=True, help="Time limit for all attacks together.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights, examples, noise and initial guesses.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    model: str,
    weights: Path | None,
    input_shape: tuple[int, ...],
    classes: int | None,
    clip: float | None,
    sigma: float | None,
    batch_size: int,
    seconds: float,
    seed: int,
    as_json: bool,
) -> None:
    """Inspect a model before training: which layers leak, what gradveil refuses, and what attacks recover.

    PKG:FUNCTION names a function without arguments that returns the model; modules in the working directory are found.
    The untrained model is attacked on synthetic examples, without a defence and with the planned one.
    """
    from gradveil.attacks.observation.from_files import load_factory, load_weights
    from gradveil.attacks.preflight import inspect_model

    module = load_factory(model, seed=seed)
    if weights is not None:
        load_weights(module, weights)
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
        ["layer", "kind", "parameters", "clipped by", "leaks"],
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
        note="clipped by: how per-example norms are computed; torch.func runs examples one by one. leaks: what can be "
        "read from the gradient of one example without a search.",
    )
    told = [("tied", ", ".join(same)) for same in anatomy.tied]
    told += [("mixes examples", why) for why in anatomy.mixes]
    told += [("unsupported", why) for why in anatomy.unsupported]
    told += [("slow", why) for why in anatomy.warnings]
    if told:
        table(["", "note before private training"], told)
    if found.tried:
        _print_attacks(found)
    for sentence in found.verdict:
        click.echo(sentence)


def _print_attacks(found: Preflight) -> None:
    table(
        ["observation", "attack", "reached, median", "success", "at most", "iterations", "s"],
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
        note="success: 6 dB nearer than every guess (text: 9 of 10 tokens). at most: proved for any attack on one "
        "step, where guessing succeeds in 1 of 100.",
    )
