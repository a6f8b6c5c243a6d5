from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from gradveil.training.data import CATALOGUE, load
from gradveil.training.data._split import shuffled, stratified


def test_digits() -> None:
    digits = load("digits")
    entry = CATALOGUE["digits"]
    assert (len(digits.x_train), len(digits.x_test)) == (entry.train, entry.test) == (1347, 450)
    assert digits.input_shape == entry.input_shape == tuple(digits.x_train.shape[1:])
    assert digits.x_train.dtype == torch.float32
    assert digits.y_train.dtype == torch.int64
    assert digits.x_train.min() == 0
    assert digits.x_train.max() == 1
    assert digits.kind == "image"
    assert "3:1" in digits.note
    assert digits.y_test.unique().tolist() == list(range(10))
    share = digits.y_test.bincount() / (digits.y_test.bincount() + digits.y_train.bincount())
    assert torch.all((share - 0.25).abs() < 0.01)


def test_digits_split_is_fixed_for_good() -> None:
    labels = load("digits").y_train.numpy().astype(np.uint8).tobytes()
    assert hashlib.sha256(labels).hexdigest()[:16] == "22c6ad6ed92f6fad"


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    digits = load("digits")
    mine = torch.cat([digits.x_train, digits.x_test]).flatten(1).numpy() * 16
    theirs = load_digits().data
    assert sorted(map(tuple, mine.tolist())) == sorted(map(tuple, theirs.tolist()))


def test_train_and_test_are_tensor_datasets_over_the_same_memory() -> None:
    digits = load("digits")
    assert isinstance(digits.train, TensorDataset)
    assert len(digits.train) == 1347
    assert len(digits.test) == 450
    assert digits.train.tensors[0] is digits.x_train
    assert digits.test.tensors[1] is digits.y_test


def test_repr_does_not_print_the_data() -> None:
    assert "tensor" not in repr(load("digits"))


@pytest.mark.parametrize(("share", "size"), [(0.25, 756), (0.2, 605)])
def test_stratified_covers_everything_once(share: float, size: int) -> None:
    labels = np.random.default_rng(0).integers(0, 62, 3023)
    train, test = stratified(labels, share)
    assert len(test) == size
    assert sorted(np.concatenate([train, test])) == list(range(3023))
    counts = np.bincount(labels)
    taken = np.bincount(labels[test], minlength=62)
    assert np.all(np.abs(taken - counts * share) <= 1)


def test_splits_are_repeatable_and_shuffled() -> None:
    labels = np.repeat(np.arange(5), 100)
    first, second = stratified(labels, 0.2), stratified(labels, 0.2)
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])
    assert len(np.unique(labels[first[0][:50]])) == 5
    assert not np.array_equal(first[0], stratified(labels, 0.2, seed=1)[0])

    train, test = shuffled(100, 20)
    assert (len(train), len(test)) == (80, 20)
    assert sorted(np.concatenate([train, test])) == list(range(100))
    assert np.array_equal(train, shuffled(100, 20)[0])
