"""Guesses of many fair bits of one run: how many, what each counts, and how likely so many right ones are.

A guess is right with chance q = e^epsilon / (e^epsilon + 1) at most, if the mechanism is epsilon-differentially private
in each bit: whatever the scores, and whatever the other guesses (Steinke, Nasr & Jagielski 2023, Theorem 5.1). So right
guesses may be counted with weights that follow from the scores, and the weighted count is no larger than that of
independent guesses of chance q. Scores further out are surer: half of the guesses count once, of the half further out
half count about twice, and so on up to about five times. About: were these whole numbers, many ways to be right would
come to the same count, and a test of so coarse a count rejects less often than its level allows.

What delta adds. Let p(k) be the chance of k = (k_1, k_2, ...) right guesses in the classes of one weight, n_c guesses
each, and b(k) the same for independent guesses of chance q. Flip one bit that was guessed rightly: every release stays
as likely but for a factor e^epsilon, and for a probability of delta at most for each of the m bits. Over all of them,

    k_c p(k) <= e^epsilon (n_c - k_c + 1) p(k - e_c) + X_c(k),    with X_c(k) >= 0 and sum_c sum_k X_c(k) <= m delta.

In terms of h = p / b: h(k) <= h(k - e_c) + X_c(k) / (k_c b(k)). Now P[count >= v] = E_b[g h] = P_b[count >= v] +
Cov_b(g, h), where g(k) is 1 where the count is v or more, and 0 elsewhere. By the law of total covariance this is a sum
over c of the covariances that are due to class c alone, the classes before it averaged and those after it given. There
g is an increasing function g_c of k_c, and

    Cov(g_c, h_c) = sum_j (h_c(j) - h_c(j - 1)) Cov(g_c, 1[k_c >= j])   with   Cov(g_c, 1[k_c >= j]) >= 0,

so that no more than m delta max Cov(g_c, 1[k_c >= j]) / (j b_c(j)) is added in all, the maximum over c, j and where g
rises. For a single guess that is (1 - q) delta, which some mechanisms reach. It does not depend on v. Nor need the
number of guesses be fixed, as long as the scores alone decide it and not the bits: take the largest such term of all
numbers that could have been, and the argument holds for them together. Theorem 5.2 of Steinke et al., for guesses that
all count once, adds 2 m delta max_i P_b[v - i <= count < v] / i instead: several times as much, but less where m delta
is large and v far out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve
from scipy.special import expit, ndtr
from scipy.stats import beta as beta_distribution
from scipy.stats import binom

Array = NDArray[np.float64]
Coins = NDArray[np.bool_]
Whole = NDArray[np.int64]
Classes = tuple[tuple[int, int], ...]  # (weight, number of guesses that have it), by weight

# The shares of the bits that may be guessed. Not all: as many are called present as absent, and that all coins fall so
# evenly is unlikely.
SHARES = (0.03, 0.06, 0.12, 0.25, 0.5, 0.9)
WEIGHTS = (10, 21, 31, 42, 52)  # what guesses count, from the inner half outwards; WEIGHTS[0] is once
_STEP = 0.05  # of epsilon, at which what delta adds is computed
_CELLS = 200_000  # of a table: where g may rise, by how many guesses are right
_FEW = 50  # places where g may rise: with room for fewer, a bound that needs no table
_LEAST_APART = 0.5  # standard deviations: closer than this, scores do not show how far they are apart


def guesses_each(bits: int, share: float) -> int:
    """How many bits are called present, and as many absent."""
    return min(max(1, round(share * bits / 2)), bits // 2)


def weights(each: int) -> Whole:
    """What the guesses on one side count, from the outermost inwards: 42 31 21 21 10 10 10 10, say."""
    limits = each // 2 ** np.arange(len(WEIGHTS))
    counts: Whole = np.array(WEIGHTS)[(np.arange(1, each + 1)[:, None] <= limits).sum(1) - 1]
    return counts


def classes(each: int) -> Classes:
    """How many guesses, on both sides together, have each weight."""
    kinds, sizes = np.unique(weights(each), return_counts=True)
    return tuple((int(kind), 2 * int(size)) for kind, size in zip(kinds, sizes, strict=True))


@dataclass(frozen=True)
class Guesses:
    """``made`` guesses about ``bits`` bits, ``right`` of them right; ``count`` is what these weigh."""

    bits: int
    made: int
    right: int
    count: int

    @property
    def classes(self) -> Classes:
        return classes(self.made // 2)

    @property
    def alike(self) -> tuple[Classes, int]:
        """Classes and count of the same guesses, each counted once."""
        return ((1, self.made),), self.right


def guess(scores: Array, present: Coins, share: float) -> Guesses:
    """Call the highest scores present and the lowest absent, as many of one as of the other."""
    each = guesses_each(len(scores), share)
    order = np.argsort(scores, kind="stable")
    right = present[order[::-1][:each]].astype(np.int64) + ~present[order[:each]]
    return Guesses(len(scores), 2 * each, int(right.sum()), int(right @ weights(each)))


# ---- the chance of so many right guesses


def _law(law: Array, weight: int, size: int, chance: float) -> Array:
    """The law of a count, and of ``size`` guesses of this weight beside it."""
    spread = np.zeros(weight * size + 1)
    spread[::weight] = binom.pmf(np.arange(size + 1), size, chance)
    return fftconvolve(law, spread) if min(len(law), len(spread)) > 500 else np.convolve(law, spread)


def _class_spare(before: Array, weight: int, size: int, chance: float) -> float:
    """max Cov(g, 1[k >= j]) / (j b_j) over j and x, where g(k) = P[W >= x - weight k], and W has the law ``before``."""
    j = np.arange(1, size + 1)
    # Whatever g is, if it increases from 0 to 1: Cov(g, 1[k >= j]) <= P[k >= j] P[k < j].
    log_most = binom.logsf(j - 1, size, chance) + binom.logcdf(j - 1, size, chance)
    ratios: Array = np.exp(log_most - np.log(j) - binom.logpmf(j, size, chance))
    last = len(before) + weight * size
    mean = float(before @ np.arange(len(before)))
    std = float(np.sqrt(before @ (np.arange(len(before)) - mean) ** 2 + weight**2 * size * chance * (1 - chance)))
    places = _CELLS // size
    middle = mean + weight * size * chance + 8.0 * std * np.linspace(-1.0, 1.0, places)
    x = np.unique(np.clip(np.round([1.0, *middle, last - 1.0]), 1, last - 1)).astype(np.int64)
    if last <= places:
        x = np.arange(1, last)
    if places >= _FEW:
        k = np.arange(size + 1)
        b = binom.pmf(k, size, chance)
        at_least = np.append(before[::-1].cumsum()[::-1], 0.0)
        g = at_least[np.clip(x[:, None] - weight * k, 0, len(before))]
        above = (g * b)[:, ::-1].cumsum(1)[:, ::-1]
        mean_g, at_least_j = above[:, :1], b[::-1].cumsum()[::-1]
        if len(x) == last - 1:
            most = (above - mean_g * at_least_j).max(0)[1:]
        else:
            # All sums fall with x, so between two points each is bounded by its value at one of them: in
            # Cov(g, 1[k >= j]), and in Cov(1 - g, 1[k < j]), which is the same.
            one = above[:-1] - mean_g[1:] * at_least_j
            other = (1 - at_least_j) - (mean_g - above)[1:] - (1 - at_least_j) * (1 - mean_g[:-1])
            most = np.minimum(one, other).max(0)[1:]
        seen = b[1:] > 1e-9  # elsewhere the difference of two sums is lost in rounding
        ratios[seen] = np.minimum(ratios[seen], most[seen] / (j * b[1:])[seen])
    return float(ratios.max())


@lru_cache(maxsize=4096)
def _spare(counted: Classes, epsilon: float) -> float:
    chance, law, most = float(expit(epsilon)), np.ones(1), 0.0
    for weight, size in counted:
        most = max(most, _class_spare(law, weight, size, chance))
        law = _law(law, weight, size, chance)
    return most


def spare(counted: Sequence[Classes], epsilon: float) -> float:
    """What delta adds to the chance of any count, for every bit and unit of delta: the most of all ``counted``.

    It falls with epsilon, and is taken at the next smaller multiple of 0.05, from above.
    """
    return max(_spare(each, _STEP * int(epsilon / _STEP)) for each in counted)


def smallest_with_spare(counted: Sequence[Classes], at_most: float) -> float:
    """The smallest multiple of 0.05 at which :func:`spare` is at most that; 20 if it is at none below."""
    steps = range(int(20 / _STEP))
    return _STEP * bisect_left(steps, True, key=lambda n: spare(counted, _STEP * (n + 0.5)) <= at_most)


def one_run_p_value(
    bits: int, counted: Classes, count: int, epsilon: float, delta: float, others: Sequence[Classes] = ()
) -> float:
    """The chance of so large a count, or a larger one, is at most this under (epsilon, delta)-differential privacy.

    bits     all of them, guessed or not
    counted  how many guesses are made of each weight
    others   the same for all numbers of guesses that other scores would have led to

    Where their number is fixed and all count once, delta adds the lesser of what is said above and of Theorem 5.2.
    """
    law = np.ones(1)
    for weight, size in counted:
        law = _law(law, weight, size, float(expit(epsilon)))
    law = np.clip(law, 0.0, None)
    p_value = float(law[count:].sum())
    if delta > 0 and count > 0:
        added = spare((counted, *others), epsilon)
        if not others and [weight for weight, _ in counted] == [1]:
            i = np.arange(1, count + 1)
            below = np.append(0.0, law.cumsum())
            added = min(added, 2.0 * float(np.max((below[count] - below[count - i]) / i)))
        p_value += bits * delta * added
    return min(1.0, p_value)


# ---- how many guesses, from the scores alone


def _mixture_quantiles(apart: float, levels: Array) -> Array:
    """Quantiles of N(0, 1) or N(apart, 1), whichever a fair coin says."""
    grid = np.linspace(-6.0, apart + 6.0, 4001)
    return np.interp(levels, (ndtr(grid) + ndtr(grid - apart)) / 2, grid)


def _breadth(quantiles: Array) -> float:
    """How far the middle half reaches, of the middle nine tenths: more where there are two humps."""
    low, lower, upper, high = quantiles
    return float((upper - lower) / (high - low)) if high > low else 0.0


_LEVELS = np.array([0.05, 0.25, 0.75, 0.95])
_APART = np.concatenate([np.arange(_LEAST_APART, 8.0, 0.25), 2.0 ** np.arange(3, 8)])
_BREADTH = np.array([_breadth(_mixture_quantiles(float(apart), _LEVELS)) for apart in _APART])


def planned_share(scores: Array, level: float, shares: Sequence[float] = SHARES) -> float:
    """The share of the bits that promises the largest bound, were the scores two Gaussians of one scale.

    How far apart these would be is read off the shape of all scores together. The bits are not looked at, so the choice
    is no test; where the scores are nothing like that, it is a poor choice and as sound as any.
    """
    bits = len(scores)
    apart = float(np.interp(_breadth(np.quantile(scores, _LEVELS)), _BREADTH, _APART))
    highest = _mixture_quantiles(apart, 1.0 - (np.arange(bits // 2) + 0.5) / bits)
    chances = expit(apart * (highest - apart / 2))
    promised = []
    for share in shares:
        each = guesses_each(bits, share)
        counts = weights(each)
        made = 2 * counts.sum() ** 2 / (counts @ counts)  # as many guesses of equal weight tell as much
        right = made * float(counts @ chances[:each]) / counts.sum()
        promised.append(beta_distribution.ppf(level, right, made - right + 1.0))
    return shares[int(np.argmax(promised))]
