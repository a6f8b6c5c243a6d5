"""The five accountants as published. Numbers to compare with, not guarantees.

With eps0_t = sqrt(2 ln(1.25/delta)) / sigma_t and eps_t = ln(1 + q (e^eps0_t - 1)):

    BaseC         sum eps_t
    AdvC          sqrt(2 ln(1/delta) sum eps_t^2) + sum eps_t (e^eps_t - 1)     (as tabled; Dwork et al. 2010)
    AdvC-printed  sqrt(2 ln(1/delta) sum eps_t^2) + sum eps_t tanh(eps_t / 2)   (the formula the paper prints)
    OptC          as AdvC-printed, with ln(e + sqrt(sum eps_t^2) / delta) for ln(1/delta)
    zCDP          rho + 2 sqrt(rho ln(1/delta)), rho = sum q^2 / sigma_t^2
    MA            min_a sum RDP_t(a) + ln(1/delta) / (a - 1), Poisson-sampled Gaussian

Each is quoted at one delta, but the first four compositions spend more: see ``delta_total``. All ignore that
clipping M groups apart moves the sum by sqrt(M) times as much, and how the batches were really drawn.

For MA, more than 256 distinct sigmas are grouped on a grid of ratio 1.001 (or its square, where sigmas lie
very far apart), each charged at the smallest of its group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradveil.accounting._checks import check_delta, check_noise, check_rate
from gradveil.accounting._rdp import CLASSIC_ORDERS, classic_epsilons, rdp_poisson
from gradveil.accounting._release_table import sigmas_of
from gradveil.errors import UnknownNameError
from gradveil.mechanism.records import Release, RunHeader

Array = NDArray[np.float64]

METHODS = ("BaseC", "AdvC", "AdvC-printed", "OptC", "zCDP", "MA")
_MA_EXACT = 256
_MA_RATIO = 1.001
_MA_MOST = 1400  # groups; where more would be needed, the ratio is squared


@dataclass(frozen=True, kw_only=True)
class PaperEpsilon:
    """One published figure. ``delta_total`` is the delta that the method really spends for it."""

    method: str
    epsilon: float
    delta_nominal: float
    delta_total: float
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: an infinite epsilon is the string "inf"."""
        data = asdict(self)
        data["warnings"] = list(self.warnings)
        data["epsilon"] = self.epsilon if math.isfinite(self.epsilon) else "inf"
        return data


def check_method(method: str) -> str:
    """``method`` if it is one of the published ones; otherwise refused, with the near names."""
    if method not in METHODS:
        raise UnknownNameError("published accountant", method, METHODS)
    return method


def _checked(sigmas: Sequence[float] | Array, sample_rate: float, delta: float) -> Array:
    check_rate(sample_rate)
    check_delta(delta)
    values = np.asarray(sigmas, dtype=float)
    for step in np.flatnonzero(~(np.isfinite(values) & (values > 0)))[:1]:
        check_noise(float(values[step]), step=int(step))
    return values


def _ma_curve(sigmas: Array, q: float, delta: float) -> Array:
    levels, index = np.unique(sigmas, return_inverse=True)
    if levels.size > _MA_EXACT:
        keys = np.floor(np.log(sigmas) / math.log(_MA_RATIO)).astype(np.int64)
        while np.unique(keys).size > _MA_MOST:
            keys = np.floor_divide(keys, 2)
        groups, index = np.unique(keys, return_inverse=True)
        levels = np.full(groups.size, math.inf)
        np.minimum.at(levels, index, sigmas)
    table = np.array([rdp_poisson(q, float(s), CLASSIC_ORDERS) for s in levels])
    curve = np.empty(sigmas.size)
    spent = np.zeros(len(CLASSIC_ORDERS))
    for start in range(0, sigmas.size, 4096):  # bounds the memory of long runs
        block = spent + np.cumsum(table[index[start : start + 4096]], axis=0)
        curve[start : start + 4096] = classic_epsilons(CLASSIC_ORDERS, block, delta)
        spent = block[-1]
    return curve


def _composed(method: str, sigmas: Array, q: float, delta: float, slack: float) -> Array:
    """BaseC, AdvC, AdvC-printed or OptC: ``delta`` is each step's, before sampling; ``slack`` the composition's."""
    eps0 = math.sqrt(2 * math.log(1.25 / delta)) / sigmas
    eps = np.logaddexp(math.log1p(-q), math.log(q) + eps0) if q < 1 else eps0
    if method == "BaseC":
        return np.cumsum(eps)
    squares = np.cumsum(eps**2)
    if method == "AdvC":
        with np.errstate(over="ignore"):  # a sigma far below 1: infinite is the honest answer
            drift = np.cumsum(eps * np.expm1(eps))
    else:
        drift = np.cumsum(eps * np.tanh(eps / 2))
    log_term = np.log(math.e + np.sqrt(squares) / slack) if method == "OptC" else math.log(1 / slack)
    return np.asarray(drift + np.sqrt(2 * squares * log_term))


def _curve(method: str, values: Array, q: float, delta: float) -> Array:
    if values.size == 0:
        return np.zeros(0)
    if method == "MA":
        return _ma_curve(values, q, delta)
    if method == "zCDP":
        rho = np.cumsum((q / values) ** 2)
        return np.asarray(rho + 2 * np.sqrt(rho * math.log(1 / delta)))
    return _composed(method, values, q, delta, delta)


def paper_curve(
    sigmas: Sequence[float] | Array, sample_rate: float, delta: float, *, methods: Sequence[str] = METHODS
) -> dict[str, Array]:
    """Each method's epsilon after step 1, 2, ..., len(sigmas). No steps: empty arrays."""
    values = _checked(sigmas, sample_rate, delta)
    return {check_method(method): _curve(method, values, float(sample_rate), delta) for method in methods}


def paper_epsilons(sigmas: Sequence[float] | Array, sample_rate: float, delta: float) -> dict[str, PaperEpsilon]:
    """Each published method's epsilon for the whole run, with the delta it really spends. No steps: 0."""
    values = _checked(sigmas, sample_rate, delta)
    curve = paper_curve(values, sample_rate, delta)
    amplified = values.size * sample_rate * delta
    totals = {"BaseC": amplified, "AdvC": amplified + delta, "AdvC-printed": amplified + delta}
    totals["OptC"] = amplified + delta
    result = {}
    for method in METHODS:
        warnings: tuple[str, ...] = ()
        if method in ("zCDP", "MA") and values.size and sample_rate >= 1 / (16 * values.max()):
            warnings = (
                f"the published condition q < 1/(16 sigma) fails: q = {sample_rate:g} is not below "
                f"{1 / (16 * values.max()):.4g} at sigma = {values.max():g}",
            )
        result[method] = PaperEpsilon(
            method=method,
            epsilon=float(curve[method][-1]) if values.size else 0.0,
            delta_nominal=delta,
            delta_total=(totals.get(method, delta) if values.size else 0.0),
            warnings=warnings,
        )
    return result


def at_total_delta(sigmas: Sequence[float] | Array, sample_rate: float, delta: float) -> dict[str, float]:
    """The composition methods at a *total* delta of ``delta``, instead of the larger one they are quoted at.

    BaseC shares delta equally among its T steps, each amplified by q; AdvC and OptC give the steps one half
    and the composition the other. Still the published formulas, and no guarantee.

    >>> {m: round(e, 2) for m, e in at_total_delta([6.0] * 10_000, 0.01, 1e-5).items()}
    {'BaseC': 158.04, 'AdvC': 10.75, 'AdvC-printed': 9.39, 'OptC': 9.56}
    """
    values = _checked(sigmas, sample_rate, delta)
    found = {}
    for method in ("BaseC", "AdvC", "AdvC-printed", "OptC"):
        share = 1.0 if method == "BaseC" else 0.5
        if values.size == 0:
            found[method] = 0.0
            continue
        # The Gaussian's formula wants a delta of its own below 1.
        each = min(share * delta / (values.size * sample_rate), delta)
        found[method] = float(_composed(method, values, float(sample_rate), each, 0.5 * delta)[-1])
    return found


def from_releases(
    header: RunHeader, releases: Iterable[Release], *, delta: float | None = None
) -> dict[str, PaperEpsilon]:
    """The published figures of a run: sigma_t as released, whatever the strategy, at the declared rate."""
    delta = header.delta if delta is None else delta
    return paper_epsilons(sigmas_of(releases), header.sample_rate, delta)
