"""The options of ``gradveil attack`` for a user's own files, and what of the command line belongs together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gradveil.cli._options import flags, given, shape
from gradveil.errors import ConfigError

_FILE = click.Path(path_type=Path)
_OPTIONS = (
    click.option("--model", metavar="PKG:FUNCTION", help="Your model: a function without arguments that returns it."),
    click.option("--gradients", type=_FILE, help="Its gradients: a safetensors file with the names of its parameters."),
    click.option("--captured", type=_FILE, help="Or the directory that engine.record_gradients wrote."),
    click.option("--weights", type=_FILE, help="Its weights: a safetensors file.  [default: as returned]"),
    click.option(
        "--truth", type=_FILE, help="Ground truth for scoring: safetensors with x and y. Attacks do not see it."
    ),
    click.option("--public", type=_FILE, help="Public examples for the adversary: safetensors with x, optionally y."),
    click.option(
        "--input-shape",
        metavar="C,H,W",
        callback=shape,
        help="Shape of one example for --model, such as 1,28,28; of token ids, 16.",
    ),
    click.option("--classes", type=int, help="Number of classes.  [default: the outputs of the model]"),
    click.option(
        "--sensitivity", type=float, help="The S by which sigma was multiplied in --gradients.  [default: clip]"
    ),
    click.option(
        "--clipping",
        type=click.Choice(["per-layer", "flat"]),
        help="How --gradients were clipped.  [default: per-layer]",
    ),
    click.option("--joint", is_flag=True, help="Attack all steps of --captured jointly: they have the same examples."),
)
_NAMED = ("model", "gradients", "captured", "weights", "truth", "public", "input_shape", "classes", "joint")
FILE_OPTIONS = {*_NAMED, "sensitivity", "clipping"}
_ELSEWHERE = {
    "run_dir",
    "dataset",
    "strategy",
    "compare",
    "victims",
    "steps",
    "steps_seen",
    "lr",
    "reading",
    "data_dir",
}
_RECORDED = {"weights", "clip", "sigma", "sensitivity", "view", "training_batch", "clipping"}


def file_options(command: Any) -> Any:
    """The options of this part of the command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class Files:
    """What the command was given; see its options."""

    model: str
    gradients: Path | None
    captured: Path | None
    weights: Path | None
    truth: Path | None
    public: Path | None
    input_shape: tuple[int, ...]
    classes: int | None
    step: int | None
    joint: bool
    attack: str | None  # None: what suits the model
    iterations: int
    seed: int
    device: str
    defence: dict[str, Any]  # clip, sigma, sensitivity, view, batch, batch_size, clipping: those that were given


def files_from(ctx: click.Context) -> Files:
    """The command line, checked: what was given must belong together."""
    chosen, params = given(ctx), ctx.params
    if "model" not in chosen:
        raise ConfigError(f"{flags(ctx, chosen & FILE_OPTIONS)} is of your own model: give --model package:function.")
    if params["input_shape"] is None:
        raise ConfigError("--model needs --input-shape, the shape of one example, such as 1,28,28.")
    if (params["gradients"] is None) == (params["captured"] is None):
        raise ConfigError("--model needs either --gradients or --captured: what the adversary sees.")
    captured = params["captured"] is not None
    refused = [
        (_ELSEWHERE, "goes with a data set or run, not with --model"),
        (_RECORDED if captured else {"step", "joint"}, "is said by the record" if captured else "is of --captured"),
    ]
    for names, why in refused:
        if chosen & names:
            raise ConfigError(f"{flags(ctx, chosen & names)} {why}: leave it out.")
    same = ("clip", "sigma", "sensitivity", "view", "batch", "clipping")
    defence = {name: params[name] for name in same if name in chosen}
    if "training_batch" in chosen:
        defence["batch_size"] = params["training_batch"]
    return Files(
        **{name: params[name] for name in (*_NAMED, "iterations", "seed", "device")},
        attack=params["attack"] if "attack" in chosen else None,
        step=params["step"] if "step" in chosen else None,
        defence=defence,
    )
