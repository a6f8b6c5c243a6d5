"""Gradients on their way to ``.grad``, and whether they are still the same when ``step()`` takes them.

The C++ library (kernels/layers.py) has the same watch for models with many small layers; this one is always there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from gradveil.kernels.layers import Gathered


class Watch(Protocol):
    """Every followed parameter has a hook that lets only its clipped sum through, and a stamp of its gradient."""

    number: int
    own_hooks: int  # that Python can see on a followed parameter

    def follow(self, parameter: Tensor) -> int:
        """A number for the parameter, whose hook is taken off by :meth:`forget`."""

    def forget(self, parameter: Tensor, slot: int) -> None: ...

    def expect(self, slot: int, total: Tensor) -> None:
        """The gradient that is to come."""

    def stamp(self) -> None:
        """The gradients as they are now are the ones that were clipped."""

    def start_step(self) -> None:
        """Nothing is stamped, or gathered, yet."""

    def touched(self) -> int:
        """The first parameter whose gradient is not as it was stamped; -1: none."""

    def differentiating(self) -> int:
        """The number of the pass whose backward is under way in C++; -1: none."""

    def gathered(self) -> Gathered:
        """What passes in C++ add up to since it was last asked for."""


class PythonWatch:
    """See :class:`Watch`."""

    own_hooks = 1

    def __init__(self, refuse: Callable[[int, str], None]) -> None:
        self.number = -1  # by which C++ knows a watch: not this one
        self._refuse = refuse
        self._parameters: list[Tensor] = []
        self._expected: list[Tensor | None] = []
        self._handles: list[Any] = []
        self._stamps: list[tuple[int, int] | None] = []  # where a gradient is, and how often it was written to

    def follow(self, parameter: Tensor) -> int:
        slot = len(self._expected)
        self._parameters.append(parameter)
        self._expected.append(None)

        def check(grad: Tensor | None) -> None:
            mine, self._expected[slot] = self._expected[slot], None
            if grad is None:  # kept for the end of the pass
                return
            if mine is None or mine.data_ptr() != grad.data_ptr():
                self._refuse(slot, "stranger")

        self._handles.append(parameter.register_hook(check))
        return slot

    def forget(self, parameter: Tensor, slot: int) -> None:
        self._handles[slot].remove()

    def expect(self, slot: int, total: Tensor) -> None:
        # The reference that is held until the hook has run keeps autograd from adding another gradient into it.
        self._expected[slot] = total

    def stamp(self) -> None:
        self._stamps = [_stamp(p) for p in self._parameters]

    def start_step(self) -> None:
        self._stamps = []

    def touched(self) -> int:
        stamps = self._stamps or [None] * len(self._parameters)
        for i, (parameter, stamp) in enumerate(zip(self._parameters, stamps, strict=True)):
            if parameter.grad is not None and stamp != _stamp(parameter):
                return i
        return -1

    def differentiating(self) -> int:
        return -1

    def gathered(self) -> Gathered:
        return 0, 0, [], [], []


def _stamp(parameter: Tensor) -> tuple[int, int] | None:
    grad = parameter.grad
    return None if grad is None else (grad.data_ptr(), grad._version)
