"""Which models have per-example gradients at all, and how to mend those that do not."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.prune import BasePruningMethod

from gradveil.errors import UnsupportedModelError


def check_module(module: nn.Module) -> None:
    """Refuse, by name, what mixes examples or hides its parameters from clipping."""
    for name, child in module.named_modules():
        label = f"{type(child).__name__} {name!r}"
        if isinstance(child, _BatchNorm) and (child.training or not child.track_running_stats):
            raise UnsupportedModelError(
                f"{label} mixes examples: its output for one example depends on the whole batch, so a per-example "
                "gradient is undefined. Replace it with GroupNorm: gradveil.fix(model)."
            )
        if isinstance(child, _InstanceNorm) and child.track_running_stats:
            raise UnsupportedModelError(
                f"{label} keeps running statistics of the private data in its buffers, which no noise covers. "
                "Use track_running_stats=False: gradveil.fix(model)."
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
            raise UnsupportedModelError(
                f"{label} has a max_norm: it changes its weights in the forward pass, by tokens of the private batch, "
                "and no noise covers that. Leave max_norm out, or renormalise the weights once, before training."
            )
        for hook in child._forward_pre_hooks.values():
            if type(hook).__name__ in ("WeightNorm", "SpectralNorm"):
                raise UnsupportedModelError(
                    f"{label} computes its weight in an old-style {type(hook).__name__} hook, out of reach of "
                    "per-example clipping. Use torch.nn.utils.parametrizations instead."
                )
            if isinstance(hook, BasePruningMethod):
                raise UnsupportedModelError(
                    f"{label} computes its pruned {hook._tensor_name} in a hook, out of reach of per-example clipping. "
                    f"Make it permanent first: torch.nn.utils.prune.remove(module, {hook._tensor_name!r})."
                )
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.is_complex() or parameter.is_sparse:
            kind = "complex" if parameter.is_complex() else "sparse"
            raise UnsupportedModelError(
                f"parameter {name!r} is {kind}: clipping and Gaussian noise are defined here for dense real "
                "parameters. Use a real, dense parametrisation, or freeze it (requires_grad_(False))."
            )
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise half_precision(name, parameter.dtype)
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UnsupportedModelError(
                f"parameter {name!r} of a lazy module has no shape yet. Run one forward pass on public or zero input "
                "before make_private."
            )


def normalisations(module: nn.Module) -> list[_BatchNorm]:
    """The modules that normalise over the batch while they train; in eval mode they go by what they have."""
    return [child for child in module.modules() if isinstance(child, _BatchNorm)]


def half_precision(name: str, dtype: torch.dtype) -> UnsupportedModelError:
    """Of a parameter that trains, and so has its gradient, in half precision."""
    return UnsupportedModelError(
        f"parameter {name!r} is of {dtype}: the sum of clipped gradients would be rounded to that before the noise is "
        "added, by more than the noise is made for, so that one example could change it by more than its bound. Keep "
        "what trains in float32 and compute in half precision: torch.autocast. (What is frozen may be in any type.)"
    )


def fix(module: nn.Module) -> nn.Module:
    """A copy of the model with GroupNorm in place of BatchNorm, and no running statistics.

    The copy keeps all other weights; the new norms start as identity scale. The user's model is untouched.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> type(fix(model)[1]).__name__, fix(model)[1].num_groups
    ('GroupNorm', 4)
    """
    return _fixed(copy.deepcopy(module), {})


def _groups(channels: int) -> int:
    """The most groups, up to 32, of equal size and at least two channels (one alone would be normalised away)."""
    return max((g for g in range(1, min(32, channels // 2) + 1) if channels % g == 0), default=1)


def _fixed(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """``done``: what was made of a module that is held in several places."""
    if module not in done:
        done[module] = module  # a module may hold itself, by way of others
        done[module] = _mended(module, done)
    return done[module]


def _mended(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if isinstance(module, _BatchNorm):
        channels = int(module.num_features)
        if channels == 0:
            raise UnsupportedModelError("a lazy BatchNorm has no shape yet; run one forward pass before gradveil.fix.")
        norm: nn.Module = nn.GroupNorm(_groups(channels), channels, eps=module.eps, affine=module.affine)
        if module.affine:
            norm = norm.to(device=module.weight.device, dtype=module.weight.dtype)
        return norm.train(module.training)
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(module, buffer, None)
    for name, child in module._modules.items():
        if child is not None:
            setattr(module, name, _fixed(child, done))
    return module
