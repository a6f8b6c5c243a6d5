"""One rule per kind of layer: how it runs, and what its per-example gradients are.

A layer without a rule (:func:`find` gives None) is followed through torch.func (function.py): right, only slower.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gradveil.clipping.rules.conv import ConvRule, ConvTransposeRule
from gradveil.clipping.rules.embedding import EmbeddingBagRule, EmbeddingRule
from gradveil.clipping.rules.layer import LayerRule
from gradveil.clipping.rules.linear import Conv1DRule, LinearRule
from gradveil.clipping.rules.norm import GroupNormRule, InstanceNormRule, LayerNormRule, PReLURule, RMSNormRule
from gradveil.clipping.sharding import plain_type

RULES: dict[type[nn.Module], Callable[[nn.Module], LayerRule]] = {
    nn.Linear: LinearRule,
    nn.Conv1d: ConvRule,
    nn.Conv2d: ConvRule,
    nn.Conv3d: ConvRule,
    nn.ConvTranspose1d: ConvTransposeRule,
    nn.ConvTranspose2d: ConvTransposeRule,
    nn.ConvTranspose3d: ConvTransposeRule,
    nn.Embedding: EmbeddingRule,
    nn.EmbeddingBag: EmbeddingBagRule,
    nn.LayerNorm: LayerNormRule,
    nn.RMSNorm: RMSNormRule,
    nn.GroupNorm: GroupNormRule,
    nn.InstanceNorm1d: InstanceNormRule,
    nn.InstanceNorm2d: InstanceNormRule,
    nn.InstanceNorm3d: InstanceNormRule,
    nn.PReLU: PReLURule,
}


def find(module: nn.Module) -> LayerRule | None:
    """The rule of a module, by its exact type: a subclass may do anything in its forward, or not be called at all.

    Nor may an instance with a forward of its own, or with other parameters than its kind has.
    """
    own = module._parameters
    if (
        is_parametrized(module)
        or "forward" in vars(module)
        or not own.keys() <= {"weight", "bias"}
        or "weight" not in own
    ):
        return None
    kind = plain_type(module)
    make = RULES.get(kind)
    if make is None and kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers"):
        make = Conv1DRule
    return make(module) if make is not None else None


__all__ = ["RULES", "LayerRule", "find"]
