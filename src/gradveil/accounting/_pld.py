"""Privacy loss distributions of one step, and their composition. All estimates are pessimistic.

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
from functools import lru_cache
from typing import Any

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


def _copies(mechanism: Mechanism) -> tuple[float, list[tuple[int, float]], float]:
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


def fixed_size_deltas(mechanism: Mechanism, z: float, epsilons: Array) -> Array:
    """The bound delta(epsilon) above for ``epsilons`` >= 0, both neighbours having the same size."""
    from scipy.special import log_ndtr, ndtr

    beta, weights, rest = _copies(mechanism)
    log_g = np.log1p(np.expm1(epsilons) / beta)
    total = np.full(epsilons.shape, rest)
    for k, weight in weights:
        shift = 2.0 * k / z
        tail = np.exp(log_g + log_ndtr(-shift / 2 - log_g / shift))
        total += weight * np.maximum(ndtr(shift / 2 - log_g / shift) - tail, 0.0)
    return np.asarray(np.minimum(total, 1.0))


def _fixed_size_pld(mechanism: Mechanism, z: float, interval: float) -> Any:
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    top = interval
    while top < 500 and fixed_size_deltas(mechanism, z, np.array([top]))[0] > 1e-18:
        top *= 1.25
    last = math.ceil(top / interval)
    epsilons: Array = interval * np.arange(last + 1, dtype=np.float64)
    positive = np.minimum.accumulate(fixed_size_deltas(mechanism, z, epsilons))
    negative = -np.expm1(-epsilons[:0:-1]) + np.exp(-epsilons[:0:-1]) * positive[:0:-1]
    deltas = np.concatenate([np.minimum(negative, 1.0), positive])
    return PrivacyLossDistribution(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -last, last, deltas))


@lru_cache(maxsize=1024)
def _steps(mechanism: Mechanism, replace: bool, interval: float, z: float, count: int) -> Any:
    """``count`` equal steps."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    if mechanism.sampler in ("without-replacement", "with-replacement"):
        return _fixed_size_pld(mechanism, z, interval).self_compose(count)
    if mechanism.rate >= 1:  # plain Gaussians compose to a Gaussian
        return privacy_loss_distribution.from_gaussian_mechanism(
            z / math.sqrt(count) / (2 if replace else 1), value_discretization_interval=interval
        )
    one = privacy_loss_distribution.from_gaussian_mechanism(
        z,
        value_discretization_interval=interval,
        sampling_prob=mechanism.rate,
        neighboring_relation=(NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE),
    )
    return one.self_compose(count) if count > 1 else one


Part = tuple[Mechanism, float, int]


@lru_cache(maxsize=1024)
def _composed(parts: tuple[Part, ...], replace: bool, interval: float) -> Any:
    """All ``parts``. Halved at a power of two, so that runs with a common beginning share cached halves."""
    if len(parts) == 1:
        mechanism, z, count = parts[0]
        return _steps(mechanism, replace, interval, z, count)
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    left = _composed(parts[:half], replace, interval)
    return left.compose(_composed(parts[half:], replace, interval))


def pld_epsilon(parts: tuple[Part, ...], *, replace: bool, delta: float, interval: float) -> float:
    """Epsilon at ``delta`` of all ``parts`` composed; losses are rounded up to multiples of ``interval``."""
    return float(_composed(parts, replace, interval).get_epsilon_for_delta(delta)) if parts else 0.0
