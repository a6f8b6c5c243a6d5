"""From a target epsilon to the sigma of a whole run, whatever its strategy releases at each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradveil.accounting import calibrate_plan
from gradveil.accounting.plan import TOLERANCE
from gradveil.clipping import Group
from gradveil.mechanism.clip_bounds import make_rule
from gradveil.mechanism.records import RunHeader
from gradveil.mechanism.strategies import PrivacyPlan

__all__ = ["TOLERANCE", "sigma_for"]


def sigma_for(
    epsilon: float,
    header: RunHeader,
    plan_of: Callable[[float], PrivacyPlan],
    *,
    groups: Sequence[Group],
    options: Mapping[str, Any],
    least: float = 0.0,
) -> float:
    """The smallest sigma, within the tolerance, with which a run spends at most ``epsilon``.

    ``header`` is the one that the run has with any other sigma, ``plan_of`` its plan at a given one, ``options`` the
    settings of its bound rule. ``least``: sigmas below it make no sense (the given end of a decay).
    """
    size = header.expected_batch_size

    def side_of(plan: PrivacyPlan) -> float:
        # A rule that releases something beside the gradients learns from that, and needs no parameters.
        return make_rule(plan, groups, parameters={}, batch_size=size, options=options).side_inverse_square

    return calibrate_plan(
        epsilon,
        plan_of=plan_of,
        groups=len(groups),
        sampling=header.sampling,
        population=header.population,
        batch_size=round(size),
        delta=header.delta,
        side_of=side_of if header.plan.get("side_inverse_square") else None,
        least=least,
        accountant="RDP" if header.plan.get("filter") else None,
    )
