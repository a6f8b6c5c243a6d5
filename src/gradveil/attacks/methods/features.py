"""What a linear layer was fed with, read off its gradient, and inputs searched for that give the same.

Of one example the gradient of a linear layer's weight is d h' with h what it was fed with and d the gradient of its
output: of rank one. With a bias, whose gradient is d, h is their quotient; without, h is known up to its length, which
for the layer of the logits follows from what the softmax must give: d = p - e_y with p = softmax(W h). Clipping scales
all of a layer alike: the quotient stays, the length without a bias is lost, the direction is not. To match features is
a far better posed problem than to match gradients, above all of trained networks: no second derivatives, no flat parts.

Legend: V victims, F numbers that a layer is fed with, K its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.attacks.observation.task import plain_attention
from gradveil.attacks.observation.views import Observation, StepObservation

_GREY = 0.5
_EXACT = 1e-2  # of the features' own size: the least std that they are matched to
_POWERS = 30
_LENGTHS = (1e-4, 1e4)  # of features, that are looked for
_TRIED = 2001
_ALONG = 10.0  # a direction off by 1 in cosine is as wrong as a length by this in its log


@dataclass(frozen=True)
class Reading:
    """Features (V, F) of one layer at one step, each within ``std`` (V,); where not ``scaled``, up to their length."""

    layer: str
    values: Tensor
    std: Tensor
    scaled: bool


def vector_layers(module: nn.Module, shape: tuple[int, ...]) -> list[str]:
    """The linear layers that are fed with one vector of each example, once."""
    fed: dict[str, list[tuple[int, ...]]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            fed.setdefault(name, []).append(tuple(args[0].shape))

        return hook

    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
    uses = [id(m.weight) for m in layers.values()]
    handles = [m.register_forward_pre_hook(note(n)) for n, m in layers.items()]
    try:
        with torch.no_grad():
            like = next(module.parameters())
            module(torch.full((2, *shape), _GREY, dtype=like.dtype, device=like.device))
    finally:
        for handle in handles:
            handle.remove()
    return [
        name
        for name, shapes in fed.items()
        if len(shapes) == 1 and shapes[0] == (2, layers[name].in_features) and uses.count(id(layers[name].weight)) == 1
    ]


def read_features(observation: Observation, last: str | None, labels: Tensor) -> list[tuple[StepObservation, Reading]]:
    """What every such layer was fed with, at every step that is seen. ``last``: the layer that gives the logits."""
    if observation.batch != 1:
        return []
    found = []
    for sight in observation.sights:
        if sight.defence.whitening is not None or sight.local is not None:  # several steps are not of rank one
            continue
        for name in vector_layers(observation.module, observation.input_shape):
            reading = _read(sight, name, labels[:, 0] if name == last else None)
            if reading is not None:
                found.append((sight, reading))
    return found


def _read(sight: StepObservation, name: str, labels: Tensor | None) -> Reading | None:
    """None where the noise leaves nothing."""
    weight = sight.gradients[f"{name}.weight"].double()
    stds = sight.defence.noise_of_parameter()
    std = 0.0 if stds is None else float(torch.as_tensor(stds[f"{name}.weight"]).max())
    bias = sight.gradients.get(f"{name}.bias")
    if bias is not None:
        slope = bias.double()
        signal = slope.square().sum(1, keepdim=True)
        if stds is not None:  # the noise on d adds to its square
            noise = slope.shape[1] * float(torch.as_tensor(stds[f"{name}.bias"]).max()) ** 2
            signal = (signal - noise).clamp(min=0.0)
            if bool((signal < 4.0 * noise).any()):
                return None
        values = torch.einsum("vk,vkf->vf", slope, weight) / signal.clamp(min=1e-300)
        scaled, error = True, std / signal.sqrt().clamp(min=1e-150)
    else:
        left, size, values = rank_one(weight)
        scaled = labels is not None and stds is None and sight.defence.clip is None
        error = std / size.unsqueeze(1).clamp(min=1e-150)
        if scaled:
            assert labels is not None
            values = values * _length(left, size, values, sight.weights[f"{name}.weight"].double(), labels)
    own = values.square().mean(1, keepdim=True).sqrt()
    if not bool(torch.isfinite(values).all()):
        return None
    within = torch.maximum(error, _EXACT * own).clamp(min=1e-30)
    return Reading(name, values.to(sight.gradients[f"{name}.weight"]), within.squeeze(1).float(), scaled)


def rank_one(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first singular vectors and value of gradients (V, K, F): left (V, K), value (V,), right (V, F)."""
    each = torch.arange(len(weight), device=weight.device)
    right = weight[each, weight.square().sum(2).argmax(1)]
    for _ in range(_POWERS):
        right = right / right.norm(dim=1, keepdim=True).clamp(min=1e-300)
        left = torch.einsum("vkf,vf->vk", weight, right)
        right = torch.einsum("vkf,vk->vf", weight, left)
    size = left.norm(dim=1)
    right = right / right.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return left / size.unsqueeze(1).clamp(min=1e-300), size, right


def _length(left: Tensor, size: Tensor, right: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The signed length (V, 1) of features along ``right``: |d| |h| is ``size``, and d = softmax(W h) - e_y.

    The row of the label is the one with its own sign, which settles that of h. Then |h| is the s at which
    |softmax(s W u) - e_y| s is ``size`` and the direction of that difference is ``left``: first roughly, then between
    the neighbours. In logs: of confident examples |d| falls as fast as exp(-s).
    """
    each = torch.arange(len(left), device=left.device)
    sign = torch.where(left[each, labels] > 0, -1.0, 1.0).to(left)
    wanted = left * sign.unsqueeze(1)
    logits = (right * sign.unsqueeze(1)) @ weight.T

    def best(lengths: Tensor) -> Tensor:
        p = torch.softmax(logits.unsqueeze(1) * lengths.unsqueeze(2), 2)
        p[each, :, labels] -= 1.0
        largest = p.abs().amax(2).clamp(min=1e-300)
        p = p / largest.unsqueeze(2)  # its squares would underflow
        norms = p.norm(dim=2).clamp(min=1e-300)
        off = (norms * largest * lengths / size.unsqueeze(1).clamp(min=1e-300)).log().abs()
        along = torch.einsum("vlk,vk->vl", p, wanted) / norms
        return lengths.gather(1, (off + _ALONG * (1.0 - along)).argmin(1, keepdim=True))

    def between(low: Tensor, high: Tensor, count: int) -> Tensor:
        share = torch.linspace(0.0, 1.0, count, dtype=left.dtype, device=left.device)
        return low * (high / low) ** share

    low, high = (torch.full_like(size, s).unsqueeze(1) for s in _LENGTHS)
    found = best(between(low, high, _TRIED))
    step = (high / low) ** (1.0 / (_TRIED - 1))
    found = best(between(found / step, found * step, _TRIED // 10))
    return found * sign.unsqueeze(1)


def feature_misfit(
    observation: Observation, readings: list[tuple[StepObservation, Reading]]
) -> Callable[[Tensor], Tensor]:
    """Half the squared differences of features, in stds: from inputs (V, 1, *shape) to (V,)."""
    by_step: dict[int, tuple[StepObservation, list[Reading]]] = {}
    for sight, reading in readings:
        by_step.setdefault(id(sight), (sight, []))[1].append(reading)

    def misfit(x: Tensor) -> Tensor:
        total = torch.zeros(len(x), device=x.device)
        for sight, read in by_step.values():
            features = layer_inputs(observation.module, sight.weights, x[:, 0], [r.layer for r in read])
            for reading in read:
                found, wanted = features[reading.layer], reading.values
                if not reading.scaled:  # only what stands across the direction is wrong
                    unit = wanted / wanted.norm(dim=1, keepdim=True)
                    size = found.detach().square().mean(1).sqrt()
                    off = found - (found * unit).sum(1, keepdim=True) * unit
                    std = torch.maximum(reading.std * found.detach().norm(dim=1), _EXACT * size).clamp(min=1e-30)
                    # A direction that points the other way is wrong by all of it.
                    off = off + (found * unit).sum(1, keepdim=True).clamp(max=0.0) * unit
                else:
                    off, std = found - wanted, reading.std
                total = total + 0.5 * (off / std.unsqueeze(1)).square().sum(1)
        return total

    return misfit


def layer_inputs(module: nn.Module, weights: Mapping[str, Tensor], x: Tensor, layers: list[str]) -> dict[str, Tensor]:
    """What layers are fed with for inputs (V, *shape): (V, F) each, or (V, T, F) where it is a sequence."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            found[name] = args[0]

        return hook

    handles = [module.get_submodule(name).register_forward_pre_hook(note(name)) for name in layers]
    try:
        with plain_attention():
            functional_call(module, dict(weights), (x,))
    finally:
        for handle in handles:
            handle.remove()
    return found
