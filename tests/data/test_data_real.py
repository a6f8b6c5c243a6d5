"""The published files themselves, where they are at hand."""

from __future__ import annotations

import os

import pytest
import torch

from gradveil.training.data import CATALOGUE, DataSet, load

pytestmark = pytest.mark.realdata


def real(name: str) -> DataSet:
    if not os.environ.get("GRADVEIL_DATA"):
        pytest.skip("GRADVEIL_DATA is not set: no real data here")
    if not CATALOGUE[name].available():
        pytest.skip(f"{name} is not in the GRADVEIL_DATA directory")
    data = load(name)
    entry = CATALOGUE[name]
    assert (data.classes, data.input_shape, data.kind) == (entry.classes, entry.input_shape, entry.kind)
    assert (len(data.x_train), len(data.x_test)) == (entry.train, entry.test)
    assert data.x_train.dtype == torch.float32
    assert data.x_train.min() == 0
    assert data.x_train.max() == 1
    assert data.y_train.unique().tolist() == list(range(entry.classes))
    return data


@pytest.mark.parametrize(("name", "mean", "std"), [("mnist", 0.1307, 0.3081), ("fashion-mnist", 0.2860, 0.3530)])
def test_idx_sets(name: str, mean: float, std: float) -> None:
    data = real(name)
    assert data.x_train.double().mean().item() == pytest.approx(mean, abs=5e-5)
    assert data.x_train.double().std().item() == pytest.approx(std, abs=5e-5)


def test_mnist_starts_with_a_five() -> None:
    assert real("mnist").y_train[:5].tolist() == [5, 0, 4, 1, 9]


def test_cifar10() -> None:
    means = real("cifar10").x_train.double().mean((0, 2, 3))
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)


def test_lfw() -> None:
    data = real("lfw")
    assert (len(data.x_train), len(data.x_test), data.classes) == (2267, 756, 62)
    assert data.y_test.bincount().min() >= 5


def test_location() -> None:
    data = real("location")
    assert len(data.x_train) + len(data.x_test) == 5010
    assert data.x_train.shape[1] == 446
    assert set(data.x_train.unique().tolist()) == {0.0, 1.0}


def test_retail() -> None:
    data = real("retail-10")
    assert (data.x_train.shape, data.x_test.shape) == ((10_000, 600), (2_000, 600))
    assert set(data.x_train.unique().tolist()) == {0.0, 1.0}
    assert torch.cat([data.x_train, data.x_test]).sum(1).min() == 3  # the rule of the file: three items or more
    assert data.y_test.unique().tolist() == list(range(10))
    assert "of its 64185 records" in data.note


@pytest.mark.parametrize("name", ["purchase-10", "purchase-50"])
def test_purchase(name: str) -> None:
    real(name)
