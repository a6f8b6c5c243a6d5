"""The book of a run: its ledger, and what follows from what stands in it.

A release is written down before anything is made of it. Those that are there decide whether another may follow (the
budget), and what it must be where a step is taken again.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gradveil.accounting import ledger as ledgers
from gradveil.accounting.ledger import Durability, Ledger
from gradveil.engine.guards import AwaitedRelease, BudgetGuard, RepeatGuard
from gradveil.errors import GradveilError, RunDirectoryError
from gradveil.mechanism.distributed.ranks import Ranks
from gradveil.mechanism.records import Release, RunHeader

Digest = Callable[[list[Tensor]], str]
"""Of the gradients of a release."""


class ReleaseLog:
    """Kept by each process of the run. When it is collected, or at exit, what is still to follow is written."""

    def __init__(self, ledger: Ledger, *, budget: BudgetGuard, digest: Digest, seeded: bool) -> None:
        """``seeded``: by the key in use now, which need not be that of the process which began the run."""
        self._ledger, self.budget, self._digest, self._seeded = ledger, budget, digest, seeded
        self._repeat = RepeatGuard(ledger.releases, digest)
        self._awaited: list[AwaitedRelease] = []  # one at most
        weakref.finalize(self, _write_the_rest, ledger, self._awaited, os.getpid())

    @classmethod
    def open(
        cls,
        header: RunHeader,
        run_dir: Path | None,
        *,
        resume: bool,
        ranks: Ranks,
        budget: BudgetGuard,
        digest: Digest,
        seeded: bool,
        durability: Durability = "write",
    ) -> ReleaseLog:
        """A new one, or that of a run which goes on; refused where the plan would overspend."""
        budget.check_plan(header)
        ranks.check_same("the run", header.salt)
        here: list[Ledger] = []

        def begin() -> tuple[RunHeader, tuple[Release, ...], tuple[tuple[str, dict[str, Any]], ...]]:
            here.append(_begun(header, run_dir, resume=resume, durability=durability))
            return here[0].header, tuple(here[0].releases), here[0].notes

        kept = ranks.from_first(begin)
        # The first rank's is on disk; the others go along in memory.
        ledger = here[0] if here else Ledger.beside(*kept)
        return cls(ledger, budget=budget, digest=digest, seeded=seeded)

    @property
    def ledger(self) -> Ledger:
        _add_digest(self._ledger, self._awaited)
        return self._ledger

    def check_budget(self, step: int, sampler: str) -> None:
        """Refuse a step that would overspend."""
        ledger = self.ledger
        self.budget.check(ledger.header, ledger.releases, step, sampler)

    def knows(self, step: int) -> bool:
        """Whether this seeded run has released the step before: it must then repeat itself bit for bit."""
        return self._repeat.knows(step)

    def compared(self, release: Release, noised: Iterable[Tensor]) -> Release:
        """The release of these noised gradients, with their digest in a seeded run.

        Refused where the step was released before and is another now.
        """
        if not self._seeded:
            return release
        return replace(release, digest=self._repeat.check(release.step, noised))

    def note(self, release: Release, *, digest_follows: bool = False) -> None:
        """Write a release; when this returns it is in the ledger's file, and something may be made of it.

        Where its digest is still to be computed on a GPU, the release is written without it. The digest follows in a
        line of its own when the ledger is next looked at: by then :meth:`give_digest` was called, or the step was
        broken off and the release stays without one.
        """
        self.ledger.append(release)
        if digest_follows:
            self._awaited.append(AwaitedRelease(release.step))

    def give_digest(self, digest: Tensor) -> None:
        """The digest of the release noted last; on a GPU, which goes on meanwhile."""
        if self._awaited:
            self._awaited[-1].give(digest)

    def go_on(self) -> None:
        """From a checkpoint: what was released after it counts, and comes again."""
        self._repeat = RepeatGuard(self.ledger.releases, self._digest)
        self.budget.reconsider()

    def end(self, reason: str) -> None:
        if self._ledger.is_open:
            self.ledger.end(reason)


def _add_digest(ledger: Ledger, awaited: list[AwaitedRelease]) -> None:
    """Write the digest that is awaited, if there is one. Done twice, after an interrupt, it is written once."""
    if not awaited:
        return
    digest = awaited[0].read()
    if digest is not None:
        ledger.add_digest(awaited[0].step, digest)
    awaited.clear()


def _write_the_rest(ledger: Ledger, awaited: list[AwaitedRelease], process: int) -> None:
    """For an engine that was collected, or left in the middle of a loop."""
    if os.getpid() != process or ledger.path is None or not ledger.path.exists():
        return
    with contextlib.suppress(GradveilError, OSError):  # said before, when a release was refused; nothing follows it
        _add_digest(ledger, awaited)
        ledger.commit()


def _begun(header: RunHeader, run_dir: Path | None, *, resume: bool, durability: Durability) -> Ledger:
    if run_dir is None:
        return Ledger(header)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{run_dir} cannot be made: {error.strerror}. Give another one.") from None
    path = run_dir / ledgers.FILE_NAME
    return Ledger.resume(path, header, durability=durability) if resume else Ledger(header, path, durability=durability)
