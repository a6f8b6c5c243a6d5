from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from datafiles import idx_bytes, write_idx_set

from gradveil.errors import DataError
from gradveil.training.data import load

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize("gz", [True, False])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion-mnist", "fashion_mnist")])
def test_reads_what_was_written(name: str, folder: str, gz: bool, tmp_path: Path) -> None:
    arrays = write_idx_set(tmp_path / folder, gz=gz)
    data = load(name, data_dir=tmp_path)
    assert data.x_train.shape == (30, 1, 28, 28)
    assert data.x_test.shape == (20, 1, 28, 28)
    assert data.x_train.dtype == torch.float32
    assert data.y_test.dtype == torch.int64
    assert (data.classes, data.input_shape, data.kind, data.name) == (10, (1, 28, 28), "image", name)
    assert "30 train, 20 test" in data.note
    expected = torch.tensor(arrays["t10k-images-idx3-ubyte"]).float().div(255)
    assert torch.equal(data.x_test[:, 0], expected)
    assert data.y_train.tolist() == arrays[LABELS].tolist()


def test_environment_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx_set(tmp_path / "mnist")
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
    assert len(load("mnist").x_train) == 30


def refused(tmp_path: Path, stem: str, data: bytes) -> str:
    """The message when ``stem`` of a plain set holds ``data``; it must name the file and the fix."""
    write_idx_set(tmp_path / "mnist", gz=False)
    path = tmp_path / "mnist" / stem
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        load("mnist", data_dir=tmp_path)
    message = str(caught.value)
    assert str(path) in message
    assert "Replace it with a fresh copy" in message
    return message


GOOD = np.zeros((30, 28, 28), np.uint8)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (b"", "starts with nothing, not 00 00 08 03"),
        (b"\x89PNG\r\n", "starts with 89 50 4e 47"),
        (idx_bytes(np.zeros(30)), "starts with 00 00 08 01"),
        (b"\x00\x00\x0d\x03" + idx_bytes(GOOD)[4:], "starts with 00 00 0d 03"),
        (idx_bytes(GOOD)[:9], "ends after 9 bytes, inside its header"),
        (idx_bytes(np.zeros((30, 32, 32))), "holds images of 32x32, not 28x28"),
        (idx_bytes(np.zeros((0, 28, 28))), "states the dimensions (0, 28, 28)"),
        (idx_bytes(GOOD)[:-1], "23520 bytes, and holds only 23519"),
        (idx_bytes(GOOD) + b"\0", "23520 bytes, and holds more"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "holds only 0"),
        (gzip.compress(idx_bytes(GOOD), mtime=0), "still gzipped"),
    ],
)
def test_bad_image_file(data: bytes, fact: str, tmp_path: Path) -> None:
    assert fact in refused(tmp_path, IMAGES, data)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (idx_bytes(np.zeros(29)), "holds 29 labels, but train-images-idx3-ubyte holds 30 images"),
        (idx_bytes(np.r_[np.zeros(7), 10, np.zeros(22)]), "label 10 at position 7 is not in 0..9"),
        (idx_bytes(GOOD), "starts with 00 00 08 03, not 00 00 08 01"),
        (idx_bytes(np.zeros(30))[:-3], "holds only 27"),
    ],
)
def test_bad_label_file(data: bytes, fact: str, tmp_path: Path) -> None:
    assert fact in refused(tmp_path, LABELS, data)


WHOLE = gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, (30, 28, 28), np.uint8)), mtime=0)


@pytest.mark.parametrize(
    "data",
    [
        WHOLE[: len(WHOLE) // 2],
        WHOLE[:-3],
        WHOLE[:4000] + bytes(64) + WHOLE[4064:],
        WHOLE[:-8] + b"\0\0\0\0" + WHOLE[-4:],
        idx_bytes(GOOD),
        b"",
    ],
    ids=["cut in half", "cut in its trailer", "overwritten inside", "wrong crc", "not gzipped", "empty"],
)
def test_corrupt_gzip(data: bytes, tmp_path: Path) -> None:
    write_idx_set(tmp_path / "mnist")
    path = tmp_path / "mnist" / f"{IMAGES}.gz"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        load("mnist", data_dir=tmp_path)
    assert str(path) in str(caught.value)


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    write_idx_set(tmp_path / "mnist")
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte or .*t10k-labels-idx1-ubyte.gz does not exist"):
        load("mnist", data_dir=tmp_path)
