"""The binary version of CIFAR-10: rows of one label byte and 3072 pixel bytes (red, green, blue planes).

The files have no header, so only the number of rows, which is fixed, shows that one was cut at a row.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradveil.training.data._dataset import Parts
from gradveil.training.data._description import Description
from gradveil.training.data._files import damaged, locate

SHAPE = (3, 32, 32)
ROW = 1 + 3 * 32 * 32
ROWS = 10_000
CLASSES = 10


def read(description: Description, data_dir: str | os.PathLike[str] | None) -> Parts:
    """The published training part (five files) and test part (one file)."""
    batches = [read_batch(path) for path in locate(description, data_dir)]
    train, test = np.concatenate(batches[:-1]), batches[-1]
    note = f"{description.title}; the published split: {len(train)} train, {len(test)} test."
    x_train, y_train = _columns(train)
    x_test, y_test = _columns(test)
    return Parts(x_train, y_train, x_test, y_test, classes=CLASSES, scale=255, note=note)


def _columns(rows: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    return rows[:, 1:].reshape(-1, *SHAPE), rows[:, 0].astype(np.int64)


def read_batch(path: Path) -> npt.NDArray[np.uint8]:
    """The rows of one file, label first."""
    data = np.fromfile(path, np.uint8)
    if data.size % ROW:
        raise damaged(
            path,
            f"has {data.size} bytes, which is not a multiple of {ROW}",
            "An image takes one label byte and 3072 pixel bytes: it is truncated or not the binary version.",
        )
    rows = data.reshape(-1, ROW)
    if len(rows) != ROWS:
        raise damaged(
            path,
            f"holds {len(rows)} images, not {ROWS}",
            "Every published file holds that many; it is not whole.",
        )
    if int(rows[:, 0].max()) >= CLASSES:
        where = int(np.argmax(rows[:, 0] >= CLASSES))
        raise damaged(
            path,
            f"label {rows[where, 0]} of image {where} is not in 0..{CLASSES - 1}",
            "It is not CIFAR-10 (CIFAR-100 has two label bytes) or it is damaged.",
        )
    return rows
