"""The attack that computes: a linear layer with a bias, fed with the input itself, gives one example away exactly.

The gradient of row k of its weight is (dL/dz_k) x, that of its bias is dL/dz_k: their quotient is x, in any row whose
bias gradient is not zero. Clipping scales both alike and hides nothing; noise does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.attacks.attack import Attack, Reconstruction
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.observation import Observation
from gradveil.errors import UnsupportedModelError


def leaking_layer(module: nn.Module, features: int) -> str | None:
    """The first linear layer with a bias that takes as many numbers as an input has; None where there is none."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            return name if child.bias is not None and child.in_features == features else None
    return None


class Analytic(Attack):
    name = "analytic"

    def run(self, observation: Observation, *, iterations: int = 1, seed: int = 0) -> Reconstruction:
        features = int(torch.Size(observation.input_shape).numel())
        name = leaking_layer(observation.module, features)
        if name is None:
            raise UnsupportedModelError(
                f"the analytic attack needs a first linear layer with a bias on the {features} numbers of an input; "
                "this model has none. Use another attack, such as map."
            )
        sight = observation.sights[0]
        weight, bias = sight.gradients[f"{name}.weight"], sight.gradients[f"{name}.bias"]
        row = bias.abs().argmax(1)
        each = torch.arange(len(bias), device=bias.device)
        x = (weight[each, row] / bias[each, row].unsqueeze(1)).view(-1, 1, *observation.input_shape)
        failed = ~torch.isfinite(x).flatten(1).all(1)
        x = torch.nan_to_num(x, 0.5, 0.5, 0.5).expand(-1, observation.batch, *observation.input_shape).clone()
        loss: Tensor = torch.zeros(len(x), device=x.device)
        return Reconstruction(
            x=x, labels=infer_labels(observation), loss=loss, losses=[loss], frames={0: x.clone()}, failed=failed
        )
