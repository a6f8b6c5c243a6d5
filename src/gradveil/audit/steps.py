"""The step-bit audit: in one training run, a fair coin for every step, and as many guesses as there are steps.

Each coin enters one release; what comes later is computed from that release and tells nothing more. So the whole run is
as private, in each coin, as one step is, and bounds from one run (:mod:`gradveil.audit.bounds`) speak about the epsilon
of a single release, without any amplification by sampling. Beside them stands the exact epsilon of the Gaussian
mechanism at the smallest noise multiplier that the ledger records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gradveil.audit.bounds import (
    Array,
    Bound,
    Coins,
    Method,
    Trials,
    check_confidence,
    gaussian_epsilon,
    gaussian_family,
    one_run,
    one_run_fdp,
)
from gradveil.audit.canary import Played, Setting, play
from gradveil.audit.result import Audit
from gradveil.errors import ConfigError

SCALE_REASON = "the scale of the noise depends on the data: two neighbouring data sets give outputs of different scale"


def audit_steps(
    setting: Setting,
    *,
    steps: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Lower bounds on the epsilon of one step, from one run of ``steps`` steps.

    Matched filter and noise scale, each by every bound that holds for it; all of them share the confidence.
    """
    check_confidence(confidence)
    if setting.sample_rate != 1:
        raise ConfigError(
            f"sample rate {setting.sample_rate:g}: a step-bit audit guesses whether the canary took part, so that must "
            "be the coin's doing alone. Leave the sample rate at 1, or audit whole runs."
        )
    if steps < 20:
        raise ConfigError(f"{steps} steps are {steps} coins: too few to show anything. Give 20 or more; 2000, say.")
    coins = np.random.default_rng([seed, 1]).random(steps) < 0.5
    played = play(setting, coins, seed=seed, progress=progress)
    return judge_steps(played, coins[: len(played.releases)], setting, confidence=confidence)


def judge_steps(played: Played, coins: Coins, setting: Setting, *, confidence: float) -> Audit:
    """The bounds that follow from one run whose coins are known."""
    public = all(release.scale_is_public for release in played.releases)
    of_filter: list[Method] = [one_run, gaussian_family, one_run_fdp] if public else [one_run]
    wanted: list[tuple[str, Array, list[Method]]] = [
        ("matched filter", played.losses, of_filter),
        ("noise scale", played.noise_scale, [one_run]),
    ]
    threat = f"{setting.threat_model}; sees every released gradient"
    multipliers = np.array([release.multiplier for release in played.releases])
    header = played.header
    bounds = judged(wanted, coins, threat, public=public, delta=header.delta, confidence=confidence)
    return Audit(
        unit="one step",
        strategy=header.strategy,
        settings={
            "steps": len(coins),
            "groups": len(header.groups),
            "examples": len(setting.x),
            "calm": setting.calm,
            # 1: the canary moves the release by all that its clip bounds allow
            "canary_reaches": float(np.max(played.strength * multipliers)) if public else None,
        },
        bounds=bounds,
        proved=gaussian_epsilon(1.0 / multipliers.min(), header.delta) if public else math.inf,
        reason=None if public else SCALE_REASON,
        as_published=gaussian_epsilon(1.0 / min(r.sigma for r in played.releases), header.delta),
    )


def judged(
    wanted: Iterable[tuple[str, Array, Sequence[Method]]],
    present: Coins,
    threat_model: str,
    *,
    public: bool,
    delta: float,
    confidence: float,
) -> tuple[Bound, ...]:
    """Every wanted bound of every (statistic, scores), the confidence shared out among them."""
    wanted = list(wanted)
    tests = sum(len(methods) for _, _, methods in wanted)
    found = []
    for statistic, scores, methods in wanted:
        trials = Trials(
            scores=scores, present=present, statistic=statistic, threat_model=threat_model, scale_is_public=public
        )
        found += [method(trials, delta=delta, confidence=confidence, tests=tests) for method in methods]
    return tuple(found)
