"""The arguments of a model's call with other rows, and which of them are the same for all examples."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from gradveil.clipping.validation.shadow_forward import Arguments


class SharedArguments:
    """Which arguments of a model are the same for all examples, learned from calls with different batch sizes.

    A (T, T) bias is mistaken for T examples in a batch of T. It is known to be shared once a batch of another size has
    been seen with it.
    """

    def __init__(self) -> None:
        self.positions: set[int] = set()  # in the flat list of arguments

    def note(self, args: Any, kwargs: Any, rows: int) -> None:
        self.positions.update(BatchArguments(args, kwargs, rows).without_the_batch())


class BatchArguments(Arguments):
    def without_the_batch(self) -> list[int]:
        sized = [i for i, t in enumerate(self._leaves) if isinstance(t, Tensor) and t.dim() > 0]
        return [i for i in sized if i not in self._batched]

    def leave_out(self, shared: Collection[int]) -> None:
        self._batched = [i for i in self._batched if i not in shared]

    @torch.no_grad()
    def with_rows(self, batched: list[int], index: Tensor) -> Any:
        """The call with these rows. Also used for the batch as it is, so that all runs see the same memory layout."""
        return self._changed(batched, lambda t: t.detach().index_select(0, index.to(t.device)))

    @torch.no_grad()
    def changes(self, batched: list[int], index: Tensor) -> bool:
        leaves = [self._leaves[i] for i in batched]
        return any(not torch.equal(t, t.index_select(0, index.to(t.device))) for t in leaves)

    def kind(self) -> str:
        return next((t.device.type for t in self._leaves if isinstance(t, Tensor)), "cpu")
