"""What is remembered of a run and of each of its steps. Plain data, no torch.

Everything gradveil later says about privacy is computed from these records and from nothing else.
Clip, noise and accounting read the same record, so they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

FORMAT_VERSION = 2  # of ledgers: 1 wrote every release in full

SAMPLINGS = ("poisson", "without-replacement", "with-replacement", "shuffle")

Guarantee = Literal["proved", "paper-only", "none"]

# Ways of drawing a batch for which no finite epsilon is proved, and why.
UNPROVED_SAMPLINGS: Mapping[str, str] = {
    "shuffle": (
        "shuffled batches have no proved epsilon: their examples are not drawn independently of earlier batches, and "
        "no amplification by sampling is proved for that. Use Poisson sampling"
    ),
    "unknown": (
        "at least one batch did not come from gradveil's own sampler, so the chance with which an example is "
        "in it is not known. Let the engine draw the batches"
    ),
}


def why_unproved(
    guarantee: str, *, fixed_variance: bool, sampling: str | None = None, strategy: str | None = None
) -> str | None:
    """Why no finite epsilon is proved for a run with these settings; None if one is.

    ``sampling`` None: whatever the sampling. ``strategy`` names the strategy in the reason.

    >>> why_unproved("proved", fixed_variance=False, sampling="poisson") is None
    True
    >>> why_unproved("none", fixed_variance=False, strategy="non-private")
    "strategy 'non-private' is not private: it adds no noise"
    """
    name = "the strategy" if strategy is None else f"strategy {strategy!r}"
    if guarantee == "none":
        return f"{name} is not private: it adds no noise"
    if guarantee != "proved" and not fixed_variance:
        return f"{name} scales its noise to the data, and no sigma makes that private"
    return None if sampling is None else UNPROVED_SAMPLINGS.get(sampling)


def _is_magnitude(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def noise_multiplier(parts: Iterable[tuple[float, float]], *, side_inverse_square: float = 0.0) -> float:
    """Noise multiplier z of Gaussian releases taken together, relative to their joint sensitivity:

        1/z^2 = sum over parts of (sensitivity / noise_std)^2 + side_inverse_square

    ``parts`` are pairs (sensitivity, noise_std), one for each released vector: how far one added or removed example
    moves it in l2 norm, and the noise on each of its coordinates. ``side_inverse_square`` is the sum over parts known
    only by what they add. M groups clipped at C with noise sigma C have z = sigma / sqrt(M).

    A part of sensitivity 0 releases nothing and counts for nothing, whatever its noise; infinity if nothing is
    released. 0.0 (no protection) if any other number is not finite and at least 0, or a part has no noise.

    >>> noise_multiplier([(4.0, 24.0)]), round(noise_multiplier([(4.0, 24.0)] * 3), 3), noise_multiplier([(4.0, 0.0)])
    (6.0, 3.464, 0.0)
    """
    counted = [(sensitivity, std) for sensitivity, std in parts if sensitivity != 0]
    if not (
        _is_magnitude(side_inverse_square)
        and all(_is_magnitude(sensitivity) and _is_magnitude(std) and std > 0 for sensitivity, std in counted)
    ):
        return 0.0
    inverse = math.hypot(*(sensitivity / std for sensitivity, std in counted), math.sqrt(side_inverse_square))
    return 1.0 / inverse if inverse > 0 else math.inf


def inverse_square(parts: Iterable[tuple[float, float]]) -> float:
    """1/z^2 of Gaussian releases taken together (:func:`noise_multiplier`); it adds up over releases.

    >>> inverse_square([(0.5, 2.0)])
    0.0625
    """
    z = noise_multiplier(parts)
    return math.inf if z == 0 else z**-2


def planned_multiplier(
    *, groups: int, sigma: float, clip: float, varsigma: float | None = None, side_inverse_square: float = 0.0
) -> float:
    """Noise multiplier of a step before it is taken: ``groups`` groups clipped at ``clip``, noise sigma clip on each.

    ``varsigma`` is the noise std of fixed-variance mode, which then takes the place of sigma clip.

    >>> planned_multiplier(groups=4, sigma=6.0, clip=2.0), planned_multiplier(groups=4, sigma=6.0, clip=2.0, varsigma=8)
    (3.0, 2.0)
    """
    # Each group moves by its clip: sigma relative to that, so that a tiny or huge clip neither under- nor overflows.
    relative = sigma if varsigma is None else varsigma / clip
    return noise_multiplier([(math.sqrt(groups), relative)], side_inverse_square=side_inverse_square)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class AuxiliaryRelease:
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
    ``scale_is_public`` says whether ``noise_std`` depends only on public schedules and on values already
    released with noise. ``sampler`` is "unknown" where the batch did not come from gradveil's sampler.
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
    side: tuple[AuxiliaryRelease, ...] = ()
    digest: str | None = None  # of the noised gradients; seeded runs only, where a redone step must repeat itself
    recovered: bool = False  # written in place of a line that a crash cut in half; counted as spent
    # Of a rule that adapts to releases: the numbers that sigma and clip are a function of (mechanism/adaptive.py).
    chosen_from: Mapping[str, Any] | None = None
    # Identifies the noise: from the operating system, drawn for this release; None in seeded runs, where the step
    # number takes its place.
    nonce: str | None = None

    @cached_property  # asked for again at every look at a run's epsilon
    def multiplier(self) -> float:
        """Noise multiplier of the whole release relative to its joint sensitivity (add or remove one).

        For M groups clipped at C with noise sigma C this is sigma / sqrt(M); side releases lower it further.
        A group clipped at exactly 0 releases nothing and counts for nothing. 0.0 (no protection) where any
        clip, noise or sensitivity is not a finite number of at least 0, or noise is missing.
        """
        if not self.clip or len(self.clip) != len(self.noise_std) or not all(map(_is_magnitude, self.sensitivity)):
            return 0.0
        beside = ((side.sensitivity, side.noise_std) for side in self.side)
        return noise_multiplier([*zip(self.clip, self.noise_std, strict=True), *beside])

    @property
    def side_inverse_square(self) -> float:
        """What the side releases add to 1/z^2."""
        return inverse_square((side.sensitivity, side.noise_std) for side in self.side)

    def to_dict(self) -> dict[str, Any]:
        found = dict(vars(self))  # dataclasses.asdict copies deeply, at several times the cost; one call per step
        found.pop("multiplier", None)  # it follows from the rest
        for optional in ("digest", "nonce", "chosen_from"):
            if found[optional] is None:
                del found[optional]
        found["side"] = [dict(vars(side)) for side in self.side]
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Release:
        settings = {key: _tuples(value) for key, value in data.items()}
        settings["side"] = tuple(
            AuxiliaryRelease(**{k: _tuples(v) for k, v in s.items()}) for s in data.get("side", ())
        )
        return cls(**settings)


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """First record of a ledger: what the whole run declared before its first step.

    ``groups`` names the clipping groups in the order of every release's ``clip`` and ``noise_std``.
    ``plan`` describes the public schedules (``clip``, ``sigma`` as schedule dictionaries,
    ``fixed_variance``), so that steps that were declared but not taken can be charged; ``budget`` in it is the
    proved epsilon that the run is held to, if it has one.
    ``salt`` ties noise and samples to this run: two runs with one seed but other settings share neither.
    ``stopping`` is "public" where the run declared that when it stops is decided without looking at anything computed
    from the private data: only the steps taken are charged then. "none" and "private": all declared steps are.
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
