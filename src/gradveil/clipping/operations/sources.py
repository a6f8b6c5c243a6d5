"""What an operation can use of a model's parameters: a parameter itself, or something derived from parameters alone.

A derived parameter (transposed, sliced, cast, normalised, looked up at constant positions, a product of two) is
followed like a parameter. The gradient that an operation finds for it is pulled back to the parameters it comes from:
of each example where the norm is asked for, of the sum otherwise, since pulling back is linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gradveil.clipping.per_sample_grads import MaterializedGrads, PerSampleGrads, Weigh, at_least_float32
from gradveil.clipping.rules.embedding import EmbeddingGrads

Key = Any


@dataclass(frozen=True)
class Region:
    """The elements of a parameter that a view of it holds, each once."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, view: Tensor, parameter: Tensor) -> Region | None:
        """None where it is no view of the parameter, or holds some of its elements more than once."""
        if view.dtype != parameter.dtype or view.is_sparse or parameter.is_sparse or not view.numel():
            return None
        if view.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            return None
        reach = 0
        for stride, size in sorted((s, n) for s, n in zip(view.stride(), view.shape, strict=True) if n > 1):
            if stride <= reach:
                return None
            reach += stride * (size - 1)
        return cls(int(view.storage_offset() - parameter.storage_offset()), tuple(view.shape), tuple(view.stride()))

    @classmethod
    def whole(cls, parameter: Tensor) -> Region:
        return cls(0, tuple(parameter.shape), tuple(parameter.stride()))

    def elements(self) -> frozenset[int]:
        found = [self.offset]
        for size, stride in zip(self.shape, self.stride, strict=True):
            found = [start + i * stride for start in found for i in range(size)]
        return frozenset(found)


@lru_cache(maxsize=1024)
def are_disjoint(a: Region, b: Region) -> bool:
    """Whether two regions of one parameter share no element."""
    ends = [r.offset + sum(s * (n - 1) for s, n in zip(r.stride, r.shape, strict=True)) for r in (a, b)]
    if ends[0] < b.offset or ends[1] < a.offset:
        return True
    return a.elements().isdisjoint(b.elements())


@dataclass(eq=False)
class Lookup:
    """A derived parameter that holds rows of a parameter, at constant places."""

    rows: Tensor  # as the lookup gave them, (*index.shape, D)
    index: Tensor
    shape: tuple[int, int]


@dataclass(eq=False)
class Source:
    """A tensor that is made of parameters alone. ``key`` tells the same tensor in another pass."""

    tensor: Tensor  # the parameter; or the derived one, whose graph leads to ``aliases``
    key: Key
    slots: tuple[int, ...]  # of the parameters it comes from
    aliases: tuple[Tensor, ...] = ()  # leaves that stand for them; none: it is the parameter itself
    keeps_norms: bool = True  # pulling a gradient back to the parameter leaves its norm as it is
    region: Region | None = None  # of the one parameter, whose elements it holds
    lookup: Lookup | None = None
    _cut: Tensor | None = field(default=None, repr=False)

    @property
    def is_parameter(self) -> bool:
        return not self.aliases

    def given(self) -> Tensor:
        """What operations get: the parameter, or a leaf in place of the derived one.

        Its own graph must not be walked by the user's backward pass, which would free it.
        """
        if self.is_parameter:
            return self.tensor
        if self._cut is None:
            self._cut = leaf_like(self.tensor)
        return self._cut

    def pull(self, grads: Tensor, *, batched: bool) -> list[Tensor | None]:
        """Gradients of the parameters, from that of this tensor; ``batched``: of every example, (b, ...)."""
        if self.is_parameter:
            return [grads]
        grads = grads.to(self.tensor.dtype)
        if not batched:
            return self._pull_one(grads)
        try:
            found = torch.autograd.grad(
                self.tensor, self.aliases, grads, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        except (RuntimeError, NotImplementedError):  # some operation that vmap does not know
            columns = zip(*map(self._pull_one, grads), strict=True)
            return [
                None if column[0] is None else torch.stack([g for g in column if g is not None]) for column in columns
            ]
        return list(found)

    def _pull_one(self, grad: Tensor) -> list[Tensor | None]:
        found = torch.autograd.grad(self.tensor, self.aliases, grad, retain_graph=True, allow_unused=True)
        return [g.to_dense() if g is not None and g.is_sparse else g for g in found]


def leaf_like(t: Tensor) -> Tensor:
    """A leaf of a pass, in place of a parameter or of what is derived from some."""
    return mark_of_a_pass(t.detach().requires_grad_())


def mark_of_a_pass(leaf: Tensor) -> Tensor:
    leaf._gradveil = True  # type: ignore[attr-defined]
    return leaf


def is_of_a_pass(leaf: Tensor) -> bool:
    return getattr(leaf, "_gradveil", False)


def of_parameters(use: PerSampleGrads, sources: Sequence[Source]) -> PerSampleGrads:
    """The use of tensors as one of the parameters they come from, in the order of :func:`slots_of`."""
    if all(source.is_parameter for source in sources) and len(slots_of(sources)) == len(sources):
        return use
    only = sources[0]
    if len(sources) == 1 and only.lookup is not None and isinstance(use, MaterializedGrads):
        found = _looked_up(use, only)
        if found is not None:
            return found
    return DerivedGrads(use, sources)


def slots_of(sources: Sequence[Source]) -> tuple[int, ...]:
    """The parameters behind these tensors, each once."""
    return tuple(dict.fromkeys(slot for source in sources for slot in source.slots))


def _looked_up(use: MaterializedGrads, source: Source) -> PerSampleGrads | None:
    """Rows of a large table, as an embedding has them: the table's gradient is not formed for every example."""
    lookup = source.lookup
    assert lookup is not None
    if lookup.shape[0] * lookup.shape[1] <= 4 * lookup.rows.numel():
        return None
    grads = use.grads[0]
    if source.tensor is not lookup.rows:
        (grads,) = torch.autograd.grad(
            source.tensor, lookup.rows, grads.to(source.tensor.dtype), retain_graph=True, is_grads_batched=True
        )
    tokens = lookup.index.reshape(1, -1).expand(len(grads), -1)
    return EmbeddingGrads(tokens, grads.reshape(*tokens.shape, -1), lookup.shape)


class DerivedGrads(PerSampleGrads):
    """A use of derived parameters, as one of the parameters they come from."""

    def __init__(self, use: PerSampleGrads, sources: Sequence[Source]) -> None:
        self.use, self.sources = use, list(sources)
        self.slots = slots_of(sources)
        self.examples, self.device = use.examples, use.device
        sizes = {slot: alias.numel() for s in sources for slot, alias in zip(s.slots, s.aliases, strict=False)}
        self.elements_per_example = use.elements_per_example + sum(sizes.values())
        self._dropped: Tensor | None = None

    @property
    def apart(self) -> bool:
        """Whether every parameter comes in through one tensor only, and its gradient is as long as that tensor's."""
        slots = [slot for source in self.sources for slot in source.slots]
        return all(s.keeps_norms and len(s.slots) == 1 for s in self.sources) and len(slots) == len(set(slots))

    def is_apart_from(self, other: PerSampleGrads) -> bool:
        """Whether two uses reach no element of a parameter both."""
        if not isinstance(other, DerivedGrads):
            return False
        return all(
            mine.region is not None and theirs.region is not None and are_disjoint(mine.region, theirs.region)
            for mine in self.sources
            for theirs in other.sources
            if set(mine.slots) & set(theirs.slots)
        )

    def per_example(self, rows: slice) -> list[Tensor]:
        found = self._pulled([at_least_float32(g) for g in self.use.per_example(rows)], batched=True)
        return found if self._dropped is None else [_kept(g, self._dropped[rows]) for g in found]

    def _pulled(self, grads: Sequence[Tensor], *, batched: bool) -> list[Tensor]:
        totals: dict[int, Tensor] = {}
        shapes: dict[int, torch.Size] = {}
        for source, grad in zip(self.sources, grads, strict=True):
            for slot, part in zip(source.slots, source.pull(grad, batched=batched), strict=True):
                if part is not None:
                    totals[slot] = totals[slot] + part if slot in totals else part
            for slot, alias in zip(source.slots, source.aliases, strict=False):
                shapes[slot] = alias.shape
        count = (len(grads[0]),) if batched else ()
        return [
            at_least_float32(totals[slot]) if slot in totals else grads[0].new_zeros((*count, *shapes[slot]))
            for slot in self.slots
        ]

    def _drop(self, keep: Tensor) -> None:
        self.use.keep(keep)
        self._dropped = keep

    def sq_norms(self) -> list[Tensor]:
        return self.use.sq_norms() if self.apart else super().sq_norms()

    def clipped_sums(self, weigh: Weigh) -> list[Tensor]:
        return self._clipped_by_norms(weigh) if self.apart else super().clipped_sums(weigh)

    def weighted_sums(self, weights: Sequence[Tensor]) -> list[Tensor]:
        if self._cached:
            return super().weighted_sums(weights)
        by_weight: dict[int, list[int]] = {}
        for place, weight in enumerate(weights):
            by_weight.setdefault(id(weight), []).append(place)
        found: dict[int, Tensor] = {}
        for places in by_weight.values():
            sums = self.use.weighted_sums([weights[places[0]]] * len(self.sources))
            pulled = self._pulled(sums, batched=False)
            found |= {place: pulled[place] for place in places}
        return [found[place] for place in range(len(weights))]


def _kept(t: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros((), dtype=t.dtype, device=t.device))
