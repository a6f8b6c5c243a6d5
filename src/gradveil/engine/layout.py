"""What a loader's collate_fn does with the examples, from calls of it on the first few of the data set.

Where it puts them: along the first dimension of its tensors, or along another one. With as many time steps as
examples, a batch (time, examples, ...) looks like one with the examples first. The collate_fn tells them apart: of one,
two and three examples, only the dimension of the examples has that size.

Whether it keeps them apart: when one example is exchanged, one row may change. Where others do (MixUp, centring, one
example in several rows), the loader is refused. Nothing is said where a collate_fn does not give the same twice, and
where a row may change for another reason: examples of different sizes may be padded and sorted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, default_collate

from gradveil.clipping._rng import RngState, rng_at, rng_state, same_rng
from gradveil.engine.drawn import tensors_of
from gradveil.errors import PrivacyViolation

Collate = Callable[[list[Any]], Any]

_SIZES = (1, 2, 3)
_EXAMPLES = 4  # that are collated, and exchanged one by one
_CPU = torch.device("cpu")


class Layout:
    """Which tensors of a batch do not have the examples first; a collate_fn that mixes examples is refused."""

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._misplaced: set[int] = set()  # in the flat list of a batch
        if collate is None or collate is default_collate:
            return
        mixes = False
        with suppress(Exception), rng_at(rng_state(_CPU), _CPU):  # of a data set or collate_fn that is particular
            examples = [dataset[i] for i in range(max(_SIZES))]
            self._misplaced = _misplaced([tree_leaves(collate(examples[:size])) for size in _SIZES])
        with suppress(Exception), rng_at(rng_state(_CPU), _CPU):
            count = min(_EXAMPLES, len(dataset))  # type: ignore[arg-type]
            mixes = _mixes(collate, [dataset[i] for i in range(count)])
        if mixes:
            raise PrivacyViolation(
                "the loader's collate_fn mixes examples: when one example of a batch is exchanged, the rows that it "
                "makes of others change too. One example would then contribute to several rows, and clipping each row "
                "does not bound its influence. Make each row from one example alone: no MixUp or CutMix, no centring "
                "or other statistics over the batch, no example in several rows. Augment each example by itself, in "
                "the data set or with views=K."
            )

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


def _mixes(collate: Collate, examples: Sequence[Any]) -> bool:
    """Whether rows of other examples are seen to change when one is exchanged, all random draws being the same."""
    start, count = rng_state(_CPU), len(examples)

    def collated(chosen: Iterable[int]) -> tuple[list[Tensor], RngState]:
        # Copies: a collate_fn may take its examples apart, and use the memory of its batches again.
        with rng_at(start, _CPU):
            tensors = tensors_of(collate([copy.deepcopy(examples[i]) for i in chosen]))
            return [t.clone() for t in tensors], rng_state(_CPU)

    whole, end = collated(range(count))
    again, _ = collated(range(count))
    fewer, _ = collated(range(count - 1))
    if not len(whole) == len(again) == len(fewer) or not all(map(_same, whole, again)):
        return False
    alike = len({_sizes(example) for example in examples}) == 1
    if not alike and not same_rng(start, end):
        return False  # with another order, rows get other draws
    of_examples = [
        i for i, (t, f) in enumerate(zip(whole, fewer, strict=True)) if _length(t) == _length(f) + 1 == count
    ]
    if not alike:
        # The order may change, of each tensor on its own, and numbers of it with it (offsets, permutations).
        of_examples = [i for i in of_examples if whole[i].is_floating_point() or whole[i].dim() > 1]
    together = [of_examples] if alike else [[i] for i in of_examples]
    for exchanged in range(count):
        other, now = collated((i + 1) % count if i == exchanged else i for i in range(count))
        if not same_rng(end, now) or [t.shape for t in other] != [t.shape for t in whole]:
            continue  # other draws, or other padding
        for places in together:
            if _rows_kept([whole[i] for i in places], [other[i] for i in places], count) < count - 1:
                return True
    return False


def _sizes(example: Any) -> tuple[Any, ...]:
    leaves = tree_leaves(example)
    return tuple(len(leaf) if isinstance(leaf, str | bytes) else tuple(getattr(leaf, "shape", ())) for leaf in leaves)


def _length(t: Tensor) -> int:
    return len(t) if t.dim() else -1


def _rows_kept(before: Sequence[Tensor], after: Sequence[Tensor], count: int) -> int:
    """How many rows, over all these tensors, are still there, wherever they stand."""
    left = set(range(count))
    for row in range(count):
        same = [i for i in left if all(_same(b[row], a[i]) for b, a in zip(before, after, strict=True))]
        left -= set(same[:1])
    return count - len(left)


def _same(a: Tensor, b: Tensor) -> bool:
    """Up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
