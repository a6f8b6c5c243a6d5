"""How well any test for one example can do: true-positive rates at fixed false-positive rates, and mu of Gaussian DP.

All from the privacy loss distribution of the run, as its epsilon: at a false-positive rate a no test has a
true-positive rate above inf over epsilon of e^epsilon a + delta(epsilon). mu is that of the Gaussian mechanism whose
rates are at least as high at each of :data:`RATES`: one number for the whole curve, where (epsilon, delta) is one
point of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradveil.accounting.reconstruction_robustness import reconstruction_bound
from gradveil.mechanism.records import Release, RunHeader

RATES = (1e-4, 0.001, 0.01, 0.1, 0.5)


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """``true_positive_rates`` by false-positive rate: upper bounds for every test of whether one example was used."""

    true_positive_rates: Mapping[float, float]
    mu: float


def tradeoff(header: RunHeader, releases: Sequence[Release]) -> Tradeoff | None:
    """None where nothing is proved, or nothing was released."""
    from scipy.special import ndtri

    if not releases:
        return None
    found: dict[float, float] = {}
    for rate in RATES:
        bound = reconstruction_bound(header, releases, kappa=rate).whole_run
        if bound is None:
            return None
        found[rate] = min(1.0, bound)
    shifts = [ndtri(min(tpr, 1 - 1e-16)) - ndtri(rate) for rate, tpr in found.items()]
    return Tradeoff(true_positive_rates=found, mu=float(max(0.0, *shifts)))
