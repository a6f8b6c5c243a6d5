"""One pass through a model: what it is made of, what it leaves behind, and the bounds it reads on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.clipping.backends.layers import Layers
from gradveil.clipping.operations.sources import Source
from gradveil.clipping.per_sample_grads import PerSampleGrads
from gradveil.clipping.tracked_modules import TrackedModule


@dataclass(frozen=True)
class Padding:
    """Which places of a batch hold examples, and where those that are not finite are flagged (kept by the caller)."""

    present: Tensor  # (batch,) bool
    lost: Tensor  # (batch,) int32


class BackwardPass:
    """One forward call of the model with gradients enabled, and the backward pass that follows it."""

    def __init__(self, batch: int, *, empty: bool, views: int = 1, padding: Padding | None = None) -> None:
        self.batch, self.views = batch, views  # examples, and the rows that each of them has
        self.rows = batch * views
        self.empty = empty  # the batch had no example; one row of zeros stands in, and counts for nothing
        self.present = padding.present if padding is not None else None  # which are examples; None: all
        # Where layers run in C++: the library, and the number of this pass there; it then keeps count of calls.
        self.library: Layers | None = None
        self.number = -1
        self._calls: dict[TrackedModule, int] = {}  # in the forward pass
        self._recalls: dict[TrackedModule, int] = {}  # when a checkpointed part is run again in the backward pass
        self._clipped: set[TrackedModule] = set()
        self._claimed: set[int] = set()  # groups that were clipped at the end of a backward pass
        self.kept: list[tuple[TrackedModule, PerSampleGrads]] = []
        self.step = 0  # of the clipper, in which the pass began
        self.sums: list[tuple[int, Tensor]] = []  # slot of a parameter, and its clipped sum
        self.notes: list[tuple[int, Tensor, Tensor, float | Tensor]] = []  # for ClipStats, when the pass has ended
        self.asked = False  # whether the backward pass under way is to reach the parameters
        self.counted = False
        # (batch,) int32: 1 where an example was not finite in some group
        self._lost: Tensor | None = padding.lost if padding is not None else None
        self.differentiated = False
        self.inputs: set[torch.Size] = set()  # shapes of the model's inputs
        self.moved: list[TrackedModule] = []  # whose rows are not the examples in their order

    @property
    def started(self) -> bool:
        """Whether the backward pass has come through the model's output."""
        return self.differentiated if self.library is None else self.library.started(self.number)

    def count(self, unit: TrackedModule, *, again: bool) -> None:
        """A call of a unit, in the forward pass or again in the backward pass."""
        if self.library is not None:
            self.library.count(self.number, unit.index, again)
        else:
            counts = self._recalls if again else self._calls
            counts[unit] = counts.get(unit, 0) + 1

    def uses(self, unit: TrackedModule) -> int:
        """How often a unit is used. A checkpoint that keeps its graph calls a unit again without using it again."""
        if self.library is not None:
            return self.library.uses(self.number, unit.index)
        return max(self._calls.get(unit, 0), self._recalls.get(unit, 0))

    def was_clipped(self, unit: TrackedModule) -> bool:
        return self.library.was_clipped(self.number, unit.index) if self.library is not None else unit in self._clipped

    def set_clipped(self, unit: TrackedModule) -> None:
        if self.library is not None:
            self.library.set_clipped(self.number, unit.index)
        else:
            self._clipped.add(unit)

    def claim(self, group: int) -> bool:
        """Whether the group was not clipped yet, at the end of an earlier backward() of this pass; now it is."""
        if self.library is not None:
            return self.library.claim(self.number, group)
        new = group not in self._claimed
        self._claimed.add(group)
        return new

    def flags(self, device: torch.device) -> Tensor:
        """Where examples that were not finite are flagged."""
        if self.library is not None:
            return self.library.flags(self.number, torch.empty(0, device=device))
        if self._lost is None:
            self._lost = torch.zeros(self.batch, dtype=torch.int32, device=device)
        return self._lost

    def deliver(self, slot: int, total: Tensor) -> None:
        """A clipped sum; with others of its parameter it is added up when the pass has ended."""
        if self.library is not None:
            self.library.deliver(self.number, slot, total)
        else:
            self.sums.append((slot, total))

    def note(self, group: int, norms: Tensor, weights: Tensor, bound: float | Tensor) -> None:
        """Norms before clipping, and the weights that clip them to ``bound``."""
        self.notes.append((group, norms, weights, bound))

    def keep(self, unit: TrackedModule, use: PerSampleGrads) -> None:
        """A use that waits for the end of the pass."""
        if self.library is not None and not self.kept:
            self.library.keeps_uses(self.number)
        self.kept.append((unit, use))

    @property
    def lost(self) -> Tensor | None:
        """The flags, if there are any; in C++ they are gathered there."""
        return self._lost


class Call:
    """One use of a unit in a pass.

    ``sources``: the tensors that the operation took, in the order of its use's parameters. ``fold``: how many rows of
    the use are one row of the batch, one after the other.
    """

    def __init__(
        self, unit: TrackedModule, current: BackwardPass, *, again: bool, sources: Sequence[Source], fold: int = 1
    ) -> None:
        self.unit, self.current, self.done = unit, current, False
        self.sources, self.fold = sources, fold
        current.count(unit, again=again)


def count_flags(flags: Sequence[Tensor]) -> int:
    """How many are set, of flags or counts; read from a GPU at once."""
    if not flags:
        return 0
    alike = len({f.shape for f in flags}) == 1
    return int(torch.stack(list(flags) if alike else [f.sum() for f in flags]).sum())


class ClipStats:
    """What the passes since the last release add up to, beside the gradients themselves.

    Norms are kept as they come and looked at only when asked for: most strategies never ask, and on a GPU
    every look is a launch.
    """

    def __init__(self, groups: int) -> None:
        self.examples = 0
        self.passes = 0
        self.lost: list[Tensor] = []  # flags of the examples that were dropped in some group, a tensor per pass
        self._of_group: list[list[tuple[Tensor, Tensor, float | Tensor]]] = [[] for _ in range(groups)]
        self._unread: list[tuple[list[int], list[Tensor], Sequence[float | Tensor]]] = []  # of layers in C++

    @property
    def not_finite(self) -> int:
        """How many examples were dropped in some group."""
        return count_flags(self.lost)

    def note(self, group: int, norms: Tensor, weights: Tensor, bound: float | Tensor) -> None:
        """Norms before clipping, and the weights that clip them to ``bound``."""
        self._of_group[group].append((norms, weights, bound))

    def note_layers(self, groups: list[int], found: list[Tensor], bounds: Sequence[float | Tensor]) -> None:
        """As :meth:`note`, several groups at once: (norms, weights) of each, and the bounds of all groups."""
        self._unread.append((groups, found, bounds))

    def _noted(self, group: int) -> list[tuple[Tensor, Tensor, float | Tensor]]:
        unread, self._unread = self._unread, []
        for groups, found, bounds in unread:
            for place, (norms, weights) in zip(groups, found, strict=True):
                self.note(place, norms, weights, bounds[place])
        return self._of_group[group]

    def norms(self) -> Tensor | None:
        """Before clipping, (groups, examples), of one pass; None where some group was not noted for every example."""
        found = [[norms for norms, _, _ in self._noted(group)] for group in range(len(self._of_group))]
        if not found or any(sum(map(len, of_group)) != self.examples for of_group in found):
            return None
        return torch.stack([torch.cat(of_group).double() for of_group in found])

    def largest_norm(self, group: int) -> Tensor | None:
        """The largest norm after clipping, on the device; None without examples."""
        found = [(norms * weights).nan_to_num(0.0).max() for norms, weights, _ in self._noted(group) if len(norms)]
        return torch.stack(found).max() if found else None

    def largest(self, group: int) -> float:
        """The largest norm after clipping."""
        found = self.largest_norm(group)
        return 0.0 if found is None else float(found)

    def largest_of_all(self) -> float:
        """The largest norm after clipping, of any group."""
        return max(self.largest(group) for group in range(len(self._of_group)))

    def beyond(self, group: int) -> Tensor | None:
        """How many examples had a norm beyond the bound before clipping, on the device; None where none was noted."""
        found = [((norms > bound) & (weights > 0)).sum() for norms, weights, bound in self._noted(group)]
        return torch.stack(found).sum() if found else None

    def counts_within(self) -> list[int]:
        """How many examples had a norm within the bound before clipping, of every group: read from a GPU at once.

        All that were not beyond it. An example that does not use a group's parameters, or whose gradient is not finite
        and counts as zero, has a norm of 0 there.
        """
        found = [self.beyond(group) for group in range(len(self._of_group))]
        known = [count for count in found if count is not None]
        values = iter(torch.stack(known).tolist() if known else ())
        return [self.examples - (0 if count is None else int(next(values))) for count in found]


class DeviceBounds:
    """The bounds on a device, written in place: kernels, and captured graphs, read them when they run."""

    def __init__(self, bounds: Sequence[float], device: torch.device) -> None:
        self._exact = torch.empty(len(bounds), dtype=torch.float64, device=device)
        self.inside = torch.empty(len(bounds), dtype=torch.float32, device=device)
        self.exact_of = self._exact.unbind()
        self.inside_of = self.inside.unbind()  # rounding margin taken off
        self._held: tuple[float, ...] = ()
        self.set(bounds)

    def set(self, bounds: Sequence[float]) -> None:
        if tuple(bounds) == self._held:
            return
        self._held = tuple(bounds)
        values = torch.tensor(self._held, dtype=torch.float64, pin_memory=self._exact.is_cuda)
        self._exact.copy_(values, non_blocking=True)
        self.inside.copy_(self._exact * inside(torch.float32))


def inside(dtype: torch.dtype) -> float:
    """A few units in the last place below 1: rounding cannot carry a norm over a bound that was lowered by it."""
    return 1.0 - 16.0 * torch.finfo(dtype).eps
