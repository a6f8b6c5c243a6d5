"""What is checked before a release leaves the engine. Each guard watches one way in which a bound could break.

RepeatGuard   noise is never used twice on different gradients
BudgetGuard   the step that would overspend is refused before it is taken
FilterGuard   the same, where noise and the end of the run may follow released values

check_optimizer sees that what is updated is what is clipped and noised. Batches are in engine/batches.py.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradveil.clipping import count_flags
from gradveil.clipping.sharding import full_tensor
from gradveil.errors import BudgetExhausted, ConfigError, PrivacyViolation
from gradveil.mechanism.records import Release, RunHeader, planned_multiplier
from gradveil.mechanism.strategies import PrivacyPlan

if TYPE_CHECKING:
    from gradveil.accounting import FilterAccountant


def check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """At set-up: the optimizer holds nothing that is not part of the module."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS computes the gradient of one batch several times in a step, and a batch is released once. Use SGD, "
            "Adam or another optimizer that takes one gradient per step."
        )
    mine = {id(p) for p in module.parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in mine]
    if strangers:
        raise ConfigError(
            f"the optimizer holds {len(strangers)} parameter(s) that the module does not (the first has shape "
            f"{tuple(strangers[0].shape)}): they would be updated from gradients that nobody clipped or noised. "
            "Give the optimizer module.parameters()."
        )


class RepeatGuard:
    """The same noise on two different gradients cancels in their difference; the same release twice tells nothing new.

    A seeded run that goes back to a checkpoint, in this process or in a later one, must therefore repeat its
    releases bit for bit. The ledger holds a digest of each.
    """

    def __init__(self, releases: Iterable[Release], digest: Callable[[list[Tensor]], str] | None = None) -> None:
        self._earlier = {r.step: r.digest for r in releases if r.digest is not None}
        self._digest = digest or fingerprint

    def knows(self, step: int) -> bool:
        """Whether the step was released before."""
        return step in self._earlier

    def check(self, step: int, noised: Iterable[Tensor]) -> str:
        """The digest of this step's noised gradients; refused if the step was released before and is another now."""
        digest = self._digest(list(noised))
        if self._earlier.get(step, digest) != digest:
            raise PrivacyViolation(
                f"step {step} was released before, by an earlier process of this seeded run or before going back to a "
                "checkpoint, and does not repeat itself bit for bit (other weights, data, device or versions). Its "
                "noise would be used twice and cancel in the difference, so the release was withheld. Go on with new "
                "noise: gradveil train --resume RUN --new-noise, or PrivacyEngine(resume=True) without the seed."
            )
        return digest


class BudgetGuard:
    """Holds a run to its budget. The plan is public, so what is affordable is known in advance.

    ``published``: nothing is proved of the run, and the budget is of the published epsilon (MA), named so.
    """

    def __init__(
        self,
        budget: float | None,
        plan: PrivacyPlan,
        groups: int,
        side_inverse_square: float,
        *,
        published: bool = False,
    ) -> None:
        self.budget, self.plan, self.groups, self.side = budget, plan, groups, side_inverse_square
        self.published = published
        self.name = "published epsilon (MA, not a guarantee)" if published else "epsilon"
        self._affordable: int | None = None

    def reconsider(self) -> None:
        """The run has gone back to a checkpoint: count anew."""
        self._affordable = None

    def planned_multiplier(self, step: int) -> float:
        """The noise multiplier that ``step`` will have, relative to the joint sensitivity of its release."""
        return planned_multiplier(
            groups=self.groups,
            sigma=self.plan.sigma(step),
            clip=self.plan.clip(step),
            varsigma=self.plan.varsigma if self.plan.fixed_variance else None,
            side_inverse_square=self.side,
        )

    def _further_steps(self, header: RunHeader, done: Sequence[Release], step: int) -> int:
        from gradveil.accounting import affordable_steps, paper_affordable_steps

        assert self.budget is not None
        if self.published:
            sigmas = [r.sigma for r in done] + [self.plan.sigma(t) for t in range(step, self.plan.steps)]
            within = paper_affordable_steps(sigmas, header.sample_rate, header.delta, self.budget)
            return max(0, within - len(done))
        planned = [self.planned_multiplier(t) for t in range(step, self.plan.steps)]
        return affordable_steps(header, tuple(done), planned, budget=self.budget)

    def check_plan(self, header: RunHeader) -> None:
        """A run that declares to stop on private data is refused at once if its steps cost more than the budget.

        It says that it means to stop earlier, and would be charged up to the budget all the same.
        """
        if self.budget is None or header.stopping != "private":
            return
        if self._further_steps(header, (), 0) < header.steps:
            raise ConfigError(
                f"the run is to stop early on private data, so all {header.steps} declared steps are charged, and they "
                f"cost more than the budget of {self.name} = {self.budget:g} at delta = {header.delta:g}. Declare "
                "fewer steps, raise sigma or the budget, or stop on public data alone (stopping='public')."
            )

    def check(self, header: RunHeader, done: Sequence[Release], step: int, sampler: str) -> None:
        """Refuse the step that would overspend."""
        if self.budget is None:
            return
        if sampler == "unknown":
            raise BudgetExhausted(
                f"step {step} was fed a batch of unknown sampling, which no finite budget covers. Use the loader that "
                "make_private returned."
            )
        if self._affordable is None:
            self._affordable = len(done) + self._further_steps(header, done, step)
        if len(done) >= self._affordable:
            fits = "no step fits the budget" if not done else f"{len(done)} releases were made"
            raise BudgetExhausted(
                f"step {step} of {self.plan.steps} would spend more than the budget of {self.name} = {self.budget:g} "
                f"at delta = {header.delta:g}; {fits}. The step was not taken. Raise the budget or sigma, or declare "
                "fewer steps."
            )


class FilterGuard(BudgetGuard):
    """Holds a run to its privacy filter: each step is granted or refused at the noise that it is about to have."""

    def __init__(
        self,
        budget: float | None,
        plan: PrivacyPlan,
        groups: int,
        side_inverse_square: float,
        sigma_of: Callable[[int], float | None],
    ) -> None:
        super().__init__(budget, plan, groups, side_inverse_square)
        self._sigma_of = sigma_of  # at a step; None: the plan's
        self._accountant: FilterAccountant | None = None

    def reconsider(self) -> None:
        self._accountant = None

    def planned_multiplier(self, step: int) -> float:
        sigma = self._sigma_of(step)
        return super().planned_multiplier(step) if sigma is None else self.multiplier(sigma)

    def multiplier(self, sigma: float) -> float:
        """The noise multiplier of a step at ``sigma``."""
        return planned_multiplier(groups=self.groups, sigma=sigma, clip=1.0, side_inverse_square=self.side)

    def counted(self, header: RunHeader, done: Sequence[Release]) -> FilterAccountant:
        """What was granted so far."""
        from gradveil.accounting import FilterAccountant

        if self._accountant is None:
            self._accountant = FilterAccountant(header)
        return self._accountant.observe(done)

    def check_plan(self, header: RunHeader) -> None:
        """Any plan may begin: the filter ends it."""

    def check(self, header: RunHeader, done: Sequence[Release], step: int, sampler: str) -> None:
        """Refuse the step that the filter does not grant."""
        if sampler != "poisson":
            raise BudgetExhausted(
                f"step {step} was fed a batch of {sampler} sampling, for which a privacy filter grants nothing. Use "
                "the loader that make_private returned."
            )
        granted = self.counted(header, done)
        if not granted.grants(self.planned_multiplier(step)):
            lead = granted.filters[0]
            raise BudgetExhausted(
                f"step {step} of {self.plan.steps} would spend more than the budget of its privacy filter, epsilon = "
                f"{lead.epsilon(header.delta):.4g} at delta = {header.delta:g}; {len(done)} releases were made, and "
                f"{granted.left:.2%} of the budget is left. The step was not taken. Raise the budget or sigma."
            )


class NotFiniteCount:
    """How many examples had a gradient that is not finite. A GPU is asked now and then only: that waits for it."""

    _LOOK_EVERY = 100  # steps

    def __init__(self) -> None:
        self.elsewhere: Callable[[], list[Tensor]] = list
        self._flags: list[Tensor] = []  # not yet read
        self._count = 0

    def note(self, flags: list[Tensor], *, step: int) -> None:
        self._flags += flags
        if step % self._LOOK_EVERY == 0 or (self._flags and self._flags[0].device.type == "cpu"):
            self.read(step)

    def read(self, step: int) -> int:
        """The count so far; the first time there is something to count, a warning."""
        flags, self._flags = self._flags + self.elsewhere(), []
        new = count_flags(flags)
        if new and not self._count:
            warnings.warn(
                f"{new} example(s) of step {step} had a gradient that is not finite; they count as zero. "
                "engine.non_finite_examples keeps the count.",
                stacklevel=8,
            )
        self._count += new
        return self._count


class AwaitedRelease:
    """The digest, still to be computed on a GPU, of a release that is in the ledger already."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._digest: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def give(self, digest: Tensor) -> None:
        self._digest = torch.empty(digest.shape, dtype=digest.dtype, pin_memory=digest.is_cuda)
        self._digest.copy_(digest, non_blocking=True)
        if digest.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> str | None:
        """Waits for the GPU; None if the step was broken off before its digest was computed."""
        if self._ready is not None:
            self._ready.synchronize()
        return None if self._digest is None else _digest(self._digest)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOGETHER = 1 << 26  # elements that are hashed in one go; more, one tensor at a time


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of some tensors: equal for equal tensors, on any device, with one transfer."""
    return _digest(fingerprint_sums(list(tensors)))


def fingerprint_sums(tensors: Sequence[Tensor]) -> Tensor:
    """What the fingerprint is a hash of, on the tensors' device: bits times an odd number of their place, added up."""
    if not tensors:
        return torch.zeros(1, dtype=torch.int64)
    alike = len({(t.element_size(), t.device) for t in tensors}) == 1
    if alike and sum(t.numel() for t in tensors) <= _TOGETHER:
        return _place_weighted(torch.cat([_bits(t) for t in tensors])).unsqueeze(0)
    return torch.stack([_place_weighted(_bits(t)) for t in tensors])


def _bits(tensor: Tensor) -> Tensor:
    """All of a tensor, as whole numbers in a row."""
    full = full_tensor(tensor.detach()).contiguous()
    return full.view(_BITS[full.element_size()]).flatten()


def _place_weighted(bits: Tensor) -> Tensor:
    wide = bits if bits.dtype in (torch.int32, torch.int64) else bits.to(torch.int32)
    places = torch.arange(wide.numel(), device=wide.device, dtype=wide.dtype)
    return (wide * ((2 * places + 1) * 0x2C1B3C6D)).sum(dtype=torch.int64)


def _digest(sums: Tensor) -> str:
    return hashlib.sha256(json.dumps(sums.tolist()).encode()).hexdigest()[:32]


def salt(settings: Mapping[str, Any], parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> str:
    """What makes a run another than one with the same seed: its settings, its initial weights, its optimizer."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    found = [dict(settings), fingerprint(parameters), type(optimizer).__name__, groups]
    return hashlib.sha256(json.dumps(found, default=str).encode()).hexdigest()
