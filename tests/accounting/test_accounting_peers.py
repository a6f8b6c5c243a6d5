"""Against the accountants of Opacus, where it is installed (pip install 'gradveil[peers]')."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest

from gradveil.accounting import Setting, planned_epsilon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accountants = pytest.importorskip(
        "opacus.accountants", reason="opacus is not installed: pip install 'gradveil[peers]' brings it"
    )


def of_opacus(kind: str, history: list[tuple[float, float, int]], delta: float = 1e-5, **options: Any) -> float:
    accountant = {"PRV": accountants.PRVAccountant, "RDP": accountants.RDPAccountant}[kind]()
    accountant.history = list(history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta, **options))


@pytest.mark.parametrize(
    ("sigma", "q", "steps"), [(6.0, 0.01, 10_000), (6.0, 0.01, 5_000), (1.1, 0.004, 3_000), (0.8, 0.02, 400)]
)
def test_constant_sigma(sigma: float, q: float, steps: int) -> None:
    setting, sigmas, history = Setting(sample_rate=q), [sigma] * steps, [(sigma, q, steps)]
    pld = planned_epsilon(sigmas, setting).epsilon
    assert pld == pytest.approx(of_opacus("PRV", history, eps_error=0.003), abs=0.006)
    rdp = planned_epsilon(sigmas, setting, accountant="RDP").epsilon
    assert rdp == pytest.approx(of_opacus("RDP", history), rel=5e-3)


def test_different_sigmas_cost_opacus_more_time() -> None:
    """Ten of the 200 different sigmas that take Opacus many seconds: its time grows with their number."""
    sigmas = np.geomspace(15, 4, 10)
    history, spread = [(float(s), 0.01, 800) for s in sigmas], [float(s) for s in sigmas for _ in range(800)]
    start = time.process_time()
    theirs = of_opacus("RDP", history)
    their_seconds = time.process_time() - start
    start = time.process_time()
    mine = planned_epsilon(spread, Setting(sample_rate=0.01), accountant="RDP").epsilon
    my_seconds = time.process_time() - start
    assert mine == pytest.approx(theirs, rel=5e-3)
    assert my_seconds < their_seconds
