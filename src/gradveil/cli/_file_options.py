"""The options of ``gradveil attack`` for a user's own files, and what of the command line belongs together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gradveil.cli._options import flags, given, shape
from gradveil.errors import ConfigError

_FILE = click.Path(path_type=Path)


def _numbers(kind: type) -> Any:
    """Callback of an option: one value, or several separated by commas."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        if value is None:
            return None
        try:
            return tuple(kind(part) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r}: give a number, or several separated by commas.") from None

    return read


_OPTIONS = (
    click.option("--model", metavar="PKG:FUNCTION", help="Your model: a function without arguments that returns it."),
    click.option("--gradients", type=_FILE, help="Its gradients: a safetensors file with the names of its parameters."),
    click.option("--captured", type=_FILE, help="Or the directory that engine.record_gradients wrote."),
    click.option("--weights", type=_FILE, help="Its weights: a safetensors file.  [default: as returned]"),
    click.option("--before", type=_FILE, help="A client's weights before its local steps (FedAvg): safetensors."),
    click.option("--after", type=_FILE, help="And after them, in place of --gradients."),
    click.option("--local-steps", callback=_numbers(int), help="Steps between; several values are tried: 1,5,10."),
    click.option("--local-lr", callback=_numbers(float), help="Their learning rate; several values are tried."),
    click.option("--local-momentum", callback=_numbers(float), help="Their momentum; several are tried.  [default: 0]"),
    click.option("--local-batch", callback=_numbers(int), help="Examples of a local step.  [default: all --batch]"),
    click.option(
        "--truth", type=_FILE, help="Ground truth for scoring: safetensors with x and y. Attacks do not see it."
    ),
    click.option("--public", type=_FILE, help="Public examples for the adversary: safetensors with x, optionally y."),
    click.option("--table", type=_FILE, help="Public rows of the same table, a CSV file: columns, categories, ranges."),
    click.option("--label", help="The column of --table that is the class."),
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
_NAMED = (
    "model", "gradients", "captured", "weights", "before", "after", "truth", "public", "input_shape", "classes",
    "joint", "table", "label",
)  # fmt: skip
_LOCAL = ("local_steps", "local_lr", "local_momentum", "local_batch")
FILE_OPTIONS = {*_NAMED, *_LOCAL, "sensitivity", "clipping"}
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
    before: Path | None
    after: Path | None
    local: tuple[tuple[int, float, float, int | None], ...]  # steps, rate, momentum and batch that are tried
    truth: Path | None
    public: Path | None
    input_shape: tuple[int, ...]
    classes: int | None
    step: int | None
    joint: bool
    table: Path | None
    label: str | None
    attack: str | None  # None: what suits the model
    iterations: int
    seed: int
    device: str
    defence: dict[str, Any]  # clip, sigma, sensitivity, view, batch, batch_size, clipping: those that were given

    @property
    def source(self) -> Path | None:
        """Where what the adversary sees was read."""
        return self.gradients or self.captured or self.after


def files_from(ctx: click.Context) -> Files:
    """The command line, checked: what was given must belong together."""
    chosen, params = given(ctx), ctx.params
    if "model" not in chosen:
        raise ConfigError(f"{flags(ctx, chosen & FILE_OPTIONS)} needs --model package:function.")
    if (params["table"] is None) != (params["label"] is None):
        raise ConfigError("--table and --label go together: public rows, and which of their columns is the class.")
    if params["input_shape"] is None and params["table"] is None:
        raise ConfigError("--model needs --input-shape, the shape of one example, such as 1,28,28.")
    if sum(params[name] is not None for name in ("gradients", "captured", "after")) != 1:
        raise ConfigError(
            "--model needs either --gradients or --captured (or the weights --after local steps): what the adversary "
            "sees."
        )
    _check_local(ctx, chosen)
    captured = params["captured"] is not None
    refused = [
        (_ELSEWHERE, "applies to a data set or run, not to --model"),
        (
            _RECORDED if captured else {"step", "joint"},
            "is part of the recording" if captured else "applies to --captured only",
        ),
    ]
    for names, why in refused:
        if chosen & names:
            raise ConfigError(f"{flags(ctx, chosen & names)} {why}: remove it.")
    same = ("clip", "sigma", "sensitivity", "view", "batch", "clipping")
    defence = {name: params[name] for name in same if name in chosen}
    if "training_batch" in chosen:
        defence["batch_size"] = params["training_batch"]
    return Files(
        **{name: params[name] for name in (*_NAMED, "iterations", "seed", "device")},
        local=_tried(params),
        attack=params["attack"] if "attack" in chosen else None,
        step=params["step"] if "step" in chosen else None,
        defence=defence,
    )


def _check_local(ctx: click.Context, chosen: set[str]) -> None:
    if "after" not in chosen:
        names = chosen & {"before", *_LOCAL}
        if names:
            raise ConfigError(f"{flags(ctx, names)} is of local steps: give the weights --before and --after them.")
        return
    if "before" not in chosen or "weights" in chosen:
        raise ConfigError("--after needs the weights --before the local steps, and no --weights.")
    for name, value in (("local_steps", "5"), ("local_lr", ".1")):
        if name not in chosen:
            raise ConfigError(
                f"--after needs {flags(ctx, {name})}: as it was, or the values to be tried, separated by commas, such "
                f"as {value}."
            )


def _tried(params: dict[str, Any]) -> tuple[tuple[int, float, float, int | None], ...]:
    if params["after"] is None:
        return ()
    momenta, batches = params["local_momentum"] or (0.0,), params["local_batch"] or (None,)
    return tuple(itertools.product(params["local_steps"], params["local_lr"], momenta, batches))
