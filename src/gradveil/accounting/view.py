"""The privacy-utility budget view: what a target epsilon buys, over sample rates and numbers of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradveil.accounting.calibrate import Target, calibrate_sigma
from gradveil.accounting.planned import Setting


@dataclass(frozen=True, kw_only=True)
class BudgetView:
    """For one target epsilon: the sigma that each number of steps needs, at each sample rate.

    ``sigma[q][i]`` goes with ``steps[i]``. ``noise(q)`` is the noise of one step on the mean gradient, per
    coordinate, in units of C / N: sigma / q.
    """

    target: Target
    steps: tuple[int, ...]
    sigma: dict[float, tuple[float, ...]]

    def noise(self, rate: float) -> tuple[float, ...]:
        return tuple(s / rate for s in self.sigma[rate])


def budget_view(target: Target, setting: Setting, *, rates: Sequence[float], steps: Sequence[int]) -> BudgetView:
    """What a target buys: sigma over the number of steps, for each of ``rates``."""
    found = {}
    for rate in rates:
        here = replace(setting, sample_rate=rate, population=None)  # batches of any size
        found[rate] = tuple(calibrate_sigma(target, here, steps=n).sigma for n in steps)
    return BudgetView(target=target, steps=tuple(steps), sigma=found)
