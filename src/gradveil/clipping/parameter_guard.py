"""The guard on tracked parameters: no gradient reaches them through autograd.

The C++ library (backends/layers.py) has the same for models with many small layers, and holds what passes there have
left; this one is always there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gradveil.clipping.backends.layers import Gathered, Sums


class Watch(Protocol):
    """A hook on every tracked parameter refuses any gradient, and passes in C++ leave their sums here.

    Rules return no gradient for a parameter, so one that arrives is from a use that nobody clipped.
    """

    number: int
    own_hooks: int  # that Python can see on a followed parameter

    def follow(self, parameter: Tensor) -> int:
        """A number for the parameter, whose hook is taken off by :meth:`forget`."""

    def forget(self, parameter: Tensor, slot: int) -> None: ...

    def lenient(self, on: bool) -> None:
        """While on, gradients of untracked passes go to the parameters."""

    def other_leaves(self) -> list[Tensor]:
        """Leaves that the backward pass under way may reach, other than followed parameters."""

    def take_sums(self) -> Sums:
        """The sums that passes in C++ have left since they were last taken."""

    def start_step(self) -> None:
        """Nothing is gathered yet."""

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
        self._handles: list[Any] = []
        self._followed: set[int] = set()  # ids
        self._lenient = False

    def follow(self, parameter: Tensor) -> int:
        slot = len(self._handles)
        self._followed.add(id(parameter))

        def check(grad: Tensor | None) -> None:
            if grad is not None and not self._lenient:
                self._refuse(slot, "stranger")

        self._handles.append(parameter.register_hook(check))
        return slot

    def forget(self, parameter: Tensor, slot: int) -> None:
        self._handles[slot].remove()

    def lenient(self, on: bool) -> None:
        self._lenient = on

    def other_leaves(self) -> list[Tensor]:
        try:
            nodes = cast(Any, torch._C)._current_graph_task_execution_order()
        except RuntimeError:  # on several devices; the loss is looked at on checked batches, and inputs in every call
            return []
        leaves = [getattr(node, "variable", None) for node in nodes]
        return [leaf for leaf in leaves if leaf is not None and id(leaf) not in self._followed]

    def take_sums(self) -> Sums:
        return [], []

    def start_step(self) -> None:
        pass

    def differentiating(self) -> int:
        return -1

    def gathered(self) -> Gathered:
        return 0, 0, [], [], []
