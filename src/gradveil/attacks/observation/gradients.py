"""The gradients of inputs at given weights, as a defence would release them, differentiable in the inputs.

Many victims at once: every victim has a copy of the weights along a first dimension, the model runs under vmap over
that dimension, and one backward pass gives all victims' gradients. Attacks differentiate through that pass.

Legend: V victims, B examples of one victim, P the shape of a parameter, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from gradveil.attacks.observation.task import logits_of, plain_attention
from gradveil.attacks.observation.views import Observation, ReleaseParams, StepObservation
from gradveil.clipping import ClipStats

Gradients = dict[str, Tensor]


class VictimGradients:
    """Gradients of cross entropy; labels are classes (V, B) or probabilities (V, B, K)."""

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self.module = module
        trains = {name for name, p in module.named_parameters() if p.requires_grad}
        self.weights = {n: w.detach() for n, w in weights.items() if n in trains}
        self.fixed = {n: w.detach() for n, w in weights.items() if n not in trains}

    def of_batch(self, x: Tensor, y: Tensor) -> Gradients:
        """Of the mean loss of every victim's B examples: (V, *P)."""
        copies = {n: w.expand(len(x), *w.shape).requires_grad_() for n, w in self.weights.items()}

        def loss(weights: Gradients, inputs: Tensor, labels: Tensor) -> Tensor:
            logits = logits_of(functional_call(self.module, {**weights, **self.fixed}, (inputs,)))
            return F.cross_entropy(logits, labels)

        differentiable = torch.is_grad_enabled()
        with torch.enable_grad(), plain_attention():
            losses = vmap(loss, randomness="different")(copies, x, y)
            found = torch.autograd.grad(losses.sum(), list(copies.values()), create_graph=differentiable)
        return dict(zip(copies, found, strict=True))

    def per_example(self, x: Tensor, y: Tensor) -> Gradients:
        """Of every example's own loss: (V, B, *P)."""
        victims, batch = x.shape[:2]
        alone = self.of_batch(x.flatten(0, 1).unsqueeze(1), y.flatten(0, 1).unsqueeze(1))
        return {n: g.unflatten(0, (victims, batch)) for n, g in alone.items()}

    def released(self, x: Tensor, y: Tensor, defence: ReleaseParams) -> Gradients:
        """What the defence would release, without its noise: each example clipped as it does, summed, divided."""
        if defence.clip is None:
            return self.of_batch(x, y)
        clipped = clip_groups(self.per_example(x, y), defence)
        return means({n: g.sum(1) for n, g in clipped.items()}, defence)


def clip_groups(gradients: Gradients, defence: ReleaseParams, clip_stats: ClipStats | None = None) -> Gradients:
    """Gradients (V, B, *P), each example's scaled down to its group's bound, or normalised, as they are summed.

    Where the defence whitens, (g - m) / b is scaled down and then b put back on, but not m: see :func:`means`. A
    ``clip_stats`` notes the norms, as the defence's own clipping does.
    """
    assert defence.clip is not None
    found: Gradients = {}
    for index, (group, bound) in enumerate(zip(defence.groups, defence.clip, strict=True)):
        own = {n: gradients[n] for n in group.parameters}
        if defence.whitening is not None:
            own = {n: (g - defence.whitening[n][0]) / defence.whitening[n][1] for n, g in own.items()}
        square = torch.stack([g.flatten(2).square().sum(2) for g in own.values()]).sum(0)
        # The derivative of a root at 0 is infinite; a gradient of exactly 0 is not scaled.
        norm = torch.where(square > 0, square, torch.ones_like(square)).sqrt()
        if defence.gamma is None:
            weight = torch.clamp(bound / norm, max=1.0)
        else:
            weight = bound / (torch.where(square > 0, norm, torch.zeros_like(norm)) + defence.gamma)
        if clip_stats is not None:
            clip_stats.note(index, square.sqrt().flatten(), weight.flatten(), bound)
        for name, grad in own.items():
            scaled = grad * weight.view(*weight.shape, *[1] * (grad.dim() - 2))
            found[name] = scaled if defence.whitening is None else scaled * defence.whitening[name][1]
    if clip_stats is not None:
        clip_stats.examples += square.numel()
    return found


def means(sums: Gradients, defence: ReleaseParams) -> Gradients:
    """Sums of clipped gradients as they are released but for the noise: divided, and the centre put back on."""
    found = {n: g / defence.normaliser for n, g in sums.items()}
    if defence.whitening is None:
        return found
    return {n: g + defence.whitening[n][0] for n, g in found.items()}


def model_at(observation: Observation, sight: StepObservation) -> VictimGradients:
    """The observed model at the state of one sight."""
    if sight.local is not None:
        from gradveil.attacks.observation.local_updates import LocalUpdates

        return LocalUpdates(observation.module, sight.weights, sight.local)
    return VictimGradients(observation.module, sight.weights)
