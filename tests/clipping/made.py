"""Models made from a function, and how they are followed in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradveil.clipping import Clipper, make_groups


class Made(nn.Module):
    """A model from a function and its modules, parameters and buffers."""

    def __init__(self, function: Any, **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def follow(model: nn.Module, clipping: str = "flat", bound: float = 1.0, reduction: str = "sum") -> Clipper:
    groups = make_groups(model, clipping)
    return Clipper(model, groups, bounds=[bound] * len(groups), loss_reduction=reduction)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def like_the_reference(clipper: Clipper, plain: nn.Module, *inputs: Tensor, tolerance: float = 1e-9) -> None:
    """The clipped sums of a followed model beside those of one example at a time, with bounds that clip some of them.

    ``plain``: a copy of the model that is not followed. Inputs have the examples first.
    """

    def gradients(model: nn.Module, given: Any) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        model(*given).square().sum().backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}

    alone = [gradients(plain, [t[i : i + 1] for t in inputs]) for i in range(len(inputs[0]))]
    clipper.start_step()
    found = gradients(clipper.module, inputs)
    for group, bound in zip(clipper.groups, clipper.weighing.bounds, strict=True):
        norms = [torch.sqrt(sum(g[n].double().square().sum() for n in group.parameters)) for g in alone]
        for n in group.parameters:
            expected = sum(
                g[n] * min(1.0, bound / max(float(norm), 1e-30)) for g, norm in zip(alone, norms, strict=True)
            )
            assert float((found[n] - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max())), n
