"""A model among several processes: the same weights on all, or each its part, and gradients added up by the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradveil.clipping import sharding
from gradveil.clipping.clipped_functions import ModelHook
from gradveil.errors import ConfigError
from gradveil.mechanism.distributed import ranks as processes
from gradveil.mechanism.distributed.ranks import Ranks
from gradveil.mechanism.strategies import Strategy


def is_cut(module: nn.Module, strategy: Strategy) -> bool:
    """Whether the model's parameters are cut over the ranks; refused where that cannot be followed."""
    cut = [sharding.is_sharded(p) for p in module.parameters() if p.requires_grad]
    if not any(cut):
        return False
    if not all(cut):
        raise ConfigError(
            f"{cut.count(False)} of {len(cut)} trainable parameters are whole and the others cut over processes. "
            "Call fully_shard on the whole model too, so that it takes in what its layers have left."
        )
    if not strategy.is_private or strategy.bounds in ("per-coordinate", "adaptive"):
        raise ConfigError(
            f"strategy {strategy.name!r} does not work on a model that fully_shard has cut: it needs "
            "whole gradients. Choose another, or use DistributedDataParallel."
        )
    return True


def join(model: nn.Module, ranks: Ranks) -> list[Any]:
    """Make the model, wrapped in DistributedDataParallel or not, one of several; what takes that back."""
    module = processes.unwrapped(model)
    ranks.copy_first(module)
    if isinstance(model, DistributedDataParallel):
        processes.silence(model)
    handles: list[Any] = [
        module.register_forward_pre_hook(ModelHook(lambda module, *_: processes.silence_active(module)))
    ]
    for cut in sharding.sharding_modules(module):
        cut.set_gradient_divide_factor(1.0)  # sums are added up, not averaged
        cut.set_force_sum_reduction_for_comms(True)  # and by a plain sum, which every backend knows
        handles.append(_Undo(partial(cut.set_gradient_divide_factor, float(ranks.count))))
    return handles


class _Undo:
    """Among the handles of an engine: what is called when it lets go of the model."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.remove = undo
