"""What a checkpoint of training holds: weights, their average, optimizer and bound rule, as one safetensors file.

Numbers of the optimizer that are no tensors, and what the engine tells of step and ledger, are its facts, kept beside
it (run_directory.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from gradveil.engine import PrivacyEngine
from gradveil.errors import RunDirectoryError


def pack(
    engine: PrivacyEngine, model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None
) -> tuple[bytes, dict[str, Any]]:
    """The tensors as a file, and the facts; the ledger is on disk after it."""
    state = engine.state_dict()  # commits the ledger
    del state["spent"]  # it is in the run's ledger, which the checkpoint is bound to
    tensors: dict[str, Tensor] = {f"model.{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"rule.{k}": v for k, v in state.pop("rule").items()}
    if average is not None:
        tensors |= {f"average.{k}": v for k, v in average.state_dict().items()}
    scalars: dict[str, Any] = {}
    for index, slots in optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{slot}"] = value
            else:
                scalars[f"{index}.{slot}"] = value
    whole = safetensors.torch.save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
    return whole, {**state, "optimizer": scalars}


def unpack(
    whole: bytes,
    facts: Mapping[str, Any],
    engine: PrivacyEngine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: nn.Module | None,
) -> None:
    """Everything as :func:`pack` found it."""
    parts = parts_of(whole)
    slots: dict[int, dict[str, Any]] = {}
    try:
        model.load_state_dict(parts["model"])
        if average is not None:
            average.load_state_dict(parts["average"])
        for name, value in (*parts["optimizer"].items(), *facts["optimizer"].items()):
            index, _, slot = name.partition(".")
            slots.setdefault(int(index), {})[slot] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        raise RunDirectoryError(f"the checkpoint is of another model: {error}") from None
    engine.load_state_dict({**facts, "rule": parts["rule"]})


def parts_of(whole: bytes) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint: of the model, its average, the bound rule and the optimizer."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "rule": {}, "optimizer": {}}
    try:
        for key, value in safetensors.torch.load(whole).items():
            part, _, name = key.partition(".")
            parts[part][name] = value
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError, TypeError, OverflowError) as error:
        raise RunDirectoryError(f"the checkpoint's tensors are not those of a run: {error}.") from None
    return parts
