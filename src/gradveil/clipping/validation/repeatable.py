"""Runs of a model that all start from the same state.

This puts back what plain_run does not, because it is changed in place: generators that modules own, lists and
dictionaries that they append to, tensors that are plain attributes.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from gradveil.clipping._rng import RngState, rng_state
from gradveil.clipping.outputs import tensors_in
from gradveil.clipping.validation.shadow_forward import PlainRun, _device_of
from gradveil.errors import UnsupportedModelError

_INTERNAL = frozenset(vars(nn.Module()))

Run = Callable[..., PlainRun]
"""Called as ``run(module, args, kwargs, evaluate=...)``, like :func:`plain_run`."""


class Mode(NamedTuple):
    evaluate: bool = False
    no_dropout: bool = False
    no_autocast: bool = False

    @property
    def words(self) -> str:
        if self.evaluate:
            return "in eval mode"
        return "in its present mode, without dropout" if self.no_dropout else "in its present mode"


class RunFailed(Exception):
    """A run of the model that failed, or that cannot be compared with the others."""


class Ran(NamedTuple):
    run: PlainRun
    after: Any  # the state of the generators
    autocast: bool

    @property
    def outputs(self) -> list[Tensor]:
        return self.run.outputs


class Runner:
    """Runs the model from the same state every time."""

    def __init__(self, module: nn.Module, run: Run, kind: str) -> None:
        self._module, self._run, self._kind = module, run, kind
        available = torch.amp.is_autocast_available(kind)
        self.autocast = available and torch.is_autocast_enabled(kind)

    def precision(self, mode: Mode) -> AbstractContextManager[Any]:
        return torch.autocast(self._kind, enabled=False) if mode.no_autocast and self.autocast else nullcontext()

    def __call__(self, given: Any, mode: Mode) -> Ran:
        observed = Observed(self._module, no_dropout=mode.no_dropout)
        try:
            with self.precision(mode):
                run = self._run(observed, *given, evaluate=mode.evaluate)
        except UnsupportedModelError:
            raise
        except Exception as error:  # whatever a model raises on rows it was not called with
            first = (str(error).splitlines() or [""])[0][:200]
            raise RunFailed(
                f"the model failed {mode.words} on changed rows ({type(error).__name__}: {first})"
            ) from error
        return Ran(run, observed.after[-1], self.autocast and not mode.no_autocast)


class Observed(nn.Module):
    """A module around the model. Every run starts from the same state, and the generators' state after it is noted."""

    def __init__(self, module: nn.Module, *, no_dropout: bool = False) -> None:
        super().__init__()
        self.module, self.no_dropout = module, no_dropout
        self.training = module.training
        self.after: list[RngState] = []

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        with _put_back_in_place(self.module):
            if self.no_dropout:
                _switch_dropout_off(self.module)
            outputs = all_tensors(self.module(*args, **kwargs))
            self.after.append(rng_state(_device_of(self.module)))
            return [t.clone() for t in outputs]  # one that is also an attribute is put back


def all_tensors(output: Any) -> list[Tensor]:
    """The tensors of an output, dataclasses included that nobody has registered with pytree."""
    found = tensors_in(output)
    if not found and dataclasses.is_dataclass(output) and not isinstance(output, type):
        values = [getattr(output, field.name) for field in dataclasses.fields(output)]
        found = [t for value in values for t in all_tensors(value)]
    return found


def _switch_dropout_off(module: nn.Module) -> None:
    """The attributes are put back by plain_run."""
    for child in module.modules():
        if isinstance(child, _DropoutNd):
            child.p = 0.0
        elif isinstance(child, nn.MultiheadAttention | nn.RNNBase):
            child.dropout = 0.0


@contextmanager
def _put_back_in_place(module: nn.Module) -> Iterator[None]:
    undo = [put_back for value in _attributes(module) if (put_back := _undo(value)) is not None]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _attributes(module: nn.Module) -> Iterator[Any]:
    for child in module.modules():
        for name, value in vars(child).items():
            if name in _INTERNAL:
                continue
            yield value
            if hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value):
                yield from vars(value).values()  # an object that holds a generator or counts its calls
            elif isinstance(value, list | tuple):
                yield from (v for v in value if isinstance(v, Tensor | torch.Generator))


def _undo(value: Any) -> Callable[[], Any] | None:
    """What puts a value back to what it is now."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if type(value) is Tensor and not value.requires_grad:
        return _undo_tensor(value)
    if isinstance(value, list | deque):
        return partial(_refill, value, value.extend, list(value))
    if isinstance(value, dict | set):
        return partial(_refill, value, value.update, value.copy())
    return None


def _refill(container: Any, fill: Callable[[Any], None], items: Any) -> None:
    container.clear()
    fill(items)


def _undo_tensor(value: Tensor) -> Callable[[], Any]:
    copy, version = value.clone(), value._version

    def put_back() -> None:
        if value._version != version:
            with torch.no_grad():
                value.copy_(copy)

    return put_back
