"""The tensors in what a model returns: in tuples and dictionaries, data classes, namespaces and distributions."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradveil.errors import UnsupportedModelError


def map_tensors(change: Callable[[Tensor], Any], output: Any) -> Any:
    """The same output with other tensors. What holds tensors in a way that is not known here is refused."""
    return change(output) if isinstance(output, Tensor) else tree_map(lambda leaf: _changed(change, leaf), output)


def tensors_in(output: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_tensors(note, output)
    return found


def _changed(change: Callable[[Tensor], Any], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf)
    if isinstance(leaf, type) or not hasattr(leaf, "__dict__"):
        return leaf
    if isinstance(leaf, SimpleNamespace | torch.distributions.Distribution) or dataclasses.is_dataclass(leaf):
        changed = copy.copy(leaf)
        vars(changed).update({name: map_tensors(change, value) for name, value in vars(leaf).items()})
        return changed
    held = [name for name, value in vars(leaf).items() if isinstance(value, Tensor) and value.requires_grad]
    if held:
        raise UnsupportedModelError(
            f"the model returned a {type(leaf).__name__} that holds tensors ({', '.join(held)}) in a way that is not "
            "known here, so a loss of them could not be followed. Return tensors, or tuples, dictionaries and data "
            "classes of them (a class of your own can be registered with torch.utils._pytree)."
        )
    return leaf
