"""Observations of known sentences under a planned release: what an adversary would have seen of a token model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.attacks.observation.from_files import state_of
from gradveil.attacks.observation.gradients import Gradients, clip_groups, means
from gradveil.attacks.observation.task import Task, find_task, logits_of, loss_of
from gradveil.attacks.observation.views import Observation, Public, ReleaseParams, StepObservation
from gradveil.clipping.groups import make_groups


def observe_text(
    module: nn.Module,
    ids: Tensor,
    labels: Tensor | None = None,
    *,
    clip: float | None = None,
    sigma: float | None = None,
    training_batch: int | None = None,
    generator: torch.Generator,
    task: Task | None = None,
    public: Tensor | None = None,
) -> Observation:
    """The mean gradient of sentences ids (V, B, T) with labels (V, B), clipped per layer at ``clip`` and noised.

    Noise has the std ``sigma * clip / training_batch`` (default: B). A language model is its own label. Without
    ``clip``, plain gradients; the model's mode (train, eval) is left as it is. ``public``: ids (n, T) that anyone has.
    """
    task = task or find_task(module, tuple(ids.shape[2:]))
    batch = ids.shape[1]
    labels = torch.zeros(ids.shape[:2], dtype=torch.int64) if labels is None else labels
    groups = make_groups(module, "per-layer")
    mean_over = float(training_batch or batch)
    stds = None if clip is None or sigma is None else (sigma * clip / mean_over,) * len(groups)
    defence = ReleaseParams(
        groups=groups,
        clip=None if clip is None else (clip,) * len(groups),
        noise_std=stds,
        normaliser=mean_over,
        strategy="non-private" if clip is None else "baseline",
        sensitivity_rule=None if clip is None else "clip",
    )
    seen = [_released(module, task, x, y, defence) for x, y in zip(ids, labels, strict=True)]
    gradients = {n: torch.stack([g[n] for g in seen]) for n in seen[0]}
    noise = defence.noise_of_parameter()
    if noise is not None:
        gradients = {n: g + noise[n] * torch.randn(g.shape, generator=generator).to(g) for n, g in gradients.items()}
    sight = StepObservation(step=0, gradients=gradients, weights=state_of(module), defence=defence)
    return Observation(
        module=module,
        sights=(sight,),
        input_shape=tuple(ids.shape[2:]),
        classes=task.classes,
        batch=batch,
        public=None if public is None else Public(public),
    )


def _released(module: nn.Module, task: Task, x: Tensor, y: Tensor, defence: ReleaseParams) -> Gradients:
    """Of one victim's sentences (B, T), without noise."""
    if defence.clip is None:
        return {n: g * len(x) / defence.normaliser for n, g in _gradient(module, task, x, y).items()}
    each = [_gradient(module, task, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    clipped = clip_groups({n: torch.stack([g[n] for g in each]).unsqueeze(0) for n in each[0]}, defence)
    return {n: g[0] for n, g in means({n: g.sum(1) for n, g in clipped.items()}, defence).items()}


def _gradient(module: nn.Module, task: Task, x: Tensor, y: Tensor) -> Gradients:
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        loss = loss_of(task, logits_of(module(x)), x, y)
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(trained.items(), found, strict=True)}
