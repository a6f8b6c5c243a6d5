"""The whole-run audit: many short runs, half of them with the canary, and a guess about each.

All runs have the same public settings and the same data but for the canary; each draws its own batches and noise. The
bounds are on the epsilon of a whole run, sampling included, beside the one that the ledger's records prove. Two views:

    trajectory      every released gradient, and which of the other examples were behind it
    final weights   the model that comes out, and the one that went in
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gradveil.accounting import from_releases, proved_epsilon
from gradveil.audit.bounds import Array, Method, check_confidence, clopper_pearson, gaussian_family
from gradveil.audit.canary import Played, Setting, play
from gradveil.audit.result import Audit
from gradveil.audit.steps import judged
from gradveil.errors import ConfigError

_RUNS_PER_SEED = 1_000_000  # of one audit; each run has a seed of its own
STATISTICS = (
    "matched filter, trajectory",
    "noise scale, trajectory",
    "matched filter, final weights",
    "noise scale, final weights",
)


@dataclass(frozen=True)
class _Task:
    """One run: picklable, so that it may be played in another process."""

    setting: Setting
    steps: int
    seed: int
    present: bool
    keeps_records: bool

    def __call__(self) -> tuple[Array, Played | None]:
        """The statistics of the run, and the run itself where its records are wanted."""
        played = play(self.setting, np.full(self.steps, self.present), seed=self.seed)
        return _statistics(played, self.setting.sample_rate), played if self.keeps_records else None


def audit_runs(
    setting: Setting,
    *,
    runs: int = 1000,
    steps: int = 10,
    seed: int = 0,
    confidence: float = 0.95,
    jobs: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Lower bounds on the epsilon of a run of ``steps`` steps, from ``runs`` of them, every other with the canary.

    ``jobs`` processes share the work; the result does not depend on their number. No bound can be larger than about
    log(runs / 10): that is what it takes to see small error rates.
    """
    check_confidence(confidence)
    check_runs(runs)
    tasks = [_Task(setting, steps, seed * _RUNS_PER_SEED + i, i % 2 == 1, i == 0) for i in range(runs)]
    scores = np.empty((runs, len(STATISTICS)))
    first: Played | None = None
    for i, (statistics, played) in enumerate(_done(tasks, jobs)):
        scores[i] = statistics
        first = first or played
        if progress is not None:
            progress(i + 1)
    assert first is not None
    header, releases = first.header, first.releases
    public = all(release.scale_is_public for release in releases)
    proved = proved_epsilon(header, releases, neighbours="add-remove")
    # With every example in every batch, a run of Gaussian steps is one Gaussian mechanism; sampled, or with noise that
    # follows what was released, it is a mixture.
    gaussian = public and setting.sample_rate == 1 and proved.filter is None
    wanted: list[tuple[str, Array, list[Method]]] = []
    for i, name in enumerate(STATISTICS):
        wanted.append((name, scores[:, i], [clopper_pearson]))
        if gaussian and name.startswith("matched filter"):
            wanted[-1][2].append(gaussian_family)
    threat = f"{setting.threat_model}; sees every released gradient, or the final weights alone"
    return Audit(
        unit="a whole run",
        strategy=header.strategy,
        settings={
            "runs": runs,
            "steps": steps,
            "sample_rate": setting.sample_rate,
            "groups": len(header.groups),
            "examples": len(setting.x),
            "calm": setting.calm,
        },
        bounds=judged(
            wanted, np.arange(runs) % 2 == 1, threat, public=public, delta=header.delta, confidence=confidence
        ),
        proved=proved.epsilon,
        reason=proved.reason,
        as_published=from_releases(header, releases)["MA"].epsilon,
    )


def check_runs(runs: int) -> int:
    """``runs`` if so many can be audited; otherwise refused."""
    if not 40 <= runs < _RUNS_PER_SEED:
        raise ConfigError(f"{runs} runs: give at least 40, half of them with the canary, and fewer than a million.")
    return runs


def _done(tasks: list[_Task], jobs: int) -> Iterator[tuple[Array, Played | None]]:
    if jobs == 1:
        yield from (task() for task in tasks)
        return
    from joblib import Parallel, delayed

    yield from Parallel(n_jobs=jobs, return_as="generator")(delayed(task)() for task in tasks)


def _statistics(played: Played, rate: float) -> Array:
    """In the order of ``STATISTICS``."""
    losses = played.losses
    if rate < 1:  # it is in each batch with this chance
        losses = np.logaddexp(np.log1p(-rate), np.log(rate) + losses)
    length = float(played.first_canary.norm())
    along = -float(played.moved @ played.first_canary) / length if length > 0 else 0.0
    size = max(float(played.moved.square().mean()), 1e-300)
    return np.array([losses.sum(), played.noise_scale.max(), along, np.log(size)])
