"""Observations of known examples under a planned release: what an adversary would have seen.

    per-example          one example's gradient as it is summed: clipped where the strategy clips, before any noise
    per-example-noised   the same with the noise that the released mean gets
    batch                the released mean of all B examples, noised

The noise is that of the strategy at the step: sigma_t S_t / B, with S_t by its own rule. For the l2-max strategies S_t
is taken over the examples that are given; with the rest of the training batch as ``companions`` it is the batch's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradveil.attacks.gradients import Gradients, VictimGradients, clip_groups
from gradveil.attacks.observation import VIEWS, Defence, Observation, Secret, Sight
from gradveil.clipping.groups import Clipping, Group, make_groups
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.strategies import Parameters


def observe(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    plan: Parameters | None = None,
    view: str = "per-example",
    step: int = 0,
    training_batch: int | None = None,
    clipping: Clipping = "per-layer",
    classes: int,
    generator: torch.Generator,
    companions: tuple[Tensor, Tensor] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[Observation, Secret]:
    """What is seen of victims x (V, B, *shape), y (V, B) at one step, and the secret behind it.

    plan             the strategy with its numbers; None: plain gradients
    training_batch   the expected batch size by which the mean is taken (default: B)
    weights          the model's state at that step (default: as it is)
    """
    if view not in VIEWS:
        raise UnknownNameError("view", view, VIEWS)
    if x.shape[:2] != y.shape:
        raise ConfigError(f"inputs of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)} do not fit.")
    if view != "batch" and x.shape[1] != 1:
        raise ConfigError(f"view {view!r} shows one example at a time, and each victim has {x.shape[1]}.")
    state = {n: t.detach() for n, t in (weights or dict(module.state_dict())).items()}
    model = VictimGradients(module, state)
    groups = make_groups(module, clipping)
    private = plan is not None and plan.strategy.is_private
    with torch.no_grad():
        if not private:
            gradients = model.of_batch(x, y)
            defence = Defence(groups=groups, normaliser=float(x.shape[1]))
        else:
            assert plan is not None
            if plan.strategy.bounds not in ("constant", "decay", "private-quantile"):
                raise ConfigError(
                    f"strategy {plan.strategy.name!r} clips in coordinates that it learns from its own releases: they "
                    "are known to a running engine only. Observe a live run."
                )
            gradients, defence = _private(model, x, y, plan, view, step, training_batch, groups, generator, companions)
    sight = Sight(step=step, gradients=gradients, weights=state, defence=defence)
    seen = Observation(
        module=module, sights=(sight,), input_shape=tuple(x.shape[2:]), classes=classes, batch=x.shape[1]
    )
    return seen, Secret(x, y)


def _private(
    model: VictimGradients,
    x: Tensor,
    y: Tensor,
    plan: Parameters,
    view: str,
    step: int,
    training_batch: int | None,
    groups: tuple[Group, ...],
    generator: torch.Generator,
    companions: tuple[Tensor, Tensor] | None,
) -> tuple[Gradients, Defence]:
    mean_over = float(training_batch or x.shape[1])
    bounds = (float(plan.clip(step)),) * len(groups)
    clipped_only = Defence(groups=groups, clip=bounds)
    clipped = clip_groups(model.per_example(x, y), clipped_only)
    summed = {n: g.sum(1) for n, g in clipped.items()}
    # A single example is seen at its own size; a batch as the mean that is released.
    normaliser = mean_over if view == "batch" else 1.0
    gradients = {n: g / normaliser for n, g in summed.items()}
    stds = None
    if view != "per-example":
        beside = _summed_norms(model, companions, clipped_only)
        sensitivity = _sensitivity(plan, groups, clipped, bounds, mean_over, beside)
        scale = plan.varsigma if plan.fixed_variance else plan.sigma(step) * sensitivity
        stds = (scale / mean_over,) * len(groups)
        gradients = {n: g + stds[0] * torch.randn(g.shape, generator=generator).to(g) for n, g in gradients.items()}
    defence = Defence(
        groups=groups,
        clip=bounds,
        noise_std=stds,
        normaliser=normaliser,
        strategy=plan.strategy.name,
        sensitivity_rule=plan.sensitivity_rule,
    )
    return gradients, defence


def _summed_norms(
    model: VictimGradients, companions: tuple[Tensor, Tensor] | None, defence: Defence
) -> tuple[float, Gradients] | None:
    """Of the rest of the training batch: the largest clipped norm of a group, and the clipped sum."""
    if companions is None:
        return None
    clipped = clip_groups(model.per_example(companions[0].unsqueeze(0), companions[1].unsqueeze(0)), defence)
    return _largest(clipped, defence.groups), {n: g.sum((0, 1)) for n, g in clipped.items()}


def _largest(clipped: Gradients, groups: tuple[Group, ...]) -> float:
    norms = [
        torch.stack([clipped[n].flatten(2).square().sum(2) for n in group.parameters]).sum(0).sqrt() for group in groups
    ]
    return float(torch.stack(norms).max())


def _sensitivity(
    plan: Parameters,
    groups: tuple[Group, ...],
    clipped: Gradients,
    bounds: tuple[float, ...],
    mean_over: float,
    beside: tuple[float, Gradients] | None,
) -> float:
    """S of the step; by the l2-max rules from the examples of all victims, which share a training batch."""
    if plan.sensitivity_rule == "clip":
        return bounds[0]
    if plan.sensitivity_rule == "l2max-example":
        return max(_largest(clipped, groups), beside[0] if beside is not None else 0.0)
    total = {n: g.sum((0, 1)) + (beside[1][n] if beside is not None else 0.0) for n, g in clipped.items()}
    norms = [torch.stack([total[n].square().sum() for n in group.parameters]).sum().sqrt() for group in groups]
    return float(torch.stack(norms).max()) / mean_over
