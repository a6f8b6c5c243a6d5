"""Updates of several local steps (FedAvg): what a client sends after some steps of SGD from known weights.

The steps are run again on candidates, one after the other, and their result is differentiable in the inputs: attacks
match it as they match a gradient. The update W_before - W_after is divided by the learning rates, so that it is of a
gradient's size; with one step it is the gradient.

A whole update is what a defence clips and noises here: that of one client, not of one example.

Legend: V victims (clients), N examples of one, P the shape of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from gradveil.attacks.methods.base import Reconstruction, squared_differences
from gradveil.attacks.observation.from_files import load_observation
from gradveil.attacks.observation.gradients import Gradients, VictimGradients, clip_groups, means, model_at
from gradveil.attacks.observation.task import logits_of, plain_attention
from gradveil.attacks.observation.views import LocalSteps, Observation, ReleaseParams


class LocalUpdates(VictimGradients):
    """As the gradients of a single step, but of all local steps together, unrolled."""

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor], local: LocalSteps) -> None:
        super().__init__(module, weights)
        self.local = local

    def of_batch(self, x: Tensor, y: Tensor) -> Gradients:
        """(W_before - W_after) / scale of every victim's N examples: (V, *P)."""
        differentiable = torch.is_grad_enabled()
        names = list(self.weights)
        start = {n: w.expand(len(x), *w.shape) for n, w in self.weights.items()}
        now = {n: w.clone().requires_grad_() for n, w in start.items()}
        velocity = {n: torch.zeros_like(w) for n, w in start.items()}
        for part in self._parts(x.shape[1]):
            with torch.enable_grad(), plain_attention():
                losses = vmap(self._loss, randomness="different")(now, x[:, part], y[:, part])
                found = torch.autograd.grad(losses.sum(), [now[n] for n in names], create_graph=differentiable)
                velocity = {n: self.local.momentum * velocity[n] + g for n, g in zip(names, found, strict=True)}
                now = {n: w - self.local.lr * velocity[n] for n, w in now.items()}
            if not differentiable:
                now = {n: w.detach().requires_grad_() for n, w in now.items()}
        return {
            n: (start[n] - w if differentiable else (start[n] - w).detach()) / self.local.scale for n, w in now.items()
        }

    def released(self, x: Tensor, y: Tensor, defence: ReleaseParams) -> Gradients:
        update = self.of_batch(x, y)
        if defence.clip is None:
            return update
        clipped = clip_groups({n: g.unsqueeze(1) for n, g in update.items()}, defence)
        return means({n: g.sum(1) for n, g in clipped.items()}, defence)

    def _loss(self, weights: Gradients, inputs: Tensor, labels: Tensor) -> Tensor:
        out = functional_call(self.module, {**weights, **self.fixed}, (inputs,))
        return F.cross_entropy(logits_of(out), labels)

    def _parts(self, examples: int) -> Iterator[slice]:
        """Which examples each step is of: all, or the next ones in turn, from the first again after the last."""
        size = min(self.local.batch or examples, examples)
        starts = range(0, examples - size + 1, size)
        for step in range(self.local.steps):
            first = starts[step % len(starts)]
            yield slice(first, first + size)


def load_update(module: nn.Module, after: Mapping[str, Tensor], local: LocalSteps, **settings: Any) -> Observation:
    """The update from the module's weights to ``after``, as attacks take it; settings as for ``load_observation``.

    A clip and noise are of the whole update (of one client), in units of the weights, and are divided by no number of
    examples; ``batch_size`` is the number of clients in a mean.
    """
    before = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    update = {n: (w - after[n].to(w)) / local.scale for n, w in before.items() if n in after}
    for name in ("clip", "sensitivity"):
        if settings.get(name) is not None:
            settings[name] = settings[name] / local.scale
    seen = load_observation(module, update, **{"batch": 1, "batch_size": 1, **settings})
    return replace(seen, sights=(replace(seen.sights[0], local=local),))


def unexplained(seen: Observation, found: Reconstruction) -> float:
    """The share of the update that a reconstruction leaves: 0 where it makes the very update."""
    sight = seen.sights[0]
    with torch.no_grad():
        made = model_at(seen, sight).released(found.x, found.labels, sight.defence)
    left = squared_differences(made, sight.gradients) / squared_differences(
        {n: torch.zeros_like(g) for n, g in sight.gradients.items()}, sight.gradients
    ).clamp(min=1e-30)
    return float(torch.nan_to_num(left, nan=1e30).median())
