"""How often guessing succeeds: kappa, from which the limit for every attack follows.

A limit for every attack needs the success of the best guess there is: an estimate of that from below would prove too
much. So guesses are made as somebody would who wants to be right most often: single examples, the mean and the class
means (which is what map returns without a gradient), centroids (k-means) of several sizes, and the best of these moved
to the middle of the examples for which it succeeds. The best on one half of the examples are judged on the other; kappa
is the upper confidence limit (Clopper and Pearson) on the success of the best of them, for all of them at once.

Legend: n examples, m guesses, D numbers of an input.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from scipy.cluster.vq import kmeans2
from scipy.stats import beta
from torch import Tensor

from gradveil.attacks.scoring.evaluate import best_guess, fewest_wrong
from gradveil.attacks.scoring.metrics import is_binary
from gradveil.attacks.scoring.scores import MARGIN_DB, MARGIN_WRONG

_CONFIDENCE = 0.95
_FINALISTS = 10  # guesses that are judged on the second half
_CENTROIDS = (10, 30, 100)
_MOVES = 5  # of a guess towards the examples for which it succeeds
_MOST_HITS = 20  # guesses that are moved


def guessing_chance(
    x: Tensor, y: Tensor | None, mean_image: Tensor, *, batch: int = 1, also: Tensor | None = None, exact: bool = False
) -> float:
    """An upper confidence limit of 95 % on the success of the best guess for examples like x (n, *shape).

    y       their classes, where they are known
    batch   so many guesses are made at once, and each example is held against the one that fits
    also    other guesses (m, *shape), such as an attack's own output without a gradient
    exact   x are all the examples there are, alike likely: the best guess found is counted on them
    """
    half = len(x) if exact else len(x) // 2
    first, second = x[:half], x[:half] if exact else x[half:]
    guesses = _guesses(first, None if y is None else y[:half], mean_image)
    if also is not None:
        guesses = torch.cat([guesses, also.to(guesses)])
    shares = successes(guesses, first, mean_image).double().mean(1)
    moved = [_moved(guesses[i], first, mean_image) for i in shares.argsort(descending=True)[:_MOST_HITS].tolist()]
    guesses = torch.cat([guesses, torch.stack(moved)])
    table = successes(guesses, first, mean_image)
    if batch == 1:
        finalists = guesses[table.double().mean(1).argsort(descending=True)[:_FINALISTS]]
        hits, judged = int(successes(finalists, second, mean_image).sum(1).max()), len(finalists)
    else:
        hits, judged = int(successes(guesses[_cover(table, batch)], second, mean_image).any(0).sum()), 1
    if exact:
        return max(hits, 1) / len(second)
    return upper_limit(hits, len(second), 1.0 - (1.0 - _CONFIDENCE) / judged)


def _cover(table: Tensor, count: int) -> list[int]:
    """Guesses that together succeed for most examples, one after the other, of a table (m, n)."""
    left, found = torch.ones_like(table[0]), []
    for _ in range(min(count, len(table))):
        found.append(int((table & left).sum(1).argmax()))
        left = left & ~table[found[-1]]
    return found


def upper_limit(hits: int, trials: int, confidence: float) -> float:
    """The one-sided limit of Clopper and Pearson on a probability, after so many hits.

    >>> round(upper_limit(0, 300, 0.95), 4)
    0.0099
    """
    return 1.0 if hits >= trials else float(beta.ppf(confidence, hits + 1, trials - hits))


def successes(guesses: Tensor, truths: Tensor, mean_image: Tensor) -> Tensor:
    """For which examples (n, *shape) each guess (m, *shape) is a success, by the margin of scores.py: (m, n)."""
    flat = truths.flatten(1)
    if is_binary(truths.unsqueeze(1)):
        needed = fewest_wrong(truths.unsqueeze(1), mean_image)[:, 0]
        wrong = torch.cdist((guesses.flatten(1) > 0.5).to(flat), flat, p=1.0).round()
        return MARGIN_WRONG * wrong <= needed
    needed = best_guess(truths.unsqueeze(1), mean_image)[:, 0] + MARGIN_DB
    error = torch.cdist(guesses.flatten(1).clamp(0.0, 1.0), flat).square() / flat.shape[1]
    return -10.0 * torch.log10(error.clamp(min=1e-12)) >= needed


def _guesses(x: Tensor, y: Tensor | None, mean_image: Tensor) -> Tensor:
    found = [x, mean_image.to(x).unsqueeze(0), torch.zeros_like(x[:1]), torch.ones_like(x[:1])]
    if y is not None:
        found += [x[y == c].mean(0, keepdim=True) for c in y.unique().tolist()]
    flat = np.unique(x.flatten(1).double().cpu().numpy(), axis=0)
    for count in _CENTROIDS:
        if 2 * count <= len(flat):
            with warnings.catch_warnings():  # a centroid that ends without examples is one guess less
                warnings.simplefilter("ignore")
                centroids = kmeans2(flat, count, minit="++", seed=np.random.default_rng(count))[0]
            found.append(torch.as_tensor(centroids).to(x).view(-1, *x.shape[1:]))
    return torch.cat(found)


def _moved(guess: Tensor, x: Tensor, mean_image: Tensor) -> Tensor:
    """The best of a guess and the means of those examples for which the one before succeeds."""
    best, most = guess, -1
    for _ in range(_MOVES):
        hits = successes(guess.unsqueeze(0), x, mean_image)[0]
        if int(hits.sum()) <= most:
            break
        best, most = guess, int(hits.sum())
        if not most:
            break
        guess = x[hits].mean(0)
    return best
