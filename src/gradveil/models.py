"""The networks of the paper, and the choice between them. No biases, Glorot-uniform weights.

Wei & Liu, "Gradient Leakage Attack Resilient Deep Learning": two convolutions and a linear layer
for images, three linear layers for tables; three layers with weights in both. Inputs are in [0, 1].
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from gradveil.errors import ConfigError, UnknownNameError

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
}
KINDS = {"paper-cnn": "image", "paper-mlp": "tabular"}


class Described(Protocol):
    """What :func:`build` needs to know: a ``DataSet`` and a catalogue ``Description`` both say it."""

    @property
    def kind(self) -> str: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def classes(self) -> int: ...


def paper_cnn(
    input_shape: Sequence[int],
    classes: int,
    *,
    dropout: float = 0.0,
    activation: str = "relu",
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Conv 3x3x32 - ReLU - maxpool 2 - Conv 3x3x64 - ReLU - maxpool 2 - (dropout) - Linear, no biases.

    The activation is applied after the pooling: every one offered is increasing, so the values are the same, and it
    works on a quarter of them.
    ``input_shape`` is (channels, height, width). Both convolutions have padding 1, so they keep the size
    and each pooling halves it, rounding down: 28x28 -> 14x14 -> 7x7, 32x32 -> 8x8, 8x8 -> 2x2. With
    ``dropout=0`` there is no dropout layer. ``generator`` draws the weights (else torch's global one),
    and then nothing else is drawn from.

    >>> model = paper_cnn((1, 28, 28), 10)
    >>> [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    [('conv1.weight', (32, 1, 3, 3)), ('conv2.weight', (64, 32, 3, 3)), ('linear.weight', (10, 3136))]
    """
    shape = tuple(input_shape)
    if len(shape) != 3 or any(_not_whole(n, 1) for n in shape) or min(shape[1:]) < 4:
        raise ConfigError(
            f"paper-cnn: input shape {shape!r}. It takes images as (channels, height, width), at least 4x4, "
            "because it halves the size twice."
        )
    if not 0 <= dropout < 1:
        raise ConfigError(f"paper-cnn: dropout {dropout!r} is not in [0, 1); at 1 nothing passes.")
    if activation not in ACTIVATIONS:
        raise UnknownNameError("activation", activation, ACTIVATIONS)
    _check_classes("paper-cnn", classes)

    channels, height, width = shape
    bend = ACTIVATIONS[activation]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = _weights(nn.Conv2d, channels, 32, kernel_size=3, padding=1, generator=generator)
    layers["pool1"] = nn.MaxPool2d(2)
    layers[f"{activation}1"] = bend()
    layers["conv2"] = _weights(nn.Conv2d, 32, 64, kernel_size=3, padding=1, generator=generator)
    layers["pool2"] = nn.MaxPool2d(2)
    layers[f"{activation}2"] = bend()
    layers["flatten"] = nn.Flatten()
    if dropout:
        layers["dropout"] = nn.Dropout(dropout)
    features = 64 * (height // 4) * (width // 4)
    layers["linear"] = _weights(nn.Linear, features, classes, generator=generator)
    return nn.Sequential(layers)


def paper_mlp(features: int, classes: int, *, generator: torch.Generator | None = None) -> nn.Sequential:
    """Linear 600 - ReLU - Linear 100 - ReLU - Linear, no biases; ``generator`` as in :func:`paper_cnn`.

    >>> [tuple(p.shape) for p in paper_mlp(446, 30).parameters()]
    [(600, 446), (100, 600), (30, 100)]
    """
    if _not_whole(features, 1):
        raise ConfigError(f"paper-mlp: {features!r} input features; give a whole number, at least 1.")
    _check_classes("paper-mlp", classes)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["linear1"] = _weights(nn.Linear, features, 600, generator=generator)
    layers["relu1"] = nn.ReLU()
    layers["linear2"] = _weights(nn.Linear, 600, 100, generator=generator)
    layers["relu2"] = nn.ReLU()
    layers["linear3"] = _weights(nn.Linear, 100, classes, generator=generator)
    return nn.Sequential(layers)


def cpl_net(input_shape: Sequence[int], classes: int, *, generator: torch.Generator | None = None) -> nn.Sequential:
    """The network that gradient-leakage attacks are usually shown on (that of the released CPL code).

    Four 5x5 convolutions of 12 channels with strides 2, 2, 1, 1, a sigmoid after each, then a linear layer; all weights
    and biases uniform in (-1/2, 1/2). Smooth and wide enough for second-order attacks; not meant to be trained.

    >>> [tuple(p.shape) for n, p in cpl_net((1, 28, 28), 10).named_parameters() if n.startswith("linear")]
    [(10, 588), (10,)]
    """
    shape = tuple(input_shape)
    if len(shape) != 3 or any(_not_whole(n, 1) for n in shape):
        raise ConfigError(f"cpl-net: input shape {shape!r}. It takes images as (channels, height, width).")
    _check_classes("cpl-net", classes)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels, height, width = shape
    for i, stride in enumerate((2, 2, 1, 1), start=1):
        layers[f"conv{i}"] = nn.Conv2d(channels, 12, 5, stride=stride, padding=2)
        layers[f"sigmoid{i}"] = nn.Sigmoid()
        channels, height, width = 12, -(-height // stride), -(-width // stride)
    layers["flatten"] = nn.Flatten()
    layers["linear"] = nn.Linear(12 * height * width, classes)
    model = nn.Sequential(layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


def build(
    name: str,
    description: Described,
    *,
    dropout: float = 0.0,
    activation: str = "relu",
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """The named network ("paper-cnn", "paper-mlp") for a data set; "auto" picks by its kind.

    ``description`` is a loaded ``DataSet`` or an entry of the catalogue. ``dropout`` and ``activation``
    belong to the image network and are refused, rather than ignored, with the other.

    >>> from gradveil.data import CATALOGUE
    >>> list(dict(build("auto", CATALOGUE["location"]).named_children()))
    ['linear1', 'relu1', 'linear2', 'relu2', 'linear3']
    """
    if name == "auto":
        name = next((n for n, kind in KINDS.items() if kind == description.kind), name)
    if name not in KINDS:
        raise UnknownNameError("model", name, ("auto", *KINDS))
    if KINDS[name] != description.kind:
        raise ConfigError(
            f"{name} takes {KINDS[name]} data, and this data set is {description.kind} with inputs of shape "
            f"{tuple(description.input_shape)}. Use 'auto'."
        )
    shape, classes = description.input_shape, description.classes
    if name == "paper-cnn":
        return paper_cnn(shape, classes, dropout=dropout, activation=activation, generator=generator)
    if dropout or activation != "relu":
        raise ConfigError(
            f"paper-mlp has no dropout and ReLU only; got dropout={dropout!r}, activation={activation!r}. "
            "Leave them out."
        )
    return paper_mlp(math.prod(shape), classes, generator=generator)


def _weights(
    kind: type[nn.Conv2d] | type[nn.Linear], *sizes: int, generator: torch.Generator | None, **settings: int
) -> nn.Module:
    """A layer without bias and with Glorot-uniform weights, which are the only thing drawn for it."""
    layer: nn.Conv2d | nn.Linear
    layer = nn.utils.skip_init(kind, *sizes, bias=False, **settings)
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    return layer


def _check_classes(model: str, classes: int) -> None:
    if _not_whole(classes, 2):
        raise ConfigError(f"{model}: {classes!r} classes; a classifier needs a whole number, at least 2.")


def _not_whole(value: object, least: int) -> bool:
    return not isinstance(value, int) or isinstance(value, bool) or value < least
