"""The attack that computes: a linear layer, fed with the input itself, gives one example away.

The gradient of row k of its weight is d_k x with d_k = dL/dz_k, that of its bias is d_k: x is their quotient, exactly,
in any row whose bias gradient is not zero. All rows and all observed steps together, x = sum d_k W_k / sum d_k^2, are
as exact and bear noise better. Without a bias the rows still are multiples of x: its direction is known, and of rows of
bits the length too. Clipping scales everything alike and hides nothing; noise does.

Of a batch the quotient would be one blend of all its examples. Behind a ReLU they can be told apart (relu_batches.py);
otherwise the attack refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.attacks.methods.base import Attack, Reconstruction, Watch
from gradveil.attacks.methods.labels import infer_labels
from gradveil.attacks.methods.relu_batches import LARGEST, separate
from gradveil.attacks.observation.gradients import model_at
from gradveil.attacks.observation.views import Observation, StepObservation
from gradveil.errors import UnsupportedModelError

_POWERS = 30  # of the power iteration; without noise one is enough


def leaking_layer(module: nn.Module, features: int, *, bias: bool = True) -> str | None:
    """The first linear layer, if it takes as many numbers as an input has and, with ``bias``, has one; else None."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            known = not bias or isinstance(child.bias, Tensor)
            return name if known and child.in_features == features else None
    return None


class Analytic(Attack):
    name = "analytic"

    def reconstruct(
        self, observation: Observation, *, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        features = int(torch.Size(observation.input_shape).numel())
        row = len(observation.input_shape) == 1
        name = leaking_layer(observation.module, features, bias=not row)
        if name is None:
            raise UnsupportedModelError(
                f"the analytic attack needs a first linear layer with a bias on the {features} numbers of an input "
                "(without one, rows of bits); this model has none. Use another attack, such as map."
            )
        if observation.batch > 1:
            return _batches(observation, name, seed)
        if f"{name}.bias" in observation.sights[0].gradients:
            flat = _quotient(observation.sights, name)
        else:
            flat = _direction(observation.sights, name)
        x = flat.view(-1, 1, *observation.input_shape)
        failed = ~torch.isfinite(x).flatten(1).all(1)
        x = torch.nan_to_num(x, 0.5, 0.5, 0.5)
        loss: Tensor = torch.zeros(len(x), device=x.device)
        return Reconstruction(
            x=x, labels=infer_labels(observation), loss=loss, losses=[loss], frames={0: x.clone()}, failed=failed
        )


def _batches(observation: Observation, name: str, seed: int) -> Reconstruction:
    """The examples of each victim's batch, told apart; one whose examples were not found is marked as failed."""
    sight = observation.sights[0]
    layer = sight.weights[f"{name}.weight"], sight.weights.get(f"{name}.bias")
    if layer[1] is None or sight.defence.noise_std is not None or sight.defence.whitening is not None:
        raise UnsupportedModelError(
            f"each gradient is of {observation.batch} examples, and the analytic attack tells them apart only without "
            "noise and with a bias in the first layer: otherwise it would return one blend of them. Use map."
        )
    found = []
    for weight, bias in zip(sight.gradients[f"{name}.weight"], sight.gradients[f"{name}.bias"], strict=True):
        found.append(separate(weight, bias, (layer[0], layer[1]), observation.batch, seed=seed))
    if all(one is None for one in found):
        raise UnsupportedModelError(
            f"the {observation.batch} examples of each gradient could not be told apart: that needs a ReLU after the "
            f"first linear layer, {name!r}, many more outputs of it than examples, and at most {LARGEST} of these. Use "
            "map."
        )
    grey = torch.full((observation.batch, *observation.input_shape), 0.5).to(layer[0])
    x = torch.stack([grey if one is None else one[0].to(grey).view_as(grey) for one in found])
    failed = torch.tensor([one is None for one in found], device=x.device)
    slopes = [torch.zeros(observation.batch, len(layer[0])).to(x) if one is None else one[1].to(x) for one in found]
    labels = _labels(observation, name, x, torch.stack(slopes))
    loss: Tensor = torch.zeros(len(x), device=x.device)
    return Reconstruction(x=x, labels=labels, loss=loss, losses=[loss], frames={0: x.clone()}, failed=failed)


def _labels(observation: Observation, name: str, x: Tensor, slopes: Tensor) -> Tensor:
    """The class of each example (V, B) whose gradient of the first layer's outputs is most along slopes (V, B, m)."""
    sight, best = observation.sights[0], []
    for label in range(observation.classes):
        with torch.no_grad():
            own = model_at(observation, sight).per_example(x, torch.full(x.shape[:2], label, device=x.device))
        best.append(torch.nn.functional.cosine_similarity(own[f"{name}.bias"], slopes, dim=2))
    return torch.stack(best).argmax(0)


def _rows(sights: tuple[StepObservation, ...], name: str) -> Tensor:
    """A parameter's gradients at all steps, one below the other, in double: squares of large ones stay finite."""
    return torch.cat([sight.gradients[name].double() for sight in sights], 1)


def _quotient(sights: tuple[StepObservation, ...], name: str) -> Tensor:
    """sum d_k W_k / sum d_k^2 over rows and steps: (V, features)."""
    weights, biases = _rows(sights, f"{name}.weight"), _rows(sights, f"{name}.bias")
    found = torch.einsum("vk,vkf->vf", biases, weights) / biases.square().sum(1, keepdim=True)
    return found.to(sights[0].gradients[f"{name}.weight"].dtype)


def _direction(sights: tuple[StepObservation, ...], name: str) -> Tensor:
    """What all rows are multiples of (their first singular vector), as long as a row of bits: (V, features).

    Of bits x, a multiple a x has the sum of squares a^2 n and the sum a n: a is their quotient.
    """
    weights = _rows(sights, f"{name}.weight")
    each = torch.arange(len(weights), device=weights.device)
    found = weights[each, weights.square().sum(2).argmax(1)]
    for _ in range(_POWERS):
        found = found / found.norm(dim=1, keepdim=True)
        found = torch.einsum("vkf,vk->vf", weights, torch.einsum("vkf,vf->vk", weights, found))
    found = found / (found.square().sum(1, keepdim=True) / found.sum(1, keepdim=True))
    return found.to(sights[0].gradients[f"{name}.weight"].dtype)
