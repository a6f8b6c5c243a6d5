"""Where a loader's collate_fn puts the examples: along the first dimension of its tensors, or along another one.

With as many time steps as examples, a batch (time, examples, ...) looks like one with the examples first. The
collate_fn tells them apart: of one, two and three examples, only the dimension of the examples has that size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, default_collate

from gradveil.clipping._rng import rng_at, rng_state

_SIZES = (1, 2, 3)


class Layout:
    """Which tensors of a batch do not have the examples first."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None) -> None:
        self._misplaced: set[int] = set()  # in the flat list of a batch
        if collate is None or collate is default_collate:
            return
        cpu = torch.device("cpu")
        with suppress(Exception), rng_at(rng_state(cpu), cpu):  # of a data set or collate_fn that is particular
            examples = [dataset[i] for i in range(max(_SIZES))]
            self._misplaced = _misplaced([tree_leaves(collate(examples[:size])) for size in _SIZES])

    def misplaced(self, batch: Any) -> list[Tensor]:
        """The tensors of a batch that do not have the examples first."""
        if not self._misplaced:
            return []
        leaves = tree_leaves(batch)
        return [leaves[i] for i in self._misplaced if i < len(leaves) and isinstance(leaves[i], Tensor)]


def _misplaced(collated: list[list[Any]]) -> set[int]:
    found = set()
    for place, leaves in enumerate(zip(*collated, strict=False)):
        if not all(isinstance(leaf, Tensor) and leaf.dim() > 1 for leaf in leaves):
            continue
        dims = range(min(leaf.dim() for leaf in leaves))
        of_examples = [d for d in dims if all(leaf.shape[d] == n for leaf, n in zip(leaves, _SIZES, strict=True))]
        if of_examples and 0 not in of_examples:
            found.add(place)
    return found
