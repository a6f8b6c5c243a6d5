"""From norms to weights to clipped sums: what an example counts, and who computes it.

Of every group a bound C, and of every example in it a weight min(1, C / norm); or, where given, C / (norm + gamma), or
norms of whitened coordinates. A use that holds whole groups by itself is clipped at once, by a kernel where one fits;
uses that only together hold a group say their norms first. Norms and weights are noted in the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gradveil.clipping import cuda_dispatch as on_cuda
from gradveil.clipping.backends import cuda
from gradveil.clipping.backward_pass import BackwardPass, ClipStats, DeviceBounds, inside
from gradveil.clipping.per_sample_grads import CombinedGrads, PerSampleGrads, Weigh, WhitenedGrads, weights_of
from gradveil.clipping.rules.linear import LinearGrads
from gradveil.clipping.tied_weights import TiedGrads
from gradveil.clipping.tracked_modules import TiedWeights, TrackedModule
from gradveil.clipping.validation.support import half_precision
from gradveil.errors import ConfigError

_ALL = slice(None)
Whitening = dict[str, tuple[Tensor, Tensor]]  # parameter name -> (centre m, scale b) of its coordinates


class ClipFactors:
    """The bounds of the coming passes, and what is clipped to them."""

    def __init__(self, groups: int, bounds: Sequence[float]) -> None:
        self.groups = groups
        self.clip_stats = ClipStats(groups)  # of the current step
        self.whitening: Whitening | None = None
        self.gamma: float | None = None  # where given, an example's gradient g counts as C g / (|g| + gamma)
        self._on_device: dict[torch.device, DeviceBounds] = {}
        self._bounds: tuple[float, ...] = ()
        self.bounds_inside: list[float] = []  # a little lower, see inside()
        self.bounds = bounds

    @property
    def bounds(self) -> tuple[float, ...]:
        """The bound of each group in the coming passes."""
        return self._bounds

    @bounds.setter
    def bounds(self, bounds: Sequence[float]) -> None:
        bounds = tuple(bounds)
        if bounds == self._bounds:
            return
        if len(bounds) != self.groups:
            raise ConfigError(f"{len(bounds)} bounds for {self.groups} groups. Give one for each.")
        self._bounds = bounds
        margin = inside(torch.float32)
        self.bounds_inside = [bound * margin for bound in self._bounds]
        for kept in self._on_device.values():
            kept.set(self._bounds)

    def bounds_on(self, device: torch.device) -> DeviceBounds:
        if device not in self._on_device:
            self._on_device[device] = DeviceBounds(self._bounds, device)
        return self._on_device[device]

    @property
    def only_clips(self) -> bool:
        """Whether an example's weight is min(1, C / norm), as compiled kernels have it."""
        return self.whitening is None and self.gamma is None

    # ---- sums

    def clip_alone(self, unit: TrackedModule | TiedWeights, use: PerSampleGrads, current: BackwardPass) -> list[Tensor]:
        """The clipped sums of a use that holds whole groups by itself."""
        one_group = self.only_clips and not current.empty and len(set(unit.group_of)) == 1
        if not one_group:
            return self._whitened(unit, use).clipped_sums(self._weigh_groups(unit, current))
        group = unit.group_of[0]
        sums = self._kernel_sums(group, use, current)
        if sums is not None:
            return sums
        if use.device.type == "cpu" and current.present is None and not torch.is_grad_enabled():
            return use.clipped_sums(self._weigh_one_group(group, current))
        return use.clipped_sums(self._weigh_groups(unit, current))

    def clip_together(
        self, work: Sequence[tuple[TrackedModule | TiedWeights, PerSampleGrads]], current: BackwardPass
    ) -> Iterator[list[Tensor]]:
        """The clipped sums of uses that only together hold whole groups: norms first, then one contraction each."""
        work = [(unit, self._whitened(unit, use)) for unit, use in work]
        squares: dict[int, Tensor] = {}
        for unit, use in work:
            for group, square in zip(unit.group_of, use.sq_norms(), strict=True):
                squares[group] = squares[group] + square if group in squares else square
        weights = {g: self._weigh(g, square.sqrt(), square.dtype, current) for g, square in squares.items()}
        for unit, use in work:
            keep = self._kept([weights[g] for g in set(unit.group_of)], current, slice(None))
            if keep is not None:
                use.keep(keep)
            yield use.weighted_sums([weights[g] for g in unit.group_of])

    def _whitened(self, unit: TrackedModule | TiedWeights, use: PerSampleGrads) -> PerSampleGrads:
        if self.whitening is None:
            return use
        centres, scales = zip(*(self.whitening[name] for name in unit.names), strict=True)
        return WhitenedGrads(use, centres, scales)

    def _kernel_sums(self, group: int, use: PerSampleGrads, current: BackwardPass) -> list[Tensor] | None:
        """By a compiled kernel, where one fits."""
        if use.device.type == "cuda":
            if not cuda.available():
                return None
            bounds = self.bounds_on(use.device)
            clip = cuda.Clip(bounds.inside_of[group], current.flags(use.device), current.present)
            found = on_cuda.clipped(use, clip)
            if found is None:
                return None
            current.note(group, found.norms, found.weights, bounds.exact_of[group])
            return found.sums
        if current.present is not None:
            return None  # the CPU's kernels know of no padding
        at_once = use.clipped_at_once(self.bounds_inside[group])
        if at_once is None:
            return None
        current.note(group, at_once.norms, at_once.weights, self.bounds[group])
        if at_once.not_finite:
            self._kept([at_once.weights], current, slice(None))
        return at_once.sums

    # ---- weights

    def _weigh_one_group(self, group: int, current: BackwardPass) -> Weigh:
        """As :meth:`_weigh_groups` on the CPU, where a use is of one group and nothing is padded."""

        def weigh(rows: slice, squares: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
            with np.errstate(over="ignore"):
                norms = np.sqrt(sum(square.numpy() for square in squares))
            found, finite = weights_of(norms, self.bounds[group] * inside(squares[0].dtype))
            weights = torch.from_numpy(found)
            current.note(group, torch.from_numpy(norms), weights, self.bounds[group])
            keep = None if finite is None else self._kept([weights], current, rows)
            return [weights] * len(squares), keep

        return weigh

    def _weigh_groups(self, unit: TrackedModule | TiedWeights, current: BackwardPass) -> Weigh:
        def weigh(rows: slice, squares: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
            of_group: dict[int, Tensor] = {}
            for group, square in zip(unit.group_of, squares, strict=True):
                of_group[group] = of_group[group] + square if group in of_group else square
            found = {g: self._weigh(g, s.sqrt(), s.dtype, current, rows) for g, s in of_group.items()}
            return [found[g] for g in unit.group_of], self._kept(list(found.values()), current, rows)

        return weigh

    def _weigh(
        self, group: int, norms: Tensor, dtype: torch.dtype, current: BackwardPass, rows: slice = _ALL
    ) -> Tensor:
        """min(1, C / norm) per example, or C / (norm + gamma); 0 where the norm is not finite, for padding, and for an
        empty batch.
        """
        if current.empty:
            return torch.zeros_like(norms)
        bound: float | Tensor = self.bounds_on(norms.device).exact_of[group] if norms.is_cuda else self.bounds[group]
        scale = bound * inside(dtype)  # a few units in the last place lower: rounding cannot carry a norm over it
        if self.gamma is None:
            weights = norms.reciprocal().mul_(scale).clamp_(max=1.0).nan_to_num_(nan=0.0)
        else:
            weights = (norms + self.gamma).reciprocal_().mul_(scale).nan_to_num_(nan=0.0)
        if current.present is not None:
            weights = weights * current.present[rows]
        current.note(group, norms, weights, bound)
        return weights

    def _kept(self, weights: list[Tensor], current: BackwardPass, rows: slice) -> Tensor | None:
        """Which examples count in all these groups; None where it is known, without waiting for a GPU, that all do."""
        keep = weights[0] > 0
        for other in weights[1:]:
            keep = keep & (other > 0)
        if keep.device.type == "cpu" and bool(keep.all()):
            return None
        lost = ~keep if current.present is None else ~keep & current.present[rows]
        current.flags(keep.device)[rows] |= lost
        return keep


def as_parameter(total: Tensor, parameter: Tensor, name: str) -> Tensor:
    """A sum in the type of the parameter. FSDP may have made that a narrower one."""
    if total.dtype == parameter.dtype:
        return total
    if parameter.dtype in (torch.float16, torch.bfloat16):
        raise half_precision(name, parameter.dtype)
    return total.to(parameter.dtype)


def together(of: TrackedModule | TiedWeights, kept: Sequence[tuple[TrackedModule, PerSampleGrads]]) -> PerSampleGrads:
    """What an example adds to the parameters of a unit, or of units that share some, in all their uses of a pass."""
    if isinstance(of, TiedWeights):
        return TiedGrads([use for _, use in kept], [of.places(unit) for unit, _ in kept], of.parameters)
    uses = [use for _, use in kept]
    if len(uses) == 1:
        return uses[0]
    return LinearGrads.joined(uses) or CombinedGrads(uses)
