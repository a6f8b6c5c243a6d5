"""Reading an imprint layer: rows that are multiples of one another, with biases in steps, give whole batches away.

A unit of such a layer is active for examples above its mark. Between two marks that follow each other lie few examples;
where it is one, the difference of the two rows' gradients divided by that of their biases' gradients is that example,
exactly, whatever the batch (Fowl et al. 2022). For the check that a client refuses such models: see made_to_leak.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.attacks.methods.base import Attack, Reconstruction, Watch
from gradveil.attacks.methods.labels import infer_labels
from gradveil.attacks.observation.made_to_leak import made_to_leak
from gradveil.attacks.observation.views import Observation
from gradveil.errors import UnsupportedModelError

_EMPTY = 1e-6  # of the largest difference of bias gradients: nothing lies between two marks


class Imprint(Attack):
    """The examples of the B fullest bins; the mean of those that were found, where there are fewer."""

    name = "imprint"

    def reconstruct(
        self, observation: Observation, *, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        layer = imprint_layer(observation)
        sight = observation.sights[0]
        weight, bias = sight.weights[f"{layer}.weight"], sight.weights[f"{layer}.bias"]
        gradients = sight.gradients[f"{layer}.weight"].double(), sight.gradients[f"{layer}.bias"].double()
        shape = (observation.batch, *observation.input_shape)
        each = [read_bins(g, b, weight, bias)[: observation.batch] for g, b in zip(*gradients, strict=True)]
        x = torch.full((len(each), *shape), 0.5, dtype=torch.float64, device=observation.device)
        for victim, found in enumerate(each):
            if len(found):
                x[victim] = found.mean(0).view(observation.input_shape)
                x[victim, : len(found)] = found.view(-1, *observation.input_shape)
        loss = torch.zeros(len(x), device=x.device)
        failed = torch.tensor([not len(found) for found in each], device=x.device)
        x = x.to(weight.dtype)
        labels = infer_labels(observation)
        return Reconstruction(x=x, labels=labels, loss=loss, losses=[loss], frames={0: x.clone()}, failed=failed)


def imprint_layer(observation: Observation) -> str:
    """The layer that was made to leak and is fed with the input; refused where there is none."""
    features = int(torch.Size(observation.input_shape).numel())
    modules = dict(observation.module.named_modules())
    for found in made_to_leak(observation.module):
        layer = modules[found.layer]
        if found.kind == "imprint" and isinstance(layer, nn.Linear) and layer.in_features == features:
            return found.layer
    raise UnsupportedModelError(
        f"no linear layer of this model on the {features} numbers of an input has rows that are multiples of each "
        "other: there is no imprint to read. Use another attack."
    )


def read_bins(gradient: Tensor, of_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """From gradients (k, d) and (k,): examples (n, d) of the bins that hold some, the fullest first.

    A bin of several examples gives their weighted mean.
    """
    marks = (-bias / weight.norm(dim=1).clamp(min=1e-30)).argsort(descending=True)
    gradient, of_bias = gradient[marks], of_bias[marks]
    steps = torch.cat([gradient[:1], gradient.diff(dim=0)]), torch.cat([of_bias[:1], of_bias.diff(dim=0)])
    size = steps[1].abs()
    held = (size > _EMPTY * size.max().clamp(min=1e-30)).nonzero().flatten()
    held = held[size[held].argsort(descending=True)]
    return steps[0][held] / steps[1][held].unsqueeze(1)
