"""The network that is attacked where no trained one is given: smooth, with biases, as attacks like it best.

Images get the CPL net, or on request a convolutional one with ReLU, which is harder to match. Tables get the paper's
sizes for them (600 and 100 units), with sigmoids and biases.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from gradveil.errors import UnknownNameError
from gradveil.training import models
from gradveil.training.data import DataSet

NETWORKS = {"image": ("cpl-net", "relu-convnet"), "tabular": ("sigmoid-mlp",)}  # by kind of data, the default first


def network_for(data: DataSet, network: str | None = None) -> str:
    """The name of the network that a data set gets."""
    fitting = NETWORKS[data.kind]
    if network is not None and network not in fitting:
        raise UnknownNameError(f"network for {data.name}", network, fitting)
    return network or fitting[0]


def untrained(data: DataSet, *, generator: torch.Generator, network: str | None = None) -> nn.Sequential:
    """A network for a data set; only ``generator`` is drawn from."""
    name = network_for(data, network)
    if name == "cpl-net":
        return models.cpl_net(data.input_shape, data.classes, generator=generator)
    if name == "relu-convnet":
        return relu_convnet(data.input_shape, data.classes, generator=generator)
    return sigmoid_mlp(data.input_shape[0], data.classes, generator=generator)


def relu_convnet(input_shape: Sequence[int], classes: int, *, generator: torch.Generator) -> nn.Sequential:
    """Four 3x3 convolutions of 32, 64, 64 and 128 channels, the last two with stride 2, ReLU, and a linear layer.

    Weights as torch draws them by default.

    >>> net = relu_convnet((3, 32, 32), 10, generator=torch.Generator())
    >>> tuple(net(torch.zeros(2, 3, 32, 32)).shape)
    (2, 10)
    """
    layers: list[nn.Module] = []
    channels, (height, width) = input_shape[0], input_shape[1:]
    for outputs, stride in ((32, 1), (64, 1), (64, 2), (128, 2)):
        layers += [nn.utils.skip_init(nn.Conv2d, channels, outputs, 3, stride=stride, padding=1), nn.ReLU()]
        channels, height, width = outputs, -(-height // stride), -(-width // stride)
    layers += [nn.Flatten(), nn.utils.skip_init(nn.Linear, channels * height * width, classes)]
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            width_of_weights = 1.0 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -width_of_weights, width_of_weights, generator=generator)
    return nn.Sequential(*layers)


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
