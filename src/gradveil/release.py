"""One release per step: sensitivity, noise, and the record of both.

The sums of clipped gradients go in, noised means come out, and one immutable :class:`Release` says
exactly what was used. Nothing else in the project adds noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradveil.bounds import BoundRule
from gradveil.clipping import Group, Harvest
from gradveil.clipping.sharding import is_sharded, local, start_of
from gradveil.clipping.uses import wide
from gradveil.randomness import NoiseSource, Shard
from gradveil.ranks import Ranks
from gradveil.records import Release, SideRelease
from gradveil.strategies import Parameters
from gradveil.updates import Steps

# In fixed-variance mode sigma_t = varsigma / S_t; an all-zero batch would make it infinite.
_SMALLEST_SENSITIVITY = 1e-12


class StepFacts(NamedTuple):
    """What a sensitivity rule may look at: bounds, norms after clipping, and the sums."""

    bounds: tuple[float, ...]
    harvest: Harvest
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
    return (facts.harvest.largest_of_all(),) * len(facts.groups)


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


def noise_scale(plan: Parameters, step: int, facts: StepFacts) -> NoiseScale:
    """The scale of one step's noise, from its bounds and, for the l2-max strategies, from its norms."""
    rule = SENSITIVITY_RULES[plan.sensitivity_rule]
    sensitivity = rule.values(facts)
    if plan.fixed_variance:
        sigma = plan.varsigma / max(max(sensitivity), _SMALLEST_SENSITIVITY)
        return NoiseScale(facts.bounds, sensitivity, sigma, (plan.varsigma,) * len(sensitivity), public=True)
    sigma = plan.sigma(step)
    return NoiseScale(facts.bounds, sensitivity, sigma, tuple(sigma * s for s in sensitivity), rule.public)


def release_gradients(
    *,
    step: int,
    plan: Parameters,
    rule: BoundRule,
    groups: Sequence[Group],
    parameters: Mapping[str, nn.Parameter],
    harvest: Harvest,
    noise: NoiseSource,
    sampler: str,
    sample_rate: float,
    batch_size: float,
    ranks: Ranks,
    before: Callable[[Release], None] | None = None,
    steps: Steps | None = None,
) -> Release:
    """Turn every ``.grad`` from a sum of clipped gradients into a noised mean, and say what was done.

    Parameters without a gradient in this step count as zero and get noise like the others: which
    parameters were used must not show. The normaliser is the public expected batch size.

    Over several ranks, each adds the noise of the parameters it owns before all are added up; where S is a function
    of the batch the sum comes first, and all ranks add the same noise to it. ``harvest`` is of the whole batch.

    ``parameters`` are in the order of the groups. ``before`` is told of the release before any noise is added;
    ``steps`` are taken with it, where that can be.
    """
    cut = is_sharded(next(iter(parameters.values())))  # added up over the ranks already, each of which holds a part
    grads: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        grad = parameter.grad
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter)
        grads[name] = local(grad) if cut else grad
    in_order = list(grads.values())
    noise_first = SENSITIVITY_RULES[plan.sensitivity_rule].public
    owned = ranks.owned(in_order) if noise_first else slice(0, len(in_order))
    if not (noise_first or cut):
        ranks.add_up(in_order)
    facts = StepFacts(rule.bounds(step), harvest, groups, grads, batch_size)
    if cut:
        facts = facts._replace(of_all=ranks.summed)
    scale = noise_scale(plan, step, facts)
    side = rule.side_releases(harvest, noise)
    release = record(step, plan, scale, side=side, sampler=sampler, sample_rate=sample_rate, batch_size=batch_size)
    if before is not None:
        before(release)
    stds = [std for group, std in zip(groups, scale.stds, strict=True) for _ in group.parameters]
    if cut:
        shards = [_shard(parameter) for parameter in parameters.values()]
        noise.add_to_shards(in_order, stds, shards, divide_by=batch_size)
    elif rule.whitening is None:
        noise.add_to(in_order, stds, divide_by=batch_size, owned=owned, steps=steps)
    else:
        _whitened_noise(list(grads), in_order, stds, batch_size, noise, rule, owned)
    if noise_first and not cut:
        ranks.add_up(in_order)
    rule.learn(side, grads, scale.sigma, batch_size)
    return release


def _shard(parameter: nn.Parameter) -> Shard:
    return Shard(start_of(parameter), local(parameter).numel(), parameter.numel())


def record(
    step: int,
    plan: Parameters,
    scale: NoiseScale,
    *,
    sampler: str,
    sample_rate: float,
    batch_size: float,
    side: tuple[SideRelease, ...] = (),
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
) -> None:
    """Noise in whitened coordinates: scaled back like the sums, and the centre put back on, by who adds the noise."""
    assert rule.whitening is not None
    mine = range(len(grads))[owned]
    for i, (name, grad, std) in enumerate(zip(names, grads, stds, strict=True)):
        if i not in mine:
            noise.pass_over([grad])
            grad.div_(batch_size)
            continue
        draw = noise.wide_normal_like(grad) * rule.whitening[name][1]
        total = (wide(grad) + std * draw) / batch_size
        shift = rule.shift(name)
        grad.copy_(total if shift is None else total + shift)
