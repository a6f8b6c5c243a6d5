"""Renyi divergences of one Poisson-sampled Gaussian step, at many orders at once.

With mu = 1 / z (z: noise multiplier, add or remove one), phi_m the density of N(m, 1) and q the rate:

- add or remove one: A(a) = E_Q (P/Q)^a with P = (1-q) phi_0 + q phi_mu and Q = phi_0, the larger of the
  two directions (Mironov, Talwar, Zhang 2019). Whole orders by their finite sum, others by quadrature.
- replace one: P = (1-q) phi_0 + q phi_mu against Q = (1-q) phi_0 + q phi_-mu. That pair dominates every
  pair of neighbours: by advanced joint convexity the hockey-stick divergence at gamma >= 1 is
  q E_{N(0, I)} (1 - a X - b Y)_+ with a, b >= 0, X = exp(<v,x> - |v|^2/2), Y = exp(<w,x> - |w|^2/2), where
  v and w lead from the one example's contribution to nothing and to the other's: |v| <= mu, |w| <= 2 mu.
  The integrand is convex in X and in Y and supermodular, so its mean grows with |v|^2, |w|^2 and <v,w>
  (Price's theorem); all three are largest for opposite contributions. gamma < 1 follows by symmetry, and
  every Renyi divergence is an integral of hockey-stick divergences.

The trapezoidal rule is exact here up to rounding (analytic integrands with Gaussian tails). Where it
would need too many points (z far below 1), the divergence of the unsampled Gaussian, which is never
smaller, stands in. Each value is padded upwards by 1e-13 / (a - 1) against rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# The orders of the moments accountant as it was released with TensorFlow Privacy.
CLASSIC_ORDERS: tuple[float, ...] = (
    *(1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(float(a) for a in range(5, 65)),
    *(128.0, 256.0, 512.0),
)
# Denser at the low end, where a large epsilon has its best order.
PROVED_ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(a) for a in range(11, 65)),
    *(128.0, 256.0, 512.0, 1024.0),
)
# Fixed size without replacement: the bound is stated for whole orders (others are interpolated).
WHOLE_ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 10)), *(float(a) for a in range(2, 65)))

_PAD = 1e-13
_MOST_POINTS = 60_000
_REACH = 9.5  # a Gaussian tail of e^-45 beyond the last stationary point


def _logsumexp(values: Array) -> Array:
    top = np.max(values, axis=-1, keepdims=True)
    return np.asarray(np.log(np.sum(np.exp(values - top), axis=-1)) + top[..., 0])


@lru_cache(maxsize=256)
def _log_choose(order: int) -> Array:
    return np.array(
        [math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1) for k in range(order + 1)]
    )


def _log_moment_whole(q: float, z: float, order: int) -> float:
    i = np.arange(order + 1, dtype=float)
    terms = _log_choose(order) + i * math.log(q) + (order - i) * math.log1p(-q) + (i * i - i) / (2 * z * z)
    return float(_logsumexp(terms))


def _log_moments(q: float, z: float, orders: Array, *, replace: bool) -> Array | None:
    """log A at ``orders`` by quadrature; None where that would take too many points."""
    mu, top = 1.0 / z, float(orders.max())
    spacing = min(0.1, 0.25 / math.sqrt(1 + top * mu * mu), 0.1 / mu)
    right = (2 * top - 1 if replace else top) * mu
    points = math.ceil((right + 2 * _REACH) / spacing)
    if points > _MOST_POINTS:
        return None
    x = -_REACH + spacing * np.arange(points + 1)
    stay, move = math.log1p(-q), math.log(q) - mu * mu / 2
    log_p = np.logaddexp(stay, move + mu * x)
    log_q = np.logaddexp(stay, move - mu * x) if replace else np.zeros_like(x)
    base = -x * x / 2 + log_q + math.log(spacing / math.sqrt(2 * math.pi))
    return _logsumexp(base + orders[:, None] * (log_p - log_q))


@lru_cache(maxsize=8192)
def rdp_poisson(q: float, z: float, orders: tuple[float, ...], replace: bool = False) -> Array:
    """Renyi divergence bound of one step at each order; ``z`` is relative to add or remove one."""
    a = np.array(orders)
    unsampled = a * (2.0 if replace else 0.5) / (z * z)
    if q >= 1:
        return unsampled
    log_moment = np.full(a.size, math.inf)
    whole = (a == np.floor(a)) & (not replace)
    log_moment[whole] = [_log_moment_whole(q, z, int(k)) for k in a[whole]]
    for low, high in ((1.0, 12.0), (12.0, 70.0), (70.0, math.inf)):
        block = ~whole & (a > low) & (a <= high)
        if block.any() and (values := _log_moments(q, z, a[block], replace=replace)) is not None:
            log_moment[block] = values
    bound: Array = np.minimum((np.maximum(log_moment, 0.0) + _PAD) / (a - 1), unsampled)
    bound.flags.writeable = False
    return bound


@lru_cache(maxsize=1024)
def rdp_without_replacement(population: int, batch_size: int, z: float, orders: tuple[float, ...]) -> Array:
    """Fixed size without replacement, replace one (Wang, Balle, Kasiviswanathan 2019).

    ``z`` is relative to add or remove one; replacing one moves the sum twice as far, hence z / 2.
    """
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(list(orders), NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(population, batch_size, GaussianDpEvent(z / 2)))
    return np.asarray(accountant.rdp)


def classic_epsilons(orders: Sequence[float], rdp: Array, delta: float) -> Array:
    """min over orders of RDP(a) + ln(1/delta) / (a-1), along the last axis."""
    a = np.asarray(orders)
    return np.asarray(np.min(rdp + math.log(1 / delta) / (a - 1), axis=-1))


def tight_epsilons(orders: Sequence[float], rdp: Array, delta: float) -> Array:
    """The conversion of Canonne, Kamath, Steinke 2020, along the last axis; as dp-accounting has it."""
    a = np.asarray(orders)
    best = np.where(a > 1.01, rdp + np.log1p(-1 / a) - np.log(delta * a) / (a - 1), math.inf)
    # Bretagnolle and Huber: delta <= sqrt(1 - exp(-KL)), and KL is at most any of the divergences.
    free = delta**2 + np.expm1(-rdp) > 0
    return np.asarray(np.maximum(np.min(np.where(free, 0.0, best), axis=-1), 0.0))


def tight_epsilon(orders: Sequence[float], rdp: Array, delta: float) -> float:
    """:func:`tight_epsilons` of one run."""
    return float(tight_epsilons(orders, rdp, delta))
