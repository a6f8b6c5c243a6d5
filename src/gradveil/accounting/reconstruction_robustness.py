"""Reconstruction robustness: a ceiling on the success of every attack that reconstructs an example.

An attacker who is given everything a run released, all examples but one, and a prior over that one,
reconstructs it to within some error. If the best guess from the prior alone succeeds with probability
kappa, then no attacker succeeds with more than gamma(kappa) (Balle, Cherubin, Hayes 2022; Hayes, Mahloujifar,
Balle 2023). Let P be the distribution of what is released with the example, Q any distribution that does not
depend on it. Under Q the attacker can only guess, so succeeds with at most kappa; and whatever has
probability kappa under Q has at most

    gamma = inf over epsilon of  e^epsilon kappa + delta(epsilon)

under P, where delta(epsilon) is the privacy loss distribution's. Every epsilon gives a bound, negative ones too.

- Whole run: Q is the run without the example (Poisson), or with another fixed one in its place (fixed size).
- One step in which the example is known to take part: Q is the release with the example's contribution left
  out, N(0, z^2) against N(1, z^2) at worst: gamma = Phi(Phi^-1(kappa) + 1/z).

No bound where the scale of the noise depends on the data: l2-max.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradveil.accounting._checks import check_noise
from gradveil.accounting._compose import Charge, Neighbours, parts_of, rough_epsilon, why_no_bound
from gradveil.accounting._events import Unbounded, run_charges, taken_charges
from gradveil.accounting._pld import FIXED_SIZE, Mechanism, copies
from gradveil.accounting._pld_fft import pld_success
from gradveil.accounting.filter import NAME as FILTER
from gradveil.accounting.filter import filtered, filters_of
from gradveil.accounting.planned import Setting
from gradveil.errors import ConfigError
from gradveil.mechanism.records import Release, RunHeader

_GRID_DELTA = 1e-5  # the size of epsilon there chooses the grid; any would do


@dataclass(frozen=True, kw_only=True)
class ReconstructionBound:
    """No attack succeeds with more than these; None means that there is no bound, and ``reason`` why."""

    kappa: float
    one_step: float | None
    whole_run: float | None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_kappa(kappa: float) -> float:
    """``kappa`` if it is a probability strictly between 0 and 1; otherwise refused."""
    if not 0 < kappa < 1:
        raise ConfigError(
            f"kappa {kappa!r} is not in (0, 1): it is the chance that the best guess from the prior alone succeeds. "
            "Give that, such as 0.1."
        )
    return float(kappa)


def one_step_bound(multiplier: float, kappa: float) -> float:
    """Phi(Phi^-1(kappa) + 1/z): one release of noise ``multiplier`` z, the example known to take part.

    >>> round(one_step_bound(1.0, 0.1), 3)
    0.389
    """
    from scipy.special import ndtr, ndtri

    check_noise(multiplier, what="noise multiplier")
    return float(ndtr(ndtri(check_kappa(kappa)) + 1.0 / multiplier))


def _one_step(mechanism: Mechanism, z: float, kappa: float) -> float:
    if mechanism.sampler != "with-replacement":
        return one_step_bound(z, kappa)
    # In the batch means in k >= 1 rows, which moves the sum k times as far.
    beta, weights, rest = copies(mechanism)
    inside = sum(weight * one_step_bound(z / k, kappa) for k, weight in weights)
    return min(1.0, (inside + rest) / beta)


def _bound(charged: Callable[[], Sequence[Charge]], kappa: float) -> ReconstructionBound:
    check_kappa(kappa)
    one_step: float | None = None
    try:
        charges = charged()
        if not charges:
            return ReconstructionBound(kappa=kappa, one_step=kappa, whole_run=kappa)
        mechanisms = list(dict.fromkeys(m for m, _ in charges))
        if not any(m.sampler == "unknown" for m in mechanisms):  # of which not even "one row" is known
            one_step = max(_one_step(m, min(z for n, z in charges if n == m), kappa) for m in mechanisms)
        fixed = any(m.sampler in FIXED_SIZE for m in mechanisms)
        neighbours: Neighbours = "replace-one" if fixed else "add-remove"
        for mechanism in mechanisms:
            if (why := why_no_bound(mechanism, neighbours, "PLD")) is not None:
                raise Unbounded(why)
        parts = parts_of(charges)
        size = rough_epsilon(parts, replace=fixed, delta=_GRID_DELTA)
        whole_run = pld_success(parts, replace=fixed, size=size, kappa=kappa)
        return ReconstructionBound(kappa=kappa, one_step=one_step, whole_run=whole_run)
    except Unbounded as error:
        return ReconstructionBound(kappa=kappa, one_step=one_step, whole_run=None, reason=str(error))


def reconstruction_bound(header: RunHeader, releases: Sequence[Release], *, kappa: float) -> ReconstructionBound:
    """gamma for ``kappa`` from a run's records: its least noised step by itself, and the whole run.

    Steps are charged as :func:`~gradveil.accounting.proved.proved_epsilon` charges them, declared ones included.
    """
    if header.plan.get(FILTER) is None:
        return _bound(lambda: run_charges(header, releases).charges, kappa)
    one_step = _bound(lambda: taken_charges(header, releases), kappa)
    if not releases or one_step.whole_run is None:
        return one_step
    try:
        filtered(header, releases, delta=header.delta, neighbours="add-remove")
        return replace(one_step, whole_run=filters_of(header)[0].success(kappa))
    except Unbounded as error:
        return replace(one_step, whole_run=None, reason=str(error))


def planned_reconstruction_bound(sigmas: Sequence[float], setting: Setting, *, kappa: float) -> ReconstructionBound:
    """gamma for ``kappa`` of a run described by its parameters.

    >>> round(planned_reconstruction_bound([6.0] * 10_000, Setting(sample_rate=0.01), kappa=0.1).whole_run, 4)
    0.1327
    """
    for t, sigma in enumerate(sigmas):
        check_noise(sigma, step=t)
    return _bound(lambda: setting.charges(sigmas), kappa)


def reconstruction_json(bounds: Sequence[ReconstructionBound]) -> dict[str, Any]:
    """``{"one_step": {kappa: gamma}, "whole_run": {kappa: gamma}}``; null, with the reason, where there is none."""
    data: dict[str, Any] = {
        which: {f"{b.kappa:g}": getattr(b, which) for b in bounds} for which in ("one_step", "whole_run")
    }
    reasons = list(dict.fromkeys(b.reason for b in bounds if b.reason is not None))
    if reasons:
        data["reason"] = "; ".join(reasons)
    return data
