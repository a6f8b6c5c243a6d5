"""The privacy loss of one step: pairs of distributions that dominate it, as curves delta(epsilon).

With q the sampling rate, z the noise multiplier (add or remove one), N_m the unit Gaussian around m:

- Poisson, add or remove one: (1-q) N_0 + q N_m against N_0, m = 1/z, and the same pair exchanged.
- Poisson, replace one: (1-q) N_0 + q N_m against (1-q) N_0 + q N_-m, which is its own mirror image (why it
  dominates: :mod:`gradveil.accounting._rdp`).

Fixed-size batches under replace-one: let beta be the chance that the one example is in the batch at all,
and w_k that it fills k rows. Given the other rows, an output with k copies of it differs in mean from one
with k copies of its replacement, and from one with k other examples in its place, by at most 2k/z noise
standard deviations. Advanced joint convexity (Balle, Barthe, Gaboardi 2018) and joint convexity then give,
for gamma >= 1 and in both directions,

    delta(gamma) <= sum_k w_k H_g(N(2k/z, 1) || N(0, 1)),    g = 1 + (gamma - 1) / beta,

and for gamma < 1, by exchanging the neighbours, 1 - gamma + gamma delta(1/gamma). The curve is convex, so
it is the curve of a pair of distributions that dominates the step at every gamma, and such pairs compose.
Without replacement: k = 1, beta = w_1 = B/N. With replacement: k ~ Binomial(B, 1/N).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NEGLIGIBLE = 1e-20


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """How a step drew its batch. ``batch_size`` and ``population`` matter for fixed-size samplers only."""

    sampler: str
    rate: float
    batch_size: int = 0
    population: int = 0


FIXED_SIZE = ("without-replacement", "with-replacement")


def copies(mechanism: Mechanism) -> tuple[float, list[tuple[int, float]], float]:
    """beta, the (k, w_k) for k >= 1, and the mass of the k left out."""
    n, batch = mechanism.population, mechanism.batch_size
    if mechanism.sampler == "without-replacement":
        return batch / n, [(1, batch / n)], 0.0
    from scipy.stats import binom

    rows = binom(batch, 1.0 / n)
    weights: list[tuple[int, float]] = []
    for k in range(1, batch + 1):
        weights.append((k, float(rows.pmf(k))))
        if rows.sf(k) < _NEGLIGIBLE:
            break
    return -math.expm1(batch * math.log1p(-1.0 / n)) if n > 1 else 1.0, weights, float(rows.sf(len(weights)))


def _log_g(beta: float, epsilons: Array) -> Array:
    """log(1 + (e^epsilon - 1) / beta) for ``epsilons`` >= 0, at any size of them."""
    return np.asarray(epsilons - math.log(beta) + np.log(beta * np.exp(-epsilons) - np.expm1(-epsilons)))


def _gaussian(shift: float, log_g: Array) -> Array:
    """H_g(N(shift, 1) || N(0, 1))."""
    from scipy.special import log_ndtr, ndtr

    tail = np.exp(log_g + log_ndtr(-shift / 2 - log_g / shift))
    return np.asarray(np.maximum(ndtr(shift / 2 - log_g / shift) - tail, 0.0))


def fixed_size_deltas(mechanism: Mechanism, z: float, epsilons: Array) -> Array:
    """The bound delta(epsilon) above for ``epsilons`` >= 0, both neighbours having the same size."""
    beta, weights, rest = copies(mechanism)
    log_g = _log_g(beta, epsilons)
    total = np.full(epsilons.shape, rest)
    for k, weight in weights:
        total += weight * _gaussian(2.0 * k / z, log_g)
    return np.asarray(np.minimum(total, 1.0))


def _one_added(q: float, shift: float, epsilons: Array) -> Array:
    """H_e^epsilon(N_0 || (1-q) N_0 + q N_shift): zero from -log(1-q) on."""
    from scipy.special import log_ndtr, ndtr

    share = 1.0 + np.expm1(-epsilons) / q
    inside = share > 0
    log_share = np.log(np.where(inside, share, 1.0))
    gap = share * ndtr(log_share / shift + shift / 2) - np.exp(log_ndtr(log_share / shift - shift / 2))
    return np.where(inside, q * np.exp(np.where(inside, epsilons, 0.0)) * np.maximum(gap, 0.0), 0.0)


def _one_replaced(q: float, shift: float, epsilons: Array) -> Array:
    """H_e^epsilon((1-q) N_0 + q N_shift || (1-q) N_0 + q N_-shift)."""
    from scipy.special import log_ndtr, ndtr

    half = epsilons / 2
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log(-np.expm1(-epsilons)) - math.log(2)
    t = log_sinh - (math.log(q) - shift * shift / 2 - math.log1p(-q))
    x = (half + np.logaddexp(t, np.logaddexp(0.0, 2 * t) / 2)) / shift  # where the loss is epsilon
    neither = -np.expm1(-epsilons) * np.exp(epsilons + log_ndtr(-x))
    total = q * (ndtr(shift - x) - np.exp(epsilons + log_ndtr(-shift - x))) - (1 - q) * neither
    return np.asarray(np.maximum(total, 0.0))


def loss_curves(mechanism: Mechanism, z: float, replace: bool, epsilons: Array) -> tuple[Array, Array]:
    """delta(epsilon) at ``epsilons`` >= 0 of a pair that dominates one step, and of the pair exchanged.

    Equal (the same array) where the pair is its own mirror image.
    """
    if mechanism.sampler in FIXED_SIZE:
        curve = fixed_size_deltas(mechanism, z, epsilons)
    elif mechanism.rate >= 1:
        curve = _gaussian((2.0 if replace else 1.0) / z, epsilons)
    elif replace:
        curve = _one_replaced(mechanism.rate, 1.0 / z, epsilons)
    else:
        removed = mechanism.rate * _gaussian(1.0 / z, _log_g(mechanism.rate, epsilons))
        return removed, _one_added(mechanism.rate, 1.0 / z, epsilons)
    return curve, curve
