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
