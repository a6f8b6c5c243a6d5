"""scikit-learn's 8x8 digits: installed with gradveil, so it works without a network and without files."""

from __future__ import annotations

import numpy as np

from gradveil.training.data._dataset import Parts
from gradveil.training.data._split import SEED, stratified


def read() -> Parts:
    """1797 images with values 0 .. 16, split 3:1 in every class."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = raw.images.astype(np.uint8)[:, None, :, :]
    y = raw.target.astype(np.int64)
    train, test = stratified(y, 0.25)
    note = (
        "scikit-learn's handwritten digits, 8x8, values divided by 16; "
        f"split 3:1 here, stratified by class, seed {SEED}: {len(train)} train, {len(test)} test."
    )
    return Parts(x[train], y[train], x[test], y[test], classes=10, scale=16, note=note)
