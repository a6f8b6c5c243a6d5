from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradveil.data import CATALOGUE, load
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.models import ACTIVATIONS, build, paper_cnn, paper_mlp


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
    with pytest.raises(ConfigError, match="no dropout and ReLU only"):
        build("auto", CATALOGUE["location"], dropout=0.5)
