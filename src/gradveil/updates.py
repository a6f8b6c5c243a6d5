"""The update of plain SGD, in the pass that adds the noise: weights are read and written while their gradients are.

The user still calls ``optimizer.step()``, and everything around it (learning-rate schedulers, counters) runs as ever.
Where that step is p - rate * grad and nothing else, the engine's hook before it has done so already and has put the
gradients aside; the optimizer finds nothing to update, and the hook after it puts them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer


@dataclass
class Steps:
    """Each parameter p is to become p - rate * grad. ``taken``: whoever added the noise has done so."""

    parameters: Sequence[Tensor]
    rates: list[float]
    taken: bool = False


class PlainSGD:
    """Knows when a step of the optimizer is p - rate * grad."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """``parameters`` in the order in which they get their noise."""
        self._optimizer, self._parameters = optimizer, list(parameters)
        self._possible = type(optimizer) is torch.optim.SGD and all(type(p) is nn.Parameter for p in parameters)
        self._held: list[list[int]] = []  # by the optimizer's groups
        self._group_of: list[int] | None = None  # of every parameter; None: some are in no group

    def steps(self) -> Steps | None:
        """The coming step; None where it is more than that, or where somebody could tell the difference."""
        if not self._possible or _watched_by_others(self._optimizer):
            return None
        rates = []
        for group in self._optimizer.param_groups:
            rate = group["lr"]
            more = group["momentum"] or group["weight_decay"] or group.get("maximize") or group.get("differentiable")
            if more or group.get("fused") or type(rate) is not float:
                return None
            rates.append(rate)
        held = [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]
        if held != self._held:
            self._held, self._group_of = held, self._find(held)
        return None if self._group_of is None else Steps(self._parameters, [rates[i] for i in self._group_of])

    def _find(self, held: list[list[int]]) -> list[int] | None:
        place = {known: i for i, group in enumerate(held) for known in group}
        found = [place.get(id(p)) for p in self._parameters]
        return None if None in found else [i for i in found if i is not None]


def _watched_by_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether others than the engine have hooks: they would see weights that moved already, and no gradients."""
    try:
        own = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
        everywhere = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    except AttributeError:  # a torch that keeps them elsewhere
        return True
    return own != (1, 1) or bool(everywhere)


class PutAside:
    """Gradients that the optimizer must not find: their step was taken."""

    def __init__(self) -> None:
        self._of: list[tuple[Tensor, Tensor | None]] = []

    def take(self, parameters: Sequence[Tensor]) -> None:
        self._of = [(p, p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None

    def put_back(self) -> None:
        of, self._of = self._of, []
        for parameter, grad in of:
            parameter.grad = grad
