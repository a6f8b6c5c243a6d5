"""The networks, and the choice between them: the paper's, and those that are accurate at a proved epsilon.

Wei & Liu, "Gradient Leakage Attack Resilient Deep Learning": two convolutions and a linear layer
for images, three linear layers for tables; three layers with weights in both, Glorot-uniform, without biases.
Ours are a linear layer, and convolutional networks with bounded activations and norms that treat each example alone.
Inputs are in [0, 1], or fixed features of them (:mod:`gradveil.training.features`), which are then the first part of
the model.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.training import features as feature_maps

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
}
# What each network takes.
KINDS = {
    "paper-cnn": ("image",),
    "paper-mlp": ("tabular",),
    "linear": ("image", "tabular", "feature map"),
    "scatter-cnn": ("feature map",),
    "tempered-cnn": ("image",),
}
_AUTO = {"image": "paper-cnn", "tabular": "paper-mlp", "feature map": "linear"}
_BOUNDED = ("tanh", "sigmoid")


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
    channels, height, width = _image_shape("paper-cnn", input_shape, least=4)
    if not 0 <= dropout < 1:
        raise ConfigError(f"paper-cnn: dropout {dropout!r} is not in [0, 1); at 1 nothing passes.")
    bend = _activation(activation)
    _check_classes("paper-cnn", classes)
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


def linear(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """One linear layer with biases on the flattened input, all zero at first: nothing has to be unlearned.

    >>> [tuple(p.shape) for p in linear((81, 7, 7), 10).parameters()]
    [(10, 3969), (10,)]
    """
    _check_classes("linear", classes)
    layer = nn.utils.skip_init(nn.Linear, math.prod(input_shape), classes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=layer))


def scatter_cnn(
    input_shape: Sequence[int], classes: int, *, activation: str = "tanh", generator: torch.Generator | None = None
) -> nn.Sequential:
    """A small head for feature maps: conv 3x3x64 - maxpool 2 - tanh - conv 3x3x64 - tanh - linear, with biases.

    In the manner of Tramer & Boneh, "Differentially Private Learning Needs Better Features", 2021.

    >>> [(name, tuple(p.shape)) for name, p in scatter_cnn((81, 7, 7), 10).named_parameters() if p.ndim > 1]
    [('conv1.weight', (64, 81, 3, 3)), ('conv2.weight', (64, 64, 3, 3)), ('linear.weight', (10, 576))]
    """
    channels, height, width = _image_shape("scatter-cnn", input_shape, least=2)
    bend = _activation(activation)
    _check_classes("scatter-cnn", classes)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = _weights(nn.Conv2d, channels, 64, kernel_size=3, padding=1, bias=True, generator=generator)
    layers["pool1"] = nn.MaxPool2d(2)
    layers[f"{activation}1"] = bend()
    layers["conv2"] = _weights(nn.Conv2d, 64, 64, kernel_size=3, padding=1, bias=True, generator=generator)
    layers[f"{activation}2"] = bend()
    layers["flatten"] = nn.Flatten()
    outputs = 64 * (height // 2) * (width // 2)
    layers["linear"] = _weights(nn.Linear, outputs, classes, bias=True, generator=generator)
    return nn.Sequential(layers)


def tempered_cnn(
    input_shape: Sequence[int], classes: int, *, activation: str = "tanh", generator: torch.Generator | None = None
) -> nn.Sequential:
    """Three times conv 3x3 - group norm - tanh, of 32, 64 and 128 channels, maxpool 2 after the first two; linear.

    Bounded activations keep per-example gradients short, so that less of them is clipped away (Papernot et al.,
    "Tempered Sigmoid Activations for Deep Learning with Differential Privacy", 2021); group norms treat each example
    alone, where batch norms mix them.

    >>> sum(p.numel() for p in tempered_cnn((1, 28, 28), 10).parameters())
    155850
    """
    channels, height, width = _image_shape("tempered-cnn", input_shape, least=4)
    bend = _activation(activation)
    if activation not in _BOUNDED:
        raise ConfigError(
            f"tempered-cnn: activation {activation!r} is not bounded, and gradients through it are not kept short. "
            f"Give {' or '.join(_BOUNDED)}."
        )
    _check_classes("tempered-cnn", classes)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, wide in enumerate((32, 64, 128), start=1):
        layers[f"conv{i}"] = _weights(
            nn.Conv2d, channels, wide, kernel_size=3, padding=1, bias=True, generator=generator
        )
        layers[f"norm{i}"] = nn.GroupNorm(8, wide)
        layers[f"{activation}{i}"] = bend()
        if i < 3:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
        channels = wide
    layers["flatten"] = nn.Flatten()
    outputs = channels * (height // 4) * (width // 4)
    layers["linear"] = _weights(nn.Linear, outputs, classes, bias=True, generator=generator)
    return nn.Sequential(layers)


def build(
    name: str,
    description: Described,
    *,
    features: str = "none",
    dropout: float = 0.0,
    activation: str = "relu",
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """The named network for a data set; "auto" picks by its kind. KINDS says what each takes.

    ``description`` is a loaded ``DataSet`` or an entry of the catalogue. With ``features`` the model's first child,
    of that name, is the feature map, and the network takes what it computes. ``dropout`` and ``activation`` are
    refused, rather than ignored, with a network that has none.

    >>> from gradveil.training.data import CATALOGUE
    >>> list(dict(build("auto", CATALOGUE["location"]).named_children()))
    ['linear1', 'relu1', 'linear2', 'relu2', 'linear3']
    >>> list(dict(build("linear", CATALOGUE["mnist"], features="scattering").named_children()))
    ['features', 'flatten', 'linear']
    """
    fixed = None if features == "none" else feature_maps.make(features, description.input_shape)
    kind, shape = description.kind, tuple(description.input_shape)
    if fixed is not None:
        kind, shape = "feature map", fixed.output_shape
    name = _AUTO[kind] if name == "auto" else name
    if name not in KINDS:
        raise UnknownNameError("model", name, ("auto", *KINDS))
    if kind not in KINDS[name]:
        given = f"this data set is {kind}" if fixed is None else f"{features} features are {kind}s"
        raise ConfigError(
            f"{name} takes {' or '.join(KINDS[name])} data, and {given} with inputs of shape {shape}. Use 'auto'"
            + (", or give features." if fixed is None and "feature map" in KINDS[name] else ".")
        )
    if dropout and name != "paper-cnn":
        raise ConfigError(f"{name} has no dropout; got dropout={dropout!r}. Leave it out.")
    if activation != "relu" and name in ("paper-mlp", "linear"):
        raise ConfigError(f"{name} has no choice of activation; got activation={activation!r}. Leave it out.")
    model = _network(name, shape, description.classes, dropout, activation, generator)
    return model if fixed is None else nn.Sequential(OrderedDict([("features", fixed), *model.named_children()]))


def trained_part(model: nn.Sequential) -> nn.Sequential:
    """The model without the feature map that it may begin with; its parameters keep their names."""
    return nn.Sequential(OrderedDict((n, m) for n, m in model.named_children() if n != "features"))


def _network(
    name: str, shape: tuple[int, ...], classes: int, dropout: float, activation: str, generator: torch.Generator | None
) -> nn.Sequential:
    if name == "paper-cnn":
        return paper_cnn(shape, classes, dropout=dropout, activation=activation, generator=generator)
    if name == "paper-mlp":
        return paper_mlp(math.prod(shape), classes, generator=generator)
    if name == "linear":
        return linear(shape, classes)
    network = scatter_cnn if name == "scatter-cnn" else tempered_cnn
    return network(shape, classes, activation=activation, generator=generator)


def _weights(
    kind: type[nn.Conv2d] | type[nn.Linear],
    *sizes: int,
    generator: torch.Generator | None,
    bias: bool = False,
    **settings: int,
) -> nn.Module:
    """A layer with Glorot-uniform weights, which are the only thing drawn for it, and biases of zero if any."""
    layer: nn.Conv2d | nn.Linear
    layer = nn.utils.skip_init(kind, *sizes, bias=bias, **settings)
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _image_shape(model: str, input_shape: Sequence[int], least: int) -> tuple[int, int, int]:
    shape = tuple(input_shape)
    if len(shape) != 3 or any(_not_whole(n, 1) for n in shape) or min(shape[1:]) < least:
        times = "once" if least < 4 else "twice"
        raise ConfigError(
            f"{model}: input shape {shape!r}. It takes images as (channels, height, width), at least {least}x{least}, "
            f"because it halves the size {times}."
        )
    return shape[0], shape[1], shape[2]


def _activation(name: str) -> Callable[[], nn.Module]:
    if name not in ACTIVATIONS:
        raise UnknownNameError("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def _check_classes(model: str, classes: int) -> None:
    if _not_whole(classes, 2):
        raise ConfigError(f"{model}: {classes!r} classes; a classifier needs a whole number, at least 2.")


def _not_whole(value: object, least: int) -> bool:
    return not isinstance(value, int) or isinstance(value, bool) or value < least
