"""What is remembered of a run and of each of its steps. Plain data, no torch.

Everything gradveil later says about privacy is computed from these records and from nothing else.
Clip, noise and accounting read the same record, so they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

FORMAT_VERSION = 1

SAMPLINGS = ("poisson", "without-replacement", "with-replacement", "shuffle")

Guarantee = Literal["proved", "paper-only", "none"]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class SideRelease:
    """Something released beside the gradient, such as the noised counts of quantile clipping.

    ``sensitivity`` is the l2 norm by which one added or removed example can move the whole vector;
    replacing one example moves it by at most twice that.
    """

    name: str
    values: tuple[float, ...]
    sensitivity: float
    noise_std: float


@dataclass(frozen=True, kw_only=True)
class Release:
    """One step's release: noise of std ``noise_std[g]`` on a sum whose examples are clipped to ``clip[g]``.

    ``clip`` holds the bound that was enforced on each group (for adaclip: on the whitened gradient, in
    whose coordinates ``noise_std`` is given too). ``sensitivity`` holds the S that the strategy
    multiplied sigma with: equal to ``clip`` for every proved strategy, a function of the batch for l2-max.
    ``scale_is_public`` says whether ``noise_std`` is a function of public schedules and of already
    private outputs only. ``sampler`` is "unknown" where the batch did not come from gradveil's sampler.
    """

    step: int
    sampler: str
    sample_rate: float
    expected_batch_size: float
    clip: tuple[float, ...]
    sensitivity_rule: str
    sensitivity: tuple[float, ...]
    sigma: float
    noise_std: tuple[float, ...]
    scale_is_public: bool
    side: tuple[SideRelease, ...] = ()
    digest: str | None = None  # of the noised gradients; seeded runs only, where a redone step must repeat itself
    recovered: bool = False  # written in place of a line that a crash cut in half; counted as spent

    @cached_property  # asked for again at every look at a run's epsilon
    def multiplier(self) -> float:
        """Noise multiplier of the whole release relative to its joint sensitivity (add or remove one).

        For M groups clipped at C with noise sigma C this is sigma / sqrt(M); side releases lower it further.
        A group clipped at exactly 0 releases nothing and counts for nothing. 0.0 (no protection) where any
        clip, noise or sensitivity is not a finite number of at least 0, or noise is missing.
        """
        numbers = [(c, s) for c, s in zip(self.clip, self.noise_std, strict=False) if c != 0]
        numbers += [(r.sensitivity, r.noise_std) for r in self.side if r.sensitivity != 0]
        known = all(
            isinstance(x, int | float) and math.isfinite(x) and x >= 0
            for x in (*self.sensitivity, *(x for pair in numbers for x in pair))
        )
        if not (known and self.clip and len(self.clip) == len(self.noise_std) and all(s > 0 for _, s in numbers)):
            return 0.0
        inverse = math.hypot(*(c / s for c, s in numbers))
        return 1.0 / inverse if inverse > 0 else math.inf

    def to_dict(self) -> dict[str, Any]:
        found = dict(vars(self))  # dataclasses.asdict copies deeply, at several times the cost; one call per step
        found.pop("multiplier", None)  # it follows from the rest
        found["side"] = [dict(vars(side)) for side in self.side]
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Release:
        settings = {key: _tuples(value) for key, value in data.items()}
        settings["side"] = tuple(SideRelease(**{k: _tuples(v) for k, v in s.items()}) for s in data.get("side", ()))
        return cls(**settings)


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """First record of a ledger: what the whole run declared before its first step.

    ``groups`` names the clipping groups in the order of every release's ``clip`` and ``noise_std``.
    ``plan`` describes the public schedules (``clip``, ``sigma`` as schedule dictionaries,
    ``fixed_variance``), so that steps that were declared but not taken can be charged.
    ``salt`` ties noise and samples to this run: two runs with one seed but other settings share neither.
    ``stopping`` is "none", "public" (stops on data declared public) or "private" (all steps are charged).
    """

    strategy: str
    guarantee: Guarantee
    groups: tuple[str, ...]
    population: int
    sampling: str
    sample_rate: float
    expected_batch_size: float
    steps: int
    delta: float
    seeded: bool
    plan: Mapping[str, Any]
    stopping: str = "none"
    salt: str = ""
    format_version: int = FORMAT_VERSION
    gradveil_version: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunHeader:
        settings = dict(data)
        settings["groups"] = tuple(settings["groups"])
        return cls(**settings)
