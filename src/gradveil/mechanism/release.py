"""One release per step: sensitivity, noise, and the record of both.

The sums of clipped gradients go in, noised means come out, and one immutable :class:`Release` says
exactly what was used. Nothing else in the project adds noise. In which order this happens is in engine/step.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.clipping import ClipStats, Group
from gradveil.clipping.per_sample_grads import at_least_float32
from gradveil.clipping.sharding import is_sharded, local_shard, start_of
from gradveil.mechanism.clip_bounds import BoundRule
from gradveil.mechanism.distributed.ranks import Ranks
from gradveil.mechanism.noise.lattice import noised, widened
from gradveil.mechanism.noise.streams import NoiseSource, Shard
from gradveil.mechanism.records import AuxiliaryRelease, Release
from gradveil.mechanism.strategies import PrivacyPlan

# In fixed-variance mode sigma_t = varsigma / S_t; an all-zero batch would make it infinite.
_SMALLEST_SENSITIVITY = 1e-12


class StepFacts(NamedTuple):
    """What a sensitivity rule may look at: bounds, norms after clipping, and the sums."""

    bounds: tuple[float, ...]
    clip_stats: ClipStats
    groups: Sequence[Group]
    grads: Mapping[str, Tensor]
    batch_size: float
    of_all: Callable[[Tensor], Tensor] | None = None  # sums over ranks, where each holds a part of the gradients


@dataclass(frozen=True)
class SensitivityRule:
    """S of each group, and whether it is a function of public values only."""

    public: bool
    values: Callable[[StepFacts], tuple[float, ...]]


def _clip_bound(facts: StepFacts) -> tuple[float, ...]:
    return facts.bounds


def _largest_example(facts: StepFacts) -> tuple[float, ...]:
    """max over groups and examples of the clipped norm: the paper's text."""
    return (facts.clip_stats.largest_of_all(),) * len(facts.groups)


def _batch_gradient(facts: StepFacts) -> tuple[float, ...]:
    """max over groups of the norm of the mean clipped gradient: the comment in the paper's algorithm."""
    names = [name for group in facts.groups for name in group.parameters]
    norms = torch._foreach_norm([facts.grads[name] for name in names], 2.0, dtype=torch.float64)
    squares = torch.stack(list(norms)).square()
    of_parameter = iter((squares if facts.of_all is None else facts.of_all(squares)).tolist())  # read at once
    of_group = [sum(next(of_parameter) for _ in group.parameters) for group in facts.groups]
    return (math.sqrt(max(of_group)) / facts.batch_size,) * len(facts.groups)


SENSITIVITY_RULES: dict[str, SensitivityRule] = {
    "clip": SensitivityRule(public=True, values=_clip_bound),
    "l2max-example": SensitivityRule(public=False, values=_largest_example),
    "l2max-batch": SensitivityRule(public=False, values=_batch_gradient),
}


class NoiseScale(NamedTuple):
    """How much noise a step gets, and why."""

    bounds: tuple[float, ...]
    sensitivity: tuple[float, ...]
    sigma: float
    stds: tuple[float, ...]  # of the noise on each group's sum
    public: bool  # whether the scale is a function of public values only


def noise_scale(plan: PrivacyPlan, step: int, facts: StepFacts, sigma: float | None = None) -> NoiseScale:
    """The scale of one step's noise, from its bounds and, for the l2-max strategies, from its norms.

    ``sigma``: that of a rule which adapts it to releases; None: the plan's.
    """
    rule = SENSITIVITY_RULES[plan.sensitivity_rule]
    sensitivity = rule.values(facts)
    if plan.fixed_variance:
        constant = plan.varsigma / max(max(sensitivity), _SMALLEST_SENSITIVITY)
        return NoiseScale(facts.bounds, sensitivity, constant, (plan.varsigma,) * len(sensitivity), public=True)
    sigma = plan.sigma(step) if sigma is None else sigma
    return NoiseScale(facts.bounds, sensitivity, sigma, tuple(sigma * s for s in sensitivity), rule.public)


class Measured(NamedTuple):
    """What a step will release, before any noise is added to its sums."""

    scale: NoiseScale
    side: tuple[AuxiliaryRelease, ...]
    release: Release


class Releaser:
    """Turns sums of clipped gradients into noised means: how much noise, the record of it, and the noise itself.

    The normaliser is the public expected batch size. Over several ranks, each adds the noise of the parameters it owns
    before all are added up; where S is a function of the batch, or noise lies on a lattice, the sum comes first, and
    all ranks add the same noise.
    """

    def __init__(
        self,
        *,
        plan: PrivacyPlan,
        rule: BoundRule,
        groups: Sequence[Group],
        parameters: Mapping[str, nn.Parameter],
        sample_rate: float,
        batch_size: float,
        ranks: Ranks,
        on_lattice: bool = False,
    ) -> None:
        """``parameters`` in the order of the groups, which is the order in which they get their noise.

        ``on_lattice``: the sums are rounded to a lattice and their noise drawn on it (noise/lattice.py).
        """
        self.plan, self.rule, self.groups, self.parameters = plan, rule, groups, parameters
        self.sample_rate, self.batch_size, self.ranks = sample_rate, batch_size, ranks
        first = next(iter(parameters.values()))
        self.device, self._sharded = first.device, is_sharded(first)
        self._on_lattice = on_lattice
        self._noise_first = SENSITIVITY_RULES[plan.sensitivity_rule].public and not on_lattice
        self._sizes = [sum(parameters[name].numel() for name in group.parameters) for group in groups]

    def of_every_parameter(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the order of the noise. A parameter without a sum counts as zero and gets noise like the others: which
        parameters were used must not show.
        """
        return {n: sums[n] if n in sums else torch.zeros_like(p.detach()) for n, p in self.parameters.items()}

    def measure(
        self, step: int, sums: Mapping[str, Tensor], stats: ClipStats, noise: NoiseSource, *, sampler: str
    ) -> Measured:
        """The scale of the noise and the record. ``stats`` is of the whole batch, over all ranks."""
        if self._sharded:
            sums = {name: local_shard(total) for name, total in sums.items()}
        elif not self._noise_first:
            self.ranks.add_up(list(sums.values()))
        facts = StepFacts(self.rule.bounds(step), stats, self.groups, sums, self.batch_size)
        if self._sharded:
            facts = facts._replace(of_all=self.ranks.summed)
        scale = noise_scale(self.plan, step, facts, self.rule.sigma(step))
        side = self.rule.side_releases(stats, noise)
        release = record(
            step,
            self.plan,
            scale,
            side=side,
            sampler=sampler,
            sample_rate=self.sample_rate,
            batch_size=self.batch_size,
            nonce=noise.nonce,
            chosen_from=self.rule.chosen_from,
        )
        return Measured(scale, side, release)

    @torch.no_grad()
    def add_noise(self, sums: Mapping[str, Tensor], scale: NoiseScale, noise: NoiseSource) -> None:
        """In place: sums of clipped gradients, over all ranks, become noised means."""
        grads = [local_shard(total) for total in sums.values()] if self._sharded else list(sums.values())
        stds = [std for group, std in zip(self.groups, self._drawn(scale), strict=True) for _ in group.parameters]
        if self._sharded:
            shards = [_shard(parameter) for parameter in self.parameters.values()]
            if self._on_lattice:
                noise.add_on_lattice(grads, stds, divide_by=self.batch_size, shards=shards)
            else:
                noise.add_to_shards(grads, stds, shards, divide_by=self.batch_size)
            return
        owned = self.ranks.owned(grads) if self._noise_first else slice(0, len(grads))
        if self.rule.whitening is None and self._on_lattice:
            noise.add_on_lattice(grads, stds, divide_by=self.batch_size)
        elif self.rule.whitening is None:
            noise.add_to(grads, stds, divide_by=self.batch_size, owned=owned)
        else:
            on_lattice = self._on_lattice
            _whitened_noise(list(sums), grads, stds, self.batch_size, noise, self.rule, owned, on_lattice=on_lattice)
        if self._noise_first:
            self.ranks.add_up(grads)

    def _drawn(self, scale: NoiseScale) -> Sequence[float]:
        """The standard deviation of each group's noise: on a lattice wider than recorded, so that the record holds."""
        if not self._on_lattice:
            return scale.stds
        of_groups = zip(scale.stds, scale.bounds, self._sizes, strict=True)
        return [widened(std, sensitivity=bound, coordinates=size) for std, bound, size in of_groups]

    def learn(self, measured: Measured, noised: Mapping[str, Tensor]) -> None:
        """Bounds adapt to what was released."""
        if self._sharded:
            noised = {name: local_shard(grad) for name, grad in noised.items()}
        self.rule.learn(measured.side, noised, measured.scale.sigma, self.batch_size)


def _shard(parameter: nn.Parameter) -> Shard:
    return Shard(start_of(parameter), local_shard(parameter).numel(), parameter.numel())


def record(
    step: int,
    plan: PrivacyPlan,
    scale: NoiseScale,
    *,
    sampler: str,
    sample_rate: float,
    batch_size: float,
    side: tuple[AuxiliaryRelease, ...] = (),
    nonce: str | None = None,
    chosen_from: Mapping[str, Any] | None = None,
) -> Release:
    """The record of a step that was noised by ``scale``."""
    return Release(
        step=step,
        sampler=sampler,
        sample_rate=sample_rate,
        expected_batch_size=batch_size,
        clip=scale.bounds,
        sensitivity_rule=plan.sensitivity_rule,
        sensitivity=scale.sensitivity,
        sigma=scale.sigma,
        noise_std=scale.stds,
        scale_is_public=scale.public,
        side=side,
        nonce=nonce,
        chosen_from=None if chosen_from is None else dict(chosen_from),
    )


@torch.no_grad()
def _whitened_noise(
    names: Sequence[str],
    grads: Sequence[Tensor],
    stds: Sequence[float],
    batch_size: float,
    noise: NoiseSource,
    rule: BoundRule,
    owned: slice,
    *,
    on_lattice: bool,
) -> None:
    """Noise in whitened coordinates: scaled back like the sums, and the centre put back on, by who adds the noise."""
    assert rule.whitening is not None
    mine = range(len(grads))[owned]
    for i, (name, grad, std) in enumerate(zip(names, grads, stds, strict=True)):
        if i not in mine:
            noise.pass_over([grad])
            grad.div_(batch_size)
            continue
        spread = rule.whitening[name][1]
        if on_lattice:
            draws = noise.lattice_draws(grad.shape).to(grad.device)
            total = noised(grad, draws, std * spread.double(), divide_by=batch_size)
        else:
            total = (at_least_float32(grad) + std * (noise.wide_normal_like(grad) * spread)) / batch_size
        shift = rule.shift(name)
        grad.copy_(total if shift is None else total + shift)
