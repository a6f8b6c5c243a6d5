"""The attack that computes: a linear layer, fed with the input itself, gives one example away.

The gradient of row k of its weight is d_k x with d_k = dL/dz_k, that of its bias is d_k: x is their quotient, exactly,
in any row whose bias gradient is not zero. All rows and all observed steps together, x = sum d_k W_k / sum d_k^2, are
as exact and bear noise better. Without a bias the rows still are multiples of x: its direction is known, and of rows of
bits the length too. Clipping scales everything alike and hides nothing; noise does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.attacks.methods.base import Attack, Reconstruction, Watch
from gradveil.attacks.methods.labels import infer_labels
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
        if f"{name}.bias" in observation.sights[0].gradients:
            flat = _quotient(observation.sights, name)
        else:
            flat = _direction(observation.sights, name)
        x = flat.view(-1, 1, *observation.input_shape)
        failed = ~torch.isfinite(x).flatten(1).all(1)
        x = torch.nan_to_num(x, 0.5, 0.5, 0.5).expand(-1, observation.batch, *observation.input_shape).clone()
        loss: Tensor = torch.zeros(len(x), device=x.device)
        return Reconstruction(
            x=x, labels=infer_labels(observation), loss=loss, losses=[loss], frames={0: x.clone()}, failed=failed
        )


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
