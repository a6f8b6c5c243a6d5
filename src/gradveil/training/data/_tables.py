"""The tables of Shokri et al. (2017): Purchase, whose classes are made by clustering, and Location.

And Retail, which is none of theirs: the market baskets of FIMI in the shape of Purchase, under their own name.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradveil.errors import DataError
from gradveil.training.data._csv import read_bits
from gradveil.training.data._dataset import Parts
from gradveil.training.data._description import Description
from gradveil.training.data._files import damaged, locate
from gradveil.training.data._split import SEED, Indices, shuffled, stratified

LOCATION_ROWS = 5_010  # of the published file: one cut at the end of a line looks whole otherwise
PURCHASE_TEST = 2_000
PURCHASE_TOTAL = 12_000
RETAIL_ROWS = 64_185  # what the rule in the catalogue gives: another number is another set
RETAIL_SECOND = range(20)  # the label that is not used


def read_location(description: Description, data_dir: str | os.PathLike[str] | None) -> Parts:
    """Location: 446 bits, 30 classes written 1 .. 30, split 4:1 within each class."""
    (path,) = locate(description, data_dir)
    classes = description.classes
    x, written = read_bits(path, columns=description.input_shape[0], labels=range(1, classes + 1))
    if len(x) < LOCATION_ROWS:
        why = "A file that was cut short trains on other data than its name says."
        raise damaged(path, f"it has {len(x)} records, the published file {LOCATION_ROWS}", why)
    y = written - 1
    train, test = stratified(y, 0.2)
    if not len(train):
        raise _too_few(path, len(x), "split into a training and a test part")
    note = (
        f"{description.title}, {len(x)} records; no published split: "
        f"4:1 here, stratified by class, seed {SEED}: {len(train)} train, {len(test)} test."
    )
    return Parts(x[train], y[train], x[test], y[test], classes=classes, scale=1, note=note)


def read_purchase(description: Description, data_dir: str | os.PathLike[str] | None) -> Parts:
    """Purchase: 600 bits; the published label is dropped and k-means over all records makes the classes.

    10000 records train and 2000 test, drawn by a fixed seed; a file with fewer than 12000 is split 5:1.
    """
    (path,) = locate(description, data_dir)
    classes = description.classes
    x, _ = read_bits(path, columns=description.input_shape[0], labels=None)
    y = cluster(path, x, classes)
    count = len(x)
    train, test = _drawn(count)
    note = (
        f"{description.title}; classes made by k-means over all {count} records, seed {SEED} "
        f"(the published label is dropped); split by the same seed: {len(train)} train, {len(test)} test."
    )
    return Parts(x[train], y[train], x[test], y[test], classes=classes, scale=1, note=note)


def read_retail(description: Description, data_dir: str | os.PathLike[str] | None) -> Parts:
    """Retail: 600 bits and two labels, the first of them the class; drawn as Purchase is."""
    (path,) = locate(description, data_dir)
    classes = description.classes
    fix = f"Make it again from {description.source}."
    columns = description.input_shape[0]
    x, y = read_bits(path, columns=columns, labels=range(classes), also=(RETAIL_SECOND,), fix=fix)
    count = len(x)
    if count != RETAIL_ROWS:
        why = "A file that was cut short, or made by another rule, trains on other data than its name says."
        raise damaged(path, f"it has {count} records, the whole file {RETAIL_ROWS}", why, fix)
    train, test = _drawn(count)
    note = (
        f"{description.title}. The class is the first label of the file; "
        f"of its {count} records, drawn by seed {SEED}: {len(train)} train, {len(test)} test."
    )
    return Parts(x[train], y[train], x[test], y[test], classes=classes, scale=1, note=note)


def _drawn(count: int) -> tuple[Indices, Indices]:
    """10000 records to train and 2000 to test, by the fixed seed; fewer than 12000 are split 5:1."""
    train, test = shuffled(count, PURCHASE_TEST if count >= PURCHASE_TOTAL else max(1, count // 6))
    return train[: PURCHASE_TOTAL - PURCHASE_TEST], test


def cluster(path: Path, x: npt.NDArray[np.uint8], classes: int) -> npt.NDArray[np.int64]:
    """k-means labels of every row, by a fixed seed; refuses data with fewer distinct rows than classes."""
    from sklearn.cluster import KMeans

    if len(x) < classes:
        raise _too_few(path, len(x), f"clustered into {classes} classes")
    means = KMeans(n_clusters=classes, n_init=1, max_iter=100, random_state=SEED, copy_x=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few distinct points: checked below, and refused
        labels = np.asarray(means.fit_predict(x.astype(np.float32)), np.int64)
    found = len(np.unique(labels))
    if found < classes:
        raise DataError(
            f"{path}: its {len(x)} records fall into {found} clusters, not {classes}. Too many of them are "
            "equal to make that many classes. Use the whole published file."
        )
    return labels


def _too_few(path: Path, count: int, use: str) -> DataError:
    return DataError(f"{path}: {count} record(s) cannot be {use}. Use the whole published file.")
