"""The network that is attacked where no trained one is given: smooth, with biases, as attacks like it best.

Images get the CPL net. Tables get the paper's sizes for them (600 and 100 units), with sigmoids and biases.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

import torch
from torch import nn

from gradveil import models
from gradveil.data import DataSet

NAMES = {"image": "cpl-net", "tabular": "sigmoid-mlp"}  # by kind of data


def untrained(data: DataSet, *, generator: torch.Generator) -> nn.Sequential:
    """A network for a data set; only ``generator`` is drawn from."""
    if data.kind == "image":
        return models.cpl_net(data.input_shape, data.classes, generator=generator)
    return sigmoid_mlp(data.input_shape[0], data.classes, generator=generator)


def sigmoid_mlp(features: int, classes: int, *, generator: torch.Generator) -> nn.Sequential:
    """Linear 600 - sigmoid - Linear 100 - sigmoid - Linear, weights and biases uniform within 3 / sqrt(inputs).

    That is three times torch's own width: gradients reach the first layer, and the sigmoids are not saturated. At the
    1/2 of the CPL net they are, and most attacks stall.

    >>> [tuple(p.shape) for p in sigmoid_mlp(446, 30, generator=torch.Generator()).parameters()][:4]
    [(600, 446), (600,), (100, 600), (100,)]
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    sizes = (features, 600, 100, classes)
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes), start=1):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -3.0 * inputs**-0.5, 3.0 * inputs**-0.5, generator=generator)
        layers[f"linear{i}"] = layer
        if i < 3:
            layers[f"sigmoid{i}"] = nn.Sigmoid()
    return nn.Sequential(layers)
