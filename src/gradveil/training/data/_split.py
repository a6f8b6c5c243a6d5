"""Train/test splits for sets published without one. A seed and the labels determine the split for good.

The shuffles use ``RandomState``, whose stream numpy has frozen (NEP 19); ``Generator`` may change its own
between versions, and a split must not change under a published result.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SEED = 20_210_917

Indices = npt.NDArray[np.int64]


def shuffled(count: int, test: int, *, seed: int = SEED) -> tuple[Indices, Indices]:
    """Indices of a random split of ``count`` examples, ``test`` of them for testing."""
    order = np.random.RandomState(seed).permutation(count).astype(np.int64)
    return order[test:], order[:test]


def stratified(labels: Indices, test_share: float, *, seed: int = SEED) -> tuple[Indices, Indices]:
    """Indices of a split that takes the same share of every class, as near as whole examples allow.

    The test part has ceil(n * test_share) examples in all; what rounding leaves over goes to the classes
    with the largest remainders, the first of them on a tie. Both parts come out shuffled.

    >>> train, test = stratified(np.repeat(np.arange(3), 8), 0.25)
    >>> len(train), sorted(np.repeat(np.arange(3), 8)[test].tolist())
    (18, [0, 0, 1, 1, 2, 2])
    """
    random = np.random.RandomState(seed)
    classes, counts = np.unique(labels, return_counts=True)
    wanted = counts * test_share
    take = np.floor(wanted).astype(np.int64)
    left_over = int(np.ceil(len(labels) * test_share)) - int(take.sum())
    take[np.argsort(take - wanted, kind="stable")[:left_over]] += 1

    train, test = [], []
    for label, count in zip(classes, take, strict=True):
        members = random.permutation(np.flatnonzero(labels == label))
        test.append(members[:count])
        train.append(members[count:])
    return random.permutation(np.concatenate(train)), random.permutation(np.concatenate(test))
