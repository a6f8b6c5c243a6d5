"""From the trials of an audit to a lower bound on epsilon, with its confidence. No torch.

A trial is one release of a mechanism, made with or without a canary, and a score that an auditor gave it: larger where
the canary looks present. Were the mechanism (epsilon, delta)-differentially private for a small epsilon, no score could
tell the two apart so well. Each bound is the largest epsilon that the trials reject at the stated confidence:

    clopper_pearson   error rates of one threshold; trials of any mechanism (Jagielski, Ullman & Oprea 2020)
    gaussian_family   the same error rates, for a mechanism that is Gaussian noise (Nasr et al. 2023)
    one_run           right guesses of many bits of one run (Steinke, Nasr & Jagielski 2023; see _guesses.py)
    one_run_fdp       the same, for a trade-off curve that is Gaussian (Mahloujifar, Melis & Chaudhuri 2024)

The two that assume a Gaussian are refused where the scale of the noise depends on the data: there they would turn a
wrong assumption into a number. A bound of 0 says that nothing was found, never that there is nothing to find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import beta as beta_distribution

from gradveil.audit._guesses import (
    SHARES,
    WEIGHTS,
    Classes,
    Guesses,
    classes,
    guess,
    guesses_each,
    one_run_p_value,
    planned_share,
    smallest_with_spare,
)
from gradveil.errors import ConfigError

Array = NDArray[np.float64]
Coins = NDArray[np.bool_]
Parts = tuple[Array, Array]

_FIXED_SHARES = (0.02, 0.2, 0.9)  # of the bits that are guessed, where their number does not follow from the scores
_FOR_DELTA = 0.8  # of the level: an epsilon at which delta takes more of it is not tested, a larger one stands for it
_LARGEST_START = 0.5  # where so large an epsilon would be the first to be tested, the number of guesses is fixed
_LARGEST_EPSILON = 100.0
_LARGEST_MU = 40.0
_THRESHOLDS = 400  # at most, among which one is chosen
_ONE_IN = 5  # trials is for choosing the threshold; the others are for judging it
_CAUTION = 10.0  # a threshold is chosen by bounds of a tenth of the level, so that few lucky trials do not decide


@dataclass(frozen=True, kw_only=True)
class Trials:
    """``scores[i]`` is what the auditor made of release i; ``present[i]`` whether the canary was in it."""

    scores: Array
    present: Coins
    statistic: str
    threat_model: str
    scale_is_public: bool  # whether the noise scale is a function of public values only, as the strategy has it

    def __post_init__(self) -> None:
        if self.scores.shape != self.present.shape or self.scores.ndim != 1:
            raise ConfigError(
                f"{self.scores.shape} scores and {self.present.shape} coins: give one of each for every trial."
            )
        if not np.isfinite(self.scores).all():
            raise ConfigError(
                f"{int((~np.isfinite(self.scores)).sum())} of {len(self.scores)} scores are not finite, so they cannot "
                "be ranked: training has diverged. Lower the learning rate."
            )

    def parts(self) -> tuple[Parts, Parts]:
        """(scores without, scores with the canary): of every fifth trial, to choose a threshold, and of the rest."""
        without, with_it = self.scores[~self.present], self.scores[self.present]
        if min(len(without), len(with_it)) < 2:
            raise ConfigError(
                f"{len(without)} trials without the canary and {len(with_it)} with it: a threshold is chosen on some "
                "of them and judged on the others. Make at least two of each."
            )
        chosen = [np.arange(len(scores)) % _ONE_IN == 0 for scores in (without, with_it)]
        return (without[chosen[0]], with_it[chosen[1]]), (without[~chosen[0]], with_it[~chosen[1]])


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Epsilon is at least ``epsilon`` at ``delta``, with ``confidence``, after correction for ``tests`` tests."""

    epsilon: float
    delta: float
    confidence: float
    method: str
    statistic: str
    tests: int
    trials: int
    threat_model: str
    evidence: str  # the counts behind it, in words

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Method = Callable[..., Bound]


def check_confidence(confidence: float) -> float:
    """``confidence`` if it is in (0, 1); otherwise refused."""
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence {confidence!r} is not in (0, 1): no test is never wrong. Give 0.95, say.")
    return confidence


def _level(confidence: float, delta: float, tests: int) -> float:
    """The chance of a wrong rejection that one of ``tests`` tests may have."""
    check_confidence(confidence)
    if not 0 <= delta < 1:
        raise ConfigError(f"delta {delta!r} is not in [0, 1): it is a probability.")
    if tests < 1:
        raise ConfigError(f"tests is {tests!r}. Give the number of tests that share the confidence, at least 1.")
    return (1.0 - confidence) / tests


def _bound(trials: Trials, method: str, evidence: str, *, epsilon: float, tests: int, **level: float) -> Bound:
    return Bound(
        epsilon=float(max(0.0, epsilon)),
        method=method,
        statistic=trials.statistic,
        tests=tests,
        trials=len(trials.scores),
        threat_model=trials.threat_model,
        evidence=evidence,
        **level,
    )


def _largest_rejected(rejects: Callable[[float], float], most: float, start: float = 0.0) -> float:
    """The largest value, up to ``most``, at which ``rejects`` is positive; 0 where it is not at ``start``.

    Rejecting one epsilon rejects every smaller one, so the first change of sign is looked for.
    """
    if rejects(start) <= 0:
        return 0.0
    low, high = start, start + 1.0
    while rejects(high) > 0:
        low, high = high, 2.0 * high
        if high > most:
            return low
    return float(brentq(rejects, low, high, xtol=1e-4)) - 1e-4


# ---- the Gaussian mechanism, in closed form


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The smallest delta at ``epsilon`` of telling N(mu, 1) from N(0, 1)."""
    if mu <= 0:
        return 0.0
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon at ``delta`` of the Gaussian mechanism whose sensitivity is ``mu`` standard deviations.

    >>> round(gaussian_epsilon(1.0, 1e-5), 2), round(gaussian_epsilon(1 / 6, 1e-5), 3)
    (4.38, 0.594)
    """
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    if delta <= 0 or not math.isfinite(mu):
        return math.inf
    high = 1.0
    while gaussian_delta(mu, high) > delta:
        high *= 2.0
        if high > 600.0:  # beyond, e^epsilon is no longer a number
            return math.inf
    return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-12))


def _refuse_scaled_noise(trials: Trials, method: str) -> None:
    if not trials.scale_is_public:
        raise ConfigError(
            f"the {method} bound takes the two outputs to be Gaussians of one scale, and here the noise is scaled to "
            "the data: the number would mean nothing. Use clopper_pearson or one_run, which assume no shape."
        )


# ---- error rates of a threshold


def _at_most(errors: Array, trials: int, level: float) -> Array:
    """Clopper-Pearson: the rate is at most this, but for a chance of ``level``."""
    return np.where(
        errors >= trials, 1.0, beta_distribution.ppf(1.0 - level, errors + 1, np.maximum(trials - errors, 1))
    )


def _errors(without: Array, with_it: Array, thresholds: Array) -> tuple[Array, Array]:
    """False positives and false negatives of calling the canary present above each threshold."""
    positives = len(without) - np.searchsorted(np.sort(without), thresholds, side="right")
    negatives = np.searchsorted(np.sort(with_it), thresholds, side="right")
    return positives.astype(float), negatives.astype(float)


def _rates(without: Array, with_it: Array, thresholds: Array, level: float) -> tuple[Array, Array]:
    """Upper bounds on both error rates, which hold together but for a chance of ``level``."""
    positives, negatives = _errors(without, with_it, thresholds)
    return _at_most(positives, len(without), level / 2), _at_most(negatives, len(with_it), level / 2)


def _judged(trials: Trials, threshold: float, level: float) -> tuple[Array, Array, str]:
    """The bounds on the error rates of one threshold on the trials that did not choose it, and the counts in words."""
    _, (without, with_it) = trials.parts()
    at = np.array([threshold])
    positives, negatives = _errors(without, with_it, at)
    told = (
        f"{positives[0]:.0f} of {len(without)} called present without the canary, "
        f"{negatives[0]:.0f} of {len(with_it)} called absent with it"
    )
    return *_rates(without, with_it, at, level), told


def _rate_epsilon(positive: Array, negative: Array, delta: float) -> Array:
    with np.errstate(divide="ignore"):
        one = np.log(np.maximum(1.0 - delta - negative, 0.0) / positive)
        other = np.log(np.maximum(1.0 - delta - positive, 0.0) / negative)
    return np.maximum(one, other)


def clopper_pearson(trials: Trials, *, delta: float, confidence: float = 0.95, tests: int = 1) -> Bound:
    """From the error rates of a threshold, chosen on a fifth of the trials and judged on the others.

    (epsilon, delta)-differential privacy asks 1 - FNR <= e^epsilon FPR + delta of every test, and the same with the two
    error rates exchanged. Bounds on the rates that hold together bound both.
    """
    level = _level(confidence, delta, tests)
    (without, with_it), _ = trials.parts()
    scores = np.unique(np.concatenate([without, with_it]))
    between = (scores[1:] + scores[:-1]) / 2 if len(scores) > 1 else scores
    if len(between) > _THRESHOLDS:
        between = between[np.linspace(0, len(between) - 1, _THRESHOLDS).round().astype(int)]
    gains = _rate_epsilon(*_rates(without, with_it, between, level / _CAUTION), delta)
    positive, negative, told = _judged(trials, float(between[int(np.argmax(gains))]), level)
    epsilon = float(_rate_epsilon(positive, negative, delta)[0])
    return _bound(trials, "Clopper-Pearson", told, epsilon=epsilon, delta=delta, confidence=confidence, tests=tests)


def gaussian_family(trials: Trials, *, delta: float, confidence: float = 0.95, tests: int = 1) -> Bound:
    """From the error rates of a threshold to the mu of a Gaussian mechanism, and from that to epsilon at ``delta``.

    A test between N(0, 1) and N(mu, 1) has ndtri(1 - FPR) - ndtri(FNR) <= mu, with equality for the best one. Much
    tighter than assuming nothing, for one threshold then speaks for the whole curve; refused where the noise scale
    depends on the data. The threshold is half-way between the medians of a fifth of the trials.
    """
    _refuse_scaled_noise(trials, "Gaussian-family")
    level = _level(confidence, delta, tests)
    (without, with_it), _ = trials.parts()
    positive, negative, told = _judged(trials, float(np.median(without) + np.median(with_it)) / 2, level)
    mu = max(0.0, float((ndtri(1.0 - positive) - ndtri(negative))[0]))
    return _bound(
        trials,
        "Gaussian family",
        f"mu is at least {mu:.3g}: {told}",
        epsilon=gaussian_epsilon(mu, delta),
        delta=delta,
        confidence=confidence,
        tests=tests,
    )


# ---- guesses of many bits of one run


def _best_share(
    trials: Trials,
    method: str,
    epsilon_of: Callable[[Guesses, float], float],
    told: Callable[[Guesses], str],
    *,
    delta: float,
    confidence: float,
    tests: int,
    shares: Sequence[float],
) -> Bound:
    """The largest of the bounds at each of ``shares``, each of which is counted as a test."""
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"shares of the bits that are guessed: {tuple(shares)!r}. Give numbers in (0, 1].")
    tests *= len(shares)
    level = _level(confidence, delta, tests)
    found = []
    for share in shares:
        guesses = guess(trials.scores, trials.present, share)
        found.append((epsilon_of(guesses, level) if guesses.made else 0.0, guesses))
    epsilon, best = max(found, key=lambda pair: pair[0])
    return _bound(trials, method, told(best), epsilon=epsilon, delta=delta, confidence=confidence, tests=tests)


def one_run(
    trials: Trials,
    *,
    delta: float,
    confidence: float = 0.95,
    tests: int = 1,
    shares: Sequence[float] | None = None,
) -> Bound:
    """From guesses of many independent fair bits, each of which one release depends on; no assumption on the noise.

    Only the most extreme scores are guessed: half of the guesses are the highest, called present, and half the lowest,
    called absent; the surer ones, further out, count up to about five times. How many are guessed follows from the
    scores, without a look at the bits, so that this is one test. With ``shares`` it is fixed beforehand, and each is a
    test; so it is, at three shares and all guesses counted alike, where delta times the number of bits is large for the
    level.
    """
    bits = len(trials.scores)
    level = _level(confidence, delta, tests)
    might: list[Classes] = []  # what other scores would have led to
    start, alike = 0.0, False
    if shares is None and bits > 1:
        might = [classes(guesses_each(bits, share)) for share in SHARES]
        start = smallest_with_spare(might, _FOR_DELTA * level / (bits * delta)) if delta > 0 else 0.0
        shares = (planned_share(trials.scores, level),)
    if shares is None or start > _LARGEST_START:
        might, start, alike, shares = [], 0.0, True, _FIXED_SHARES

    def counted(guesses: Guesses) -> tuple[Classes, int]:
        return guesses.alike if alike else (guesses.classes, guesses.count)

    def epsilon_of(guesses: Guesses, level: float) -> float:
        return _largest_rejected(
            lambda e: level - one_run_p_value(bits, *counted(guesses), e, delta, others=might),
            _LARGEST_EPSILON,
            start=start,
        )

    def told(guesses: Guesses) -> str:
        kinds, count = counted(guesses)
        once = WEIGHTS[0]
        of = sum(w * n for w, n in kinds) / once
        surer = "" if alike else f" ({count / once:.1f} of {of:.1f}, the surer ones counting more)"
        return f"{guesses.right} of {guesses.made} guesses right{surer}, {guesses.bits} bits"

    return _best_share(
        trials, "one-run", epsilon_of, told, delta=delta, confidence=confidence, tests=tests, shares=shares
    )


def fdp_rejects(bits: int, made: int, right: int, mu: float, level: float) -> float:
    """Positive where so many right guesses have a chance of less than ``level`` under mu-Gaussian privacy of every bit.

    Let p_i be the chance of i right guesses among c made on m bits, and flip one bit at random. Being right about it,
    with i right in all, becomes being wrong about it with i - 1 right in all, so that for f-differential privacy

        sum_{i >= j} i/m p_i  <=  1 - f( sum_{i >= j} (c - i + 1)/m p_{i-1} )        for every j.

    Write r_j and h_j for the sums of i/m p_i and (c - i)/m p_i over i >= j: then h_{j-1} is at least the inverse of
    1 - f at r_j. From P[right >= v] = level downwards, this asks for more and more probability below; the assumption
    is rejected where in the end it asks for more than there is: r_0 + h_0 > c/m.
    """
    reached = level * right / bits
    missed = level * (made - right) / bits
    for i in range(right - 1, -1, -1):
        needed = max(missed, float(ndtr(ndtri(min(reached, 1.0)) - mu)))
        if needed == missed:
            break
        reached += (needed - missed) * i / (made - i)
        missed = needed
        if reached + missed > made / bits:
            break
    return reached + missed - made / bits


def one_run_fdp(
    trials: Trials,
    *,
    delta: float,
    confidence: float = 0.95,
    tests: int = 1,
    shares: Sequence[float] = _FIXED_SHARES,
) -> Bound:
    """From right guesses, counted alike, to the mu of a Gaussian trade-off curve, and on to epsilon at ``delta``.

    The most extreme scores are guessed, as by :func:`one_run`. How many is fixed by ``shares``; each of them is a test.
    Refused where the noise scale depends on the data.
    """
    _refuse_scaled_noise(trials, "one-run f-DP")

    def epsilon_of(guesses: Guesses, level: float) -> float:
        mu = _largest_rejected(lambda m: fdp_rejects(guesses.bits, guesses.made, guesses.right, m, level), _LARGEST_MU)
        return gaussian_epsilon(mu, delta)

    def told(guesses: Guesses) -> str:
        return f"{guesses.right} of {guesses.made} guesses right, {guesses.bits} bits"

    return _best_share(
        trials, "one-run f-DP", epsilon_of, told, delta=delta, confidence=confidence, tests=tests, shares=shares
    )
