"""Several steps observed jointly: the same examples seen again at every state of the model, with fresh noise each time.

Between the steps the model moves as in training, by the released mean gradient of a batch, and a rule that learns from
releases (quantile-clip, adaclip) learns. That batch is of other examples, the same for all victims: so the states tell
nothing of the victims, and what is known of them is what the sights show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.attacks.observation.observe import observe, starting_rule
from gradveil.attacks.observation.views import GroundTruth, Observation, Public, StepObservation
from gradveil.clipping import ClipStats, make_groups
from gradveil.clipping.groups import Clipping
from gradveil.errors import ConfigError
from gradveil.mechanism.clip_bounds import BoundRule
from gradveil.mechanism.noise.streams import NoiseSource, SecretKey
from gradveil.mechanism.strategies import PrivacyPlan


def observe_steps(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    count: int,
    others: tuple[Tensor, Tensor],
    plan: PrivacyPlan | None = None,
    view: str = "per-example",
    step: int = 0,
    training_batch: int | None = None,
    clipping: Clipping = "per-layer",
    classes: int,
    generator: torch.Generator,
    lr: float = 0.1,
    rule: BoundRule | None = None,
    public: Public | None = None,
) -> tuple[Observation, GroundTruth]:
    """What is seen of victims x (V, B, *shape), y (V, B) at ``count`` steps from ``step`` on, and the secret behind it.

    others   inputs (n, *shape) and labels (n) of the examples that the model is trained on meanwhile
    lr       the learning rate of that training
    The rest is as for :func:`observe`; ``rule`` is changed by what it learns.
    """
    if count < 1:
        raise ConfigError(f"{count} steps seen; there must be at least one.")
    if plan is not None and step + count > plan.steps:
        raise ConfigError(f"steps {step} to {step + count - 1} are to be seen, and the run has {plan.steps} from 0 on.")
    mean_over = training_batch or x.shape[1]
    if count > 1 and not len(others[0]):
        raise ConfigError("several steps need other examples, by which the model moves between them. Give some.")
    groups = make_groups(module, clipping)
    private = plan is not None and plan.strategy.is_private
    if private and rule is None:
        assert plan is not None
        rule = starting_rule(plan, module, groups, float(mean_over), device=x.device)
    weights = {n: t.detach().clone() for n, t in module.state_dict().items()}
    settings: dict[str, Any] = {
        "plan": plan,
        "training_batch": mean_over,
        "clipping": clipping,
        "classes": classes,
        "rule": rule,
    }
    sights: list[StepObservation] = []
    for t in range(step, step + count):
        settings |= {"step": t, "weights": weights, "generator": generator}
        seen, secret = observe(module, x, y, view=view, public=public, **settings)
        sights += seen.sights
        if t == step + count - 1:
            break
        clip_stats = ClipStats(len(groups))
        picks = torch.randperm(len(others[0]), generator=generator)[:mean_over]
        batch = (others[0][picks].unsqueeze(0), others[1][picks].unsqueeze(0))
        released = observe(module, *batch, view="batch", clip_stats=clip_stats, **settings)[0].sights[0].gradients
        gradients = {n: g[0] for n, g in released.items()}
        if private:
            assert plan is not None and rule is not None
            _learn(rule, clip_stats, gradients, plan, t, float(mean_over), generator)
        weights = _moved(weights, gradients, lr)
    return replace(seen, sights=tuple(sights)), secret


def _learn(
    rule: BoundRule,
    clip_stats: ClipStats,
    gradients: Mapping[str, Tensor],
    plan: PrivacyPlan,
    step: int,
    mean_over: float,
    generator: torch.Generator,
) -> None:
    """As the engine lets it: from the noised counts and the noised mean."""
    key = SecretKey(int(torch.randint(2**31, (), generator=generator)))
    side = rule.side_releases(clip_stats, NoiseSource(key, step))
    sigma = rule.sigma(step)
    rule.learn(side, gradients, plan.sigma(step) if sigma is None else sigma, mean_over)


def _moved(weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float) -> dict[str, Tensor]:
    return {n: w - lr * gradients[n] if n in gradients else w for n, w in weights.items()}
