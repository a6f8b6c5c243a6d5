"""Observations of known examples under a planned release: what an adversary would have seen.

    per-example          one example's gradient as it is summed: clipped where the strategy clips, before any noise
    per-example-noised   the same with the noise that the released mean gets
    batch                the released mean of all B examples, noised

Bounds, sensitivity and noise are those of the strategy at the step, by its own rules: sigma_t S_t / B. For the l2-max
strategies S_t is taken over the examples that are given; with the rest of the training batch as ``companions`` it is
the batch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from gradveil.attacks.observation.gradients import Gradients, VictimGradients, clip_groups, means
from gradveil.attacks.observation.views import VIEWS, GroundTruth, Observation, Public, ReleaseParams, StepObservation
from gradveil.clipping import ClipStats
from gradveil.clipping.groups import Clipping, Group, make_groups
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.mechanism.clip_bounds import BoundRule, make_rule
from gradveil.mechanism.release import StepFacts, noise_scale
from gradveil.mechanism.strategies import PrivacyPlan

_AT_ONCE = 256  # examples whose gradients are held at the same time


def observe(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    plan: PrivacyPlan | None = None,
    view: str = "per-example",
    step: int = 0,
    training_batch: int | None = None,
    clipping: Clipping = "per-layer",
    classes: int,
    generator: torch.Generator,
    companions: tuple[Tensor, Tensor] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    rule: BoundRule | None = None,
    public: Public | None = None,
    clip_stats: ClipStats | None = None,
) -> tuple[Observation, GroundTruth]:
    """What is seen of victims x (V, B, *shape), y (V, B) at one step, and the secret behind it.

    plan             the strategy with its numbers; None: plain gradients
    training_batch   the expected batch size by which the mean is taken (default: B)
    weights          the model's state at that step (default: as it is)
    rule             where the clip bounds are at that step (default: where the strategy starts). Quantile-clip and
                     adaclip move them by what they have released before; of a run, give the rule as the run left it.
    public           what the adversary knows of such data beforehand
    clip_stats       notes the norms of all examples, for a rule that learns from them
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
    with torch.no_grad():
        if plan is None or not plan.strategy.is_private:
            gradients = model.of_batch(x, y)
            defence = ReleaseParams(groups=groups, normaliser=float(x.shape[1]))
        else:
            mean_over = float(training_batch or x.shape[1])
            rule = rule or starting_rule(plan, module, groups, mean_over, device=x.device)
            norms = clip_stats or ClipStats(len(groups))
            gradients, defence = _private(
                model, x, y, plan, rule, view, step, mean_over, groups, generator, companions, norms
            )
    sight = StepObservation(step=step, gradients=gradients, weights=state, defence=defence)
    shape = tuple(x.shape[2:])
    seen = Observation(
        module=module, sights=(sight,), input_shape=shape, classes=classes, batch=x.shape[1], public=public
    )
    return seen, GroundTruth(x, y)


def starting_rule(
    plan: PrivacyPlan,
    module: nn.Module,
    groups: tuple[Group, ...],
    mean_over: float,
    *,
    device: torch.device,
    state: Mapping[str, Tensor] | None = None,
    options: Mapping[str, float] | None = None,
) -> BoundRule:
    """The strategy's bound rule as it starts, or in the ``state`` in which a run left it."""
    trained = {n: p.detach().to(device) for n, p in module.named_parameters() if p.requires_grad}
    rule = make_rule(plan, groups, parameters=trained, batch_size=mean_over, options=dict(options or {}))
    if state:
        rule.load_state_dict(state)
    return rule


def _private(
    model: VictimGradients,
    x: Tensor,
    y: Tensor,
    plan: PrivacyPlan,
    rule: BoundRule,
    view: str,
    step: int,
    mean_over: float,
    groups: tuple[Group, ...],
    generator: torch.Generator,
    companions: tuple[Tensor, Tensor] | None,
    clip_stats: ClipStats,
) -> tuple[Gradients, ReleaseParams]:
    # The rule goes on learning; what was seen at this step stays as it was.
    whitening = rule.whitening and {n: (m.clone(), b.clone()) for n, (m, b) in rule.whitening.items()}
    known = ReleaseParams(
        groups=groups,
        clip=rule.bounds(step),
        # A single example is seen at its own size; a batch as the mean that is released.
        normaliser=mean_over if view == "batch" else 1.0,
        strategy=plan.strategy.name,
        sensitivity_rule=plan.sensitivity_rule,
        whitening=whitening,
        gamma=rule.gamma,
        side_inverse_square=rule.side_inverse_square,
    )
    sums = _clipped_sums(model, x, y, known, clip_stats)
    gradients = means(sums, known)
    if view == "per-example":
        return gradients, known
    total = {n: g.sum(0) for n, g in sums.items()}  # all victims share a training batch, with their companions
    if companions is not None:
        beside = _clipped_sums(model, companions[0].unsqueeze(0), companions[1].unsqueeze(0), known, clip_stats)
        total = {n: g + beside[n][0] for n, g in total.items()}
    facts = StepFacts(rule.bounds(step), clip_stats, groups, total, mean_over)
    scale = noise_scale(plan, step, facts, rule.sigma(step))
    defence = replace(known, noise_std=tuple(std / mean_over for std in scale.stds))
    stds = defence.noise_of_parameter()
    assert stds is not None
    noised = {n: g + stds[n] * torch.randn(g.shape, generator=generator).to(g) for n, g in gradients.items()}
    return noised, defence


def _clipped_sums(
    model: VictimGradients, x: Tensor, y: Tensor, defence: ReleaseParams, clip_stats: ClipStats
) -> Gradients:
    """The sum (V, *P) over every victim's examples, each clipped; a few at a time, for a batch may be large."""
    sums: Gradients = {}
    width = max(1, _AT_ONCE // len(x))
    for start in range(0, x.shape[1], width):
        part = slice(start, start + width)
        clipped = clip_groups(model.per_example(x[:, part], y[:, part]), defence, clip_stats)
        sums = {n: g.sum(1) + sums.get(n, 0.0) for n, g in clipped.items()}
    return sums
