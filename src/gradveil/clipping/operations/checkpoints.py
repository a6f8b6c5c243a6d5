"""Activation checkpointing: a part of the model is run again in the backward pass, with its operations followed again.

torch runs it when no mode is on any more. While a model is followed, torch's own functions are replaced by ones that
remember the pass. A reentrant checkpoint becomes one of the other kind: its first run is without gradients, where
nothing could be followed, and what it computes is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

torchs: Any = checkpoint


class Recomputation:
    """Replaces torch's functions, once for all models that are followed at a time; :meth:`remove` takes that back."""

    _users = 0
    _theirs: tuple[Any, Any] = (None, None)

    def __init__(self) -> None:
        cls = type(self)
        if not cls._users:
            cls._theirs = (torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator)
            torchs.CheckpointFunction = _Reentrant
            torchs._checkpoint_without_reentrant_generator = _without_reentrant
        cls._users += 1

    def remove(self) -> None:
        cls = type(self)
        cls._users -= 1
        if not cls._users:
            torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator = cls._theirs


def _mode() -> Any:
    """The mode that follows the model whose forward is running, if any."""
    from gradveil.clipping.operations.mode import Operations

    return next((m for m in reversed(_get_current_function_mode_stack()) if isinstance(m, Operations)), None)


class _Reentrant:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        from gradveil.clipping.operations.tracking import Tracking

        mode = _mode()
        if mode is None:
            return Recomputation._theirs[0].apply(function, preserve, *args)
        if not isinstance(mode, Tracking):
            return function(*args)
        return torchs.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _without_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from gradveil.clipping.operations.tracking import Tracking

    mode = _mode()
    again = mode.again_later(function) if isinstance(mode, Tracking) else function
    return Recomputation._theirs[1](again, *args, **kwargs)
