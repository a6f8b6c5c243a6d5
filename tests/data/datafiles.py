"""Small synthetic files in the public formats, for tests."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from PIL import Image

PARTS = (("train", 30), ("t10k", 20))


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + np.ascontiguousarray(array, np.uint8).tobytes()


def write_idx_set(folder: Path, *, gz: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """The four files of an MNIST-like set, 30 training and 20 test images; the arrays by file stem."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, count in PARTS:
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = (np.arange(count) % 10).astype(np.uint8)
    for stem, array in arrays.items():
        data = idx_bytes(array)
        if gz:
            (folder / f"{stem}.gz").write_bytes(gzip.compress(data, 1))
        else:
            (folder / stem).write_bytes(data)
    return arrays


CIFAR_NAMES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


def write_cifar(folder: Path, *, rows: int, seed: int = 0) -> np.ndarray:
    """The six files with ``rows`` images each; returns all rows, label first."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    table = random.integers(0, 256, (6, rows, 3073), np.uint8)
    table[:, :, 0] %= 10
    for name, block in zip(CIFAR_NAMES, table, strict=True):
        (folder / name).write_bytes(block.tobytes())
    return table


def write_faces(folder: Path, people: dict[str, int], *, size: int = 32, seed: int = 0) -> None:
    """``people`` maps a name to how many PNG files its folder gets; a person's pixels are all one colour."""
    random = np.random.default_rng(seed)
    for person, count in people.items():
        (folder / person).mkdir(parents=True, exist_ok=True)
        colour = tuple(int(c) for c in random.integers(0, 256, 3))
        for i in range(1, count + 1):
            Image.new("RGB", (size, size), colour).save(folder / person / f"{person}_{i:04d}.png")


def write_table(path: Path, bits: np.ndarray, labels: np.ndarray, *, quoted: bool = False, end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = '"' if quoted else ""
    lines = [f"{mark}{n}{mark}," + ",".join(map(str, row)) for row, n in zip(bits, labels, strict=True)]
    path.write_bytes((end.join(lines) + end).encode())
