from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.training.data import CATALOGUE, load
from gradveil.training.models import (
    ACTIVATIONS,
    KINDS,
    build,
    linear,
    paper_cnn,
    paper_mlp,
    scatter_cnn,
    tempered_cnn,
    trained_part,
)


@pytest.mark.parametrize(
    ("shape", "features"),
    [((1, 28, 28), 64 * 49), ((3, 32, 32), 64 * 64), ((1, 8, 8), 256), ((2, 9, 5), 128)],
)
def test_cnn_is_the_papers(shape: tuple[int, int, int], features: int) -> None:
    model = paper_cnn(shape, 10)
    assert [name for name, _ in model.named_children()] == [
        *("conv1", "pool1", "relu1", "conv2", "pool2", "relu2", "flatten", "linear"),
    ]
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == {
        "conv1.weight": (32, shape[0], 3, 3),
        "conv2.weight": (64, 32, 3, 3),
        "linear.weight": (10, features),
    }
    assert model(torch.rand(5, *shape)).shape == (5, 10)


def test_mlp_is_the_papers() -> None:
    model = paper_mlp(446, 30)
    assert [name for name, _ in model.named_children()] == ["linear1", "relu1", "linear2", "relu2", "linear3"]
    assert [tuple(p.shape) for p in model.parameters()] == [(600, 446), (100, 600), (30, 100)]
    assert model(torch.rand(5, 446)).shape == (5, 30)


@pytest.mark.parametrize("model", [paper_cnn((1, 28, 28), 10), paper_mlp(600, 50)])
def test_weights_are_glorot_uniform(model: nn.Sequential) -> None:
    for weight in model.parameters():
        field = math.prod(weight.shape[2:])
        bound = math.sqrt(6 / ((weight.shape[0] + weight.shape[1]) * field))
        assert weight.abs().max() <= bound
        assert weight.abs().max() > 0.95 * bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize("name", ["digits", "location"])
def test_generator_decides_the_weights_and_nothing_else_is_drawn(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        model = build("auto", CATALOGUE[name], generator=torch.Generator().manual_seed(seed))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    before = torch.random.get_rng_state()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_a_generator_the_global_one_is_used() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = paper_mlp(5, 2)
        torch.manual_seed(3)
        second = paper_mlp(5, 2)
        third = paper_mlp(5, 2)
    assert torch.equal(first.linear1.weight, second.linear1.weight)
    assert not torch.equal(first.linear1.weight, third.linear1.weight)


def test_dropout_is_a_layer_only_when_asked_for() -> None:
    assert not any(isinstance(m, nn.Dropout) for m in paper_cnn((1, 8, 8), 10).modules())
    model = paper_cnn((1, 8, 8), 10, dropout=0.5)
    assert [name for name, _ in model.named_children()][-2:] == ["dropout", "linear"]
    assert model.dropout.p == 0.5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation: str) -> None:
    model = paper_cnn((1, 8, 8), 10, activation=activation)
    names = [name for name, _ in model.named_children()]
    assert (names[2], names[5]) == (f"{activation}1", f"{activation}2")
    assert type(model[2]) is ACTIVATIONS[activation]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_pooling_before_the_activation_changes_nothing(activation: str) -> None:
    model = paper_cnn((1, 8, 8), 10, activation=activation).double()
    conv1, pool, bend, conv2, *_, linear = model
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    found = []
    for output in (model(x), linear(pool(bend(conv2(pool(bend(conv1(x)))))).flatten(1))):
        model.zero_grad()
        output.square().sum().backward()
        found.append([output.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", CATALOGUE)
def test_auto_builds_for_every_set_of_the_catalogue(name: str) -> None:
    entry = CATALOGUE[name]
    model = build("auto", entry)
    assert model(torch.rand(2, *entry.input_shape)).shape == (2, entry.classes)
    explicit = build("paper-cnn" if entry.kind == "image" else "paper-mlp", entry)
    assert str(explicit) == str(model)


def test_build_takes_a_loaded_set() -> None:
    digits = load("digits")
    model = build("auto", digits, dropout=0.5, activation="tanh")
    assert model(digits.x_test[:3]).shape == (3, 10)


@pytest.mark.parametrize("shape", [(28, 28), (1, 3, 28), (1, 28, 3), (0, 28, 28), (1, 28.0, 28), (True, 8, 8), ()])
def test_bad_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="input shape"):
        paper_cnn(shape, 10)


@pytest.mark.parametrize("classes", [1, 0, -1, 2.5, None])
def test_bad_classes_are_refused(classes: int) -> None:
    for make in (lambda: paper_cnn((1, 8, 8), classes), lambda: paper_mlp(5, classes)):
        with pytest.raises(ConfigError, match="classes"):
            make()


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_bad_dropout_is_refused(dropout: float) -> None:
    with pytest.raises(ConfigError, match="dropout"):
        paper_cnn((1, 8, 8), 10, dropout=dropout)


def test_other_refusals() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown activation 'rleu'\. Did you mean 'relu'"):
        paper_cnn((1, 8, 8), 10, activation="rleu")
    with pytest.raises(ConfigError, match="input features"):
        paper_mlp(0, 10)
    with pytest.raises(UnknownNameError, match=r"unknown model 'paper_cnn'\. Did you mean 'paper-cnn'"):
        build("paper_cnn", CATALOGUE["digits"])
    with pytest.raises(ConfigError, match="takes tabular data, and this data set is image"):
        build("paper-mlp", CATALOGUE["digits"])
    with pytest.raises(ConfigError, match="takes image data"):
        build("paper-cnn", CATALOGUE["location"])
    with pytest.raises(ConfigError, match="paper-mlp has no dropout"):
        build("auto", CATALOGUE["location"], dropout=0.5)
    with pytest.raises(ConfigError, match="linear has no choice of activation"):
        build("linear", CATALOGUE["location"], activation="tanh")
    with pytest.raises(ConfigError, match=r"takes feature map data, and this data set is image .* or give features"):
        build("scatter-cnn", CATALOGUE["digits"])
    with pytest.raises(ConfigError, match="takes image data, and scattering features are feature maps"):
        build("paper-cnn", CATALOGUE["digits"], features="scattering")
    with pytest.raises(ConfigError, match=r"activation 'relu' is not bounded.*Give tanh or sigmoid"):
        build("tempered-cnn", CATALOGUE["digits"])


# ---- what is accurate at a proved epsilon


def test_a_linear_layer_starts_from_zero_and_takes_anything() -> None:
    for name in ("mnist", "location"):
        model = build("linear", CATALOGUE[name])
        assert [list(p.shape) for p in model.parameters()] == [
            [CATALOGUE[name].classes, math.prod(CATALOGUE[name].input_shape)],
            [CATALOGUE[name].classes],
        ]
        assert not any(p.any() for p in model.parameters())
        assert model(torch.rand(3, *CATALOGUE[name].input_shape)).shape == (3, CATALOGUE[name].classes)


@pytest.mark.parametrize("network", [scatter_cnn, tempered_cnn])
@pytest.mark.parametrize("shape", [(81, 7, 7), (243, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_convolutional_networks_have_biases_of_zero_and_treat_each_example_alone(network, shape) -> None:
    model = network(shape, 10)
    for name, p in model.named_parameters():
        if "norm" not in name:
            assert p.any() != name.endswith("bias")
    x = torch.rand(4, *shape)
    together = model(x)
    assert together.shape == (4, 10)
    assert torch.allclose(together[:1], model(x[:1]), atol=1e-5)


@pytest.mark.parametrize("name", [n for n in KINDS if "feature map" in KINDS[n]])
def test_features_come_first_and_what_is_trained_keeps_its_names(name: str) -> None:
    made = {"activation": "tanh"} if name != "linear" else {}
    model = build(name, CATALOGUE["digits"], features="scattering", **made)
    assert next(iter(dict(model.named_children()))) == "features"
    head = trained_part(model)
    assert head.state_dict().keys() == model.state_dict().keys()
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(model(x), head(model.features(x)))
    assert str(trained_part(head)) == str(head)


def test_auto_on_features_is_a_linear_layer() -> None:
    model = build("auto", CATALOGUE["digits"], features="scattering")
    assert [n for n, _ in model.named_children()] == ["features", "flatten", "linear"]


@pytest.mark.parametrize(("network", "least"), [(scatter_cnn, 2), (tempered_cnn, 4)])
def test_the_refusals_of_convolutional_networks(network, least) -> None:
    assert network((3, least, least), 5)(torch.rand(2, 3, least, least)).shape == (2, 5)
    with pytest.raises(ConfigError, match=f"at least {least}x{least}"):
        network((3, least - 1, 8), 5)
    with pytest.raises(UnknownNameError, match="activation"):
        network((3, 8, 8), 5, activation="tan")
    for make in (lambda: network((3, 8, 8), 1), lambda: linear((3, 8, 8), 1)):
        with pytest.raises(ConfigError, match="classes"):
            make()
