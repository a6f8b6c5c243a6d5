"""The oracle: one example at a time, in as plain a way as can be written.

Slow on purpose. Every other way of clipping in this project is tested against it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.clipping.groups import Group


@dataclass(frozen=True)
class Reference:
    """``sums[name]``: sum over examples of the clipped gradient; ``norms[i, g]``: norm before clipping."""

    sums: dict[str, Tensor]
    norms: Tensor


def clipped_sums(
    module: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    groups: Sequence[Group],
    bounds: Sequence[float],
    gamma: float | None = None,
    views: int = 1,
) -> Reference:
    """Clip each example's gradient of its own loss to ``bounds`` per group and add them up.

    With ``gamma`` a gradient g is normalised instead: bound * g / (|g| + gamma).

    ``loss_fn(output, target)`` is called on one example, so its reduction does not matter; on its ``views`` rows, where
    it has several, over which it must average. A gradient that is not finite counts as zero. The module is copied
    first: an attached engine plays no part.
    """
    module = copy.deepcopy(module)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    examples = len(inputs) // views
    norms = torch.zeros(examples, len(groups), dtype=torch.float64)
    for i in range(examples):
        rows = slice(i * views, (i + 1) * views)
        loss = loss_fn(module(inputs[rows]), targets[rows])
        module.zero_grad(set_to_none=True)
        loss.sum().backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
        for j, (group, bound) in enumerate(zip(groups, bounds, strict=True)):
            norm = torch.sqrt(sum((grads[name].double() ** 2).sum() for name in group.parameters) + torch.zeros(()))
            norms[i, j] = norm
            if not torch.isfinite(norm):
                continue
            if gamma is not None:
                factor = bound / (float(norm) + gamma)
            else:
                factor = min(1.0, bound / float(norm)) if norm > 0 else 1.0
            for name in group.parameters:
                sums[name] += factor * grads[name]
    return Reference(sums, norms)
