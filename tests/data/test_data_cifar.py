from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datafiles import write_cifar

from gradveil.errors import DataError
from gradveil.training.data import _cifar, load

FOLDER = "cifar10/cifar-10-batches-bin"


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cifar, "ROWS", 4)


@pytest.mark.usefixtures("_small")
def test_reads_what_was_written(tmp_path: Path) -> None:
    table = write_cifar(tmp_path / FOLDER, rows=4)
    data = load("cifar10", data_dir=tmp_path)
    assert data.x_train.shape == (20, 3, 32, 32)
    assert data.x_test.shape == (4, 3, 32, 32)
    assert (data.classes, data.input_shape, data.kind) == (10, (3, 32, 32), "image")
    assert data.y_train.tolist() == table[:5, :, 0].ravel().tolist()
    pixels = torch.tensor(table[1, 2, 1:].reshape(3, 32, 32)).float().div(255)
    assert torch.equal(data.x_train[6], pixels)
    assert data.y_test.tolist() == table[5, :, 0].tolist()


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    write_cifar(tmp_path / FOLDER, rows=4)
    path = tmp_path / FOLDER / name
    whole = path.read_bytes()
    foreign = np.frombuffer(whole, np.uint8).reshape(4, 3073).copy()
    foreign[2, 0] = 10
    for data, fact in (
        (whole[:-1], "has 12291 bytes, which is not a multiple of 3073"),
        (whole + b"\0", "has 12293 bytes"),
        (whole[:-3073], "holds 3 images, not 4"),
        (whole + whole[:3073], "holds 5 images, not 4"),
        (b"", "holds 0 images, not 4"),
        (foreign.tobytes(), r"label 10 of image 2 is not in 0..9"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=fact) as caught:
            load("cifar10", data_dir=tmp_path)
        assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(DataError, match="does not exist") as caught:
        load("cifar10", data_dir=tmp_path)
    assert str(path) in str(caught.value)


def test_a_published_file_has_ten_thousand_rows(tmp_path: Path) -> None:
    write_cifar(tmp_path / FOLDER, rows=2)
    with pytest.raises(DataError, match="holds 2 images, not 10000"):
        load("cifar10", data_dir=tmp_path)
