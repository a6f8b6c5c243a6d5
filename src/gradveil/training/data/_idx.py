"""The idx format of MNIST and Fashion-MNIST, plain or gzipped.

A file is: two zero bytes, a type (8 = unsigned byte), the number of dimensions, each dimension as four
big-endian bytes, then exactly the product of the dimensions in bytes. The header states how many images
there are, so a file with fewer than the published 60000 is not an error here: a truncated one is.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from gradveil.training.data._dataset import Parts
from gradveil.training.data._description import Description
from gradveil.training.data._files import damaged, locate

SIDE = 28
CLASSES = 10
_CHUNK = 1 << 20


def read(description: Description, data_dir: str | os.PathLike[str] | None) -> Parts:
    """The published training and test parts."""
    train_images, train_labels, test_images, test_labels = locate(description, data_dir)
    x_train, y_train = _pair(train_images, train_labels)
    x_test, y_test = _pair(test_images, test_labels)
    note = f"{description.title}; the published split: {len(x_train)} train, {len(x_test)} test."
    return Parts(x_train, y_train, x_test, y_test, classes=CLASSES, scale=255, note=note)


def _pair(images: Path, labels: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    x = read_idx(images, dimensions=3)
    if x.shape[1:] != (SIDE, SIDE):
        raise damaged(
            images, f"holds images of {x.shape[1]}x{x.shape[2]}, not {SIDE}x{SIDE}", "It is another data set."
        )
    y = read_idx(labels, dimensions=1)
    if len(x) != len(y):
        raise damaged(
            labels,
            f"holds {len(y)} labels, but {images.name} holds {len(x)} images",
            "Every image needs its label, so the two files are not from one set.",
        )
    if int(y.max()) >= CLASSES:
        where = int(np.argmax(y >= CLASSES))
        raise damaged(labels, f"label {y[where]} at position {where} is not in 0..{CLASSES - 1}", "It is not a class.")
    return x[:, None, :, :], y.astype(np.int64)


def read_idx(path: Path, *, dimensions: int) -> npt.NDArray[np.uint8]:
    """One idx file of unsigned bytes with ``dimensions`` dimensions, checked to its last byte."""
    try:
        with _open(path) as file:
            return _parse(path, file, dimensions)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, f"is not a whole gzip file ({error})", "It was cut short or altered.") from None


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _parse(path: Path, file: BinaryIO, dimensions: int) -> npt.NDArray[np.uint8]:
    magic = bytes([0, 0, 8, dimensions])
    head = file.read(4)
    if head != magic:
        hint = " It is still gzipped: its name must end in .gz." if head[:2] == b"\x1f\x8b" else ""
        raise damaged(
            path,
            f"starts with {head.hex(' ') or 'nothing'}, not {magic.hex(' ')}",
            f"That is not an idx file of unsigned bytes in {dimensions} dimension(s).{hint}",
        )
    sizes = file.read(4 * dimensions)
    if len(sizes) != 4 * dimensions:
        raise damaged(path, f"ends after {4 + len(sizes)} bytes, inside its header", "It is truncated.")
    shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
    if 0 in shape:
        raise damaged(path, f"states the dimensions {shape}", "It holds nothing.")
    expected = math.prod(shape)
    data = _at_most(file, expected + 1)
    if len(data) != expected:
        state = "truncated" if len(data) < expected else "followed by other bytes"
        held = f"only {len(data)}" if len(data) < expected else "more"
        raise damaged(
            path,
            f"states the dimensions {shape}, {expected} bytes, and holds {held}",
            f"The data are {state}.",
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _at_most(file: BinaryIO, limit: int) -> bytearray:
    """Up to ``limit`` bytes, in pieces: a header that lies must not make us allocate what it claims."""
    data = bytearray()
    while len(data) < limit:
        piece = file.read(min(_CHUNK, limit - len(data)))
        if not piece:
            break
        data += piece
    return data
