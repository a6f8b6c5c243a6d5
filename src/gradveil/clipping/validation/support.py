"""Which models have per-example gradients at all, and how to mend those that do not."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from gradveil.clipping._rng import rng_at, rng_state
from gradveil.clipping.outputs import tensors_in
from gradveil.clipping.validation.example_independence import outputs_agree
from gradveil.errors import ConfigError, UnsupportedModelError


def check_module(module: nn.Module) -> None:
    """Refuse, by name, what mixes examples or hides its parameters from clipping."""
    for name, child in module.named_modules():
        label = f"{type(child).__name__} {name!r}"
        if _is_batch_norm(child) and (child.training or not child.track_running_stats):
            raise UnsupportedModelError(
                f"{label} mixes examples: its output for one example depends on the whole batch, so a per-example "
                "gradient is undefined. Replace it with GroupNorm: gradveil.fix(model)."
            )
        if isinstance(child, _InstanceNorm) and child.track_running_stats:
            raise UnsupportedModelError(
                f"{label} keeps running statistics of the private data in its buffers, which no noise covers. "
                "Use track_running_stats=False: gradveil.fix(model)."
            )
        if isinstance(child, torch.jit.ScriptModule) and any(p.requires_grad for p in child.parameters()):
            raise UnsupportedModelError(
                f"{label} is compiled by TorchScript, out of reach of per-example clipping. Use the module that it was "
                "made from, or freeze its parameters."
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
    return [child for child in module.modules() if _is_batch_norm(child)]


def half_precision(name: str, dtype: torch.dtype) -> UnsupportedModelError:
    """Of a parameter that trains, and so has its gradient, in half precision."""
    return UnsupportedModelError(
        f"parameter {name!r} is of {dtype}: the sum of clipped gradients would be rounded to that before the noise is "
        "added, by more than the noise is made for, so that one example could change it by more than its bound. Keep "
        "what trains in float32 and compute in half precision: torch.autocast. (What is frozen may be in any type.)"
    )


def fix(module: nn.Module, *, num_groups: int | None = None, example: Any = None) -> nn.Module:
    """A copy of the model that normalises in groups of channels instead of over the batch, without running statistics.

    torch's own BatchNorm1d, 2d, 3d and SyncBatchNorm are replaced with GroupNorm, which starts as identity scale. A
    subclass of theirs, or one with hooks, may do more than normalise (timm's BatchNormAct2d has a dropout and an
    activation): it stays, with its parameters, and only its call of ``F.batch_norm`` becomes one of ``F.group_norm``.
    InstanceNorm stays without its running statistics. All other weights are kept, what was frozen stays frozen, and the
    user's model is untouched.

    A BatchNorm in eval mode whose parameters are all frozen, as in a pretrained backbone, is left alone: it goes by the
    statistics it has, and mixes no examples as long as it stays in eval mode. (Call ``module.train()`` before, to have
    it replaced.)

    Args:
        module: The model.
        num_groups: How many groups every norm has; it must divide the channels of each. By default as many as there
            are, up to 32, of equal size and at least two channels. As many groups as channels suit images, where each
            channel is normalised over its pixels; of the output of a linear layer they would leave nothing.
        example: Inputs for a check that nothing but norms was changed: a tensor, a tuple of positional arguments, or a
            mapping of keyword arguments. Copies of the model before and after are run on it, in the mode they are in,
            with the same in place of every normalisation: once nothing, once one over the whole tensor. Their outputs
            must agree.

    Returns:
        The copy. Its attribute ``gradveil_changes`` is a tuple of strings, a line for each change; they are logged too,
        by the logger "gradveil" at level INFO.

    Raises:
        ConfigError: ``num_groups`` is no positive integer or does not divide the channels of a norm; ``example`` shows
            nothing.
        UnsupportedModelError: A lazy norm has no shape yet, or the two models give different outputs on the example. A
            subclass of BatchNorm that normalises by hand, without ``F.batch_norm``, is refused when it is called.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> type(fix(model)[1]).__name__, fix(model)[1].num_groups
    ('GroupNorm', 4)
    >>> fix(model, num_groups=2, example=torch.zeros(1, 1, 5, 5)).gradveil_changes
    ('1: BatchNorm2d(8) -> GroupNorm(2, 8)',)
    """
    _check_groups(module, num_groups)
    changes: list[str] = []
    fixed = _fixed(copy.deepcopy(module), "", num_groups, {}, changes)
    vars(fixed)["gradveil_changes"] = tuple(changes)
    if example is not None and changes:
        _check_outputs(module, fixed, example, changes)
    for change in changes:
        logging.getLogger("gradveil").info(change)
    return fixed


_TORCHS_OWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # which normalise, and no more
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _is_batch_norm(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether it normalises over the batch; one that was mended does not."""
    return isinstance(module, _BatchNorm) and not isinstance(vars(module).get("forward"), GroupedForward)


def _is_to_mend(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Not one that is frozen with the statistics it has."""
    if not _is_batch_norm(module):
        return False
    trains = any(p.requires_grad for p in module.parameters())
    return trains or module.training or not module.track_running_stats or module.running_mean is None


def _only_normalises(module: _BatchNorm) -> bool:
    """No subclass, whose forward may do more; nothing hangs on the object, which could then not be replaced."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) in _TORCHS_OWN and "forward" not in vars(module) and not any((*hooks, module._modules))


def _groups(channels: int) -> int:
    """The most groups, up to 32, of equal size and at least two channels (one alone would be normalised away)."""
    return max((g for g in range(1, min(32, channels // 2) + 1) if channels % g == 0), default=1)


def _check_groups(module: nn.Module, num_groups: int | None) -> None:
    norms = {name: child for name, child in module.named_modules() if _is_to_mend(child)}
    for name, norm in norms.items():
        if norm.num_features == 0:
            raise UnsupportedModelError(
                f"{type(norm).__name__} {name!r} is lazy and has no shape yet, so its groups cannot be chosen. Run one "
                "forward pass on public or zero input before gradveil.fix."
            )
    if num_groups is None:
        return
    if type(num_groups) is not int or num_groups < 1:
        raise ConfigError(f"num_groups is {num_groups!r}; give a positive integer, or leave it out.")
    for name, norm in norms.items():
        if norm.num_features % num_groups:
            common = math.gcd(*(other.num_features for other in norms.values()))
            fitting = ", ".join(str(g) for g in range(1, common + 1) if common % g == 0)
            raise ConfigError(
                f"num_groups is {num_groups}, and {type(norm).__name__} {name!r} has {norm.num_features} channels, "
                "which cannot be divided into as many groups of equal size. What fits every norm of this model: "
                f"{fitting}. Without num_groups, each gets a number that fits it."
            )


def _fixed(
    module: nn.Module, name: str, num_groups: int | None, done: dict[nn.Module, nn.Module], changes: list[str]
) -> nn.Module:
    """``done``: what was made of a module that is held in several places; ``changes``: gets a line for each."""
    if module not in done:
        done[module] = module  # a module may hold itself, by way of others
        done[module] = _mended(module, name, num_groups, changes)
        for child_name, child in module._modules.items():
            if child is not None:
                path = f"{name}.{child_name}" if name else child_name
                setattr(module, child_name, _fixed(child, path, num_groups, done, changes))
    return done[module]


def _mended(module: nn.Module, name: str, num_groups: int | None, changes: list[str]) -> nn.Module:
    if _is_to_mend(module):
        channels = int(module.num_features)
        groups = num_groups or _groups(channels)
        before = f"{name or '(root)'}: {type(module).__name__}({channels})"
        if _only_normalises(module):
            changes.append(f"{before} -> GroupNorm({groups}, {channels})")
            return _group_norm_for(module, groups)
        changes.append(f"{before} normalises in {groups} group{'s' if groups > 1 else ''}")
        _drop_statistics(module)
        _leave_process_group(module)
        vars(module)["forward"] = GroupedForward(module, groups, f"{type(module).__name__} {name!r}")
    elif isinstance(module, _InstanceNorm) and module.track_running_stats:
        changes.append(f"{name or '(root)'}: {type(module).__name__}({module.num_features}) without running statistics")
        _drop_statistics(module)
    return module


def _group_norm_for(module: _BatchNorm, groups: int) -> nn.GroupNorm:
    norm = nn.GroupNorm(groups, module.num_features, eps=module.eps, affine=module.affine)
    if module.affine:
        norm = norm.to(device=module.weight.device, dtype=module.weight.dtype)
        norm.weight.requires_grad_(module.weight.requires_grad)
        bias: Tensor | None = module.bias  # a scale may come without a shift
        if bias is None:
            norm.register_parameter("bias", None)
        else:
            norm.bias.requires_grad_(bias.requires_grad)
    return norm.train(module.training)


def _drop_statistics(module: _BatchNorm | _InstanceNorm) -> None:
    module.track_running_stats = False
    for buffer in _STATISTICS:
        setattr(module, buffer, None)


def _leave_process_group(module: nn.Module) -> None:
    """A SyncBatchNorm that is a member of no group calls F.batch_norm, and not a function that asks other processes."""
    if isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_available():
        module.process_group = torch.distributed.GroupMember.NON_GROUP_MEMBER


class GroupedForward:
    """Stands in for the forward of a batch norm that does more than normalise: the same, normalising in groups."""

    def __init__(self, module: _BatchNorm, num_groups: int, label: str) -> None:
        self.module, self.num_groups, self.label = module, num_groups, label
        self.own: Callable[..., Any] | None = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.own if self.own is not None else partial(type(self.module).forward, self.module)
        in_groups = _InGroups(self)
        try:
            with in_groups:
                output = own(*args, **kwargs)
        except (AttributeError, TypeError) as error:  # by hand, it would miss its running statistics
            if in_groups.normalised:
                raise
            raise self._refusal(f"its forward failed before it called F.batch_norm ({error})") from error
        if not in_groups.normalised:
            raise self._refusal("its forward did not call F.batch_norm")
        return output

    def check(self, input: Tensor) -> None:
        if input.dim() > 1 and input.shape[1] != self.module.num_features:
            raise self._refusal(
                f"it normalises {input.shape[1]} channels and not its own {self.module.num_features}, which may be of "
                "several examples"
            )

    def _refusal(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.label} is a batch norm that cannot be made to normalise in groups: {why}. Replace it by hand with "
            "a module that normalises each example by itself, such as nn.GroupNorm, followed by whatever else it does."
        )


class _InGroups(TorchFunctionMode):
    """Batch normalisation becomes group normalisation. A mode around this one sees it as such."""

    def __init__(self, forward: GroupedForward) -> None:
        super().__init__()
        self.forward, self.normalised = forward, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = _BATCH_NORMS.get(func)
        if arguments is None:
            return func(*args, **(kwargs or {}))
        self.normalised = True
        input, weight, bias, eps = arguments(*args, **(kwargs or {}))
        self.forward.check(input)
        return F.group_norm(input, self.forward.num_groups, weight, bias, eps)


def _of_functional(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    return input, weight, bias, eps


def _of_torch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    return input, weight, bias, eps


_BATCH_NORMS: dict[Any, Callable[..., tuple[Tensor, Tensor | None, Tensor | None, float]]] = {
    F.batch_norm: _of_functional,
    torch.batch_norm: _of_torch,
}
_NORMALISATIONS = (
    F.batch_norm,
    torch.batch_norm,
    F.group_norm,
    torch.group_norm,
    F.instance_norm,
    torch.instance_norm,
)


class _StandIn(TorchFunctionMode):
    """What fix may change is the same in every model: scale and shift too, which a new norm does not take over."""

    def __init__(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stand_in = stand_in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NORMALISATIONS:
            return self.stand_in(args[0] if args else kwargs["input"])
        return func(*args, **(kwargs or {}))


def _as_it_is(input: Tensor) -> Tensor:
    return input.clone()  # an activation in place must not reach what comes before the norm


def _over_everything(input: Tensor) -> Tensor:
    """In many layers without any normalisation, signals fade away or grow out of bounds: then no output shows them."""
    return F.layer_norm(input, input.shape) if input.numel() else input.clone()


def _check_outputs(module: nn.Module, fixed: nn.Module, example: Any, changes: list[str]) -> None:
    """Both models give the same on the example, but for normalisations."""
    finite = False
    for stand_in in (_as_it_is, _over_everything):
        before, after = (_outputs(copy.deepcopy(model), example, stand_in) for model in (module, fixed))
        finite = finite or any(bool(t.isfinite().any()) for t in before)
        if len(before) != len(after) or not all(outputs_agree(a, b) for a, b in zip(before, after, strict=True)):
            raise UnsupportedModelError(
                "the fixed model differs from the original in more than its norms: on the example, with the same in "
                "place of every normalisation, they give different outputs. So some norm did more than normalise, or "
                f"the model asks for the type of its norms. The changes were: {'; '.join(changes)}. Replace "
                "these norms by hand."
            )
    if not finite:
        raise ConfigError(
            "the example cannot show what was changed: the model returned no finite number for it. Give another one, "
            "or none."
        )


def _outputs(module: nn.Module, example: Any, stand_in: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Of a copy of the model, from the generators as they are now, which are put back."""
    for child in module.modules():
        _leave_process_group(child)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
    args = args if isinstance(args, tuple) else (args,)
    args, kwargs = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, (args, dict(kwargs)))
    with torch.no_grad(), rng_at(rng_state(device), device), _StandIn(stand_in):
        output = module(*args, **kwargs)
    return tensors_in(output)
