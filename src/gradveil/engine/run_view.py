"""What is known of an engine's run: its plan, its ledger, and the statement that follows from it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from gradveil.accounting.ledger import Ledger
from gradveil.engine.release_log import ReleaseLog
from gradveil.engine.settings import Settings
from gradveil.engine.step import PrivateStep
from gradveil.errors import ConfigError
from gradveil.mechanism.records import Release, RunHeader
from gradveil.mechanism.strategies import PrivacyPlan

if TYPE_CHECKING:
    from gradveil.accounting import Statement


class RunView:
    """The part of :class:`~gradveil.PrivacyEngine` that changes nothing."""

    settings: Settings
    _plan: PrivacyPlan | None
    _private: PrivateStep | None
    _release_log: ReleaseLog | None
    _plain_steps: int  # taken, of a run without privacy

    @property
    def plan(self) -> PrivacyPlan:
        """The strategy with its numbers: what is public of every step."""
        if self._plan is None:
            raise ConfigError("the plan of this run follows from its data loader: call make_private first.")
        return self._plan

    @property
    def delta(self) -> float:
        return self.settings.delta

    @property
    def step(self) -> int:
        """How many steps the run has taken."""
        return self._plain_steps if self._private is None else self._private.index

    @property
    def is_set_up(self) -> bool:
        """Whether make_private was called."""
        return self._release_log is not None

    @property
    def _log(self) -> ReleaseLog:
        if self._release_log is None:
            raise ConfigError("the engine has no run yet: call make_private first.")
        return self._release_log

    @property
    def ledger(self) -> Ledger:
        return self._log.ledger

    @property
    def header(self) -> RunHeader:
        return self.ledger.header

    @property
    def releases(self) -> tuple[Release, ...]:
        """Every release so far, those of an earlier process of the same run included."""
        return tuple(self.ledger.releases)

    @property
    def epsilon(self) -> float:
        """The proved epsilon of the run at :attr:`delta`, as the statement has it; infinite where nothing is proved.

        All declared steps are charged from the first release on, unless ``stopping="public"``: a loop that sees what
        was released may stop because of it.
        """
        return 0.0 if self._release_log is None else self.statement().proved.epsilon

    @property
    def non_finite_examples(self) -> int:
        """How many examples had a gradient that is not finite and counted as zero, over all steps."""
        return 0 if self._private is None else self._private.not_finite.read(self.step)

    def __repr__(self) -> str:
        chosen = self.settings.strategy
        name = chosen if isinstance(chosen, str) else chosen.name
        if self._release_log is None:
            return f"PrivacyEngine({name}, not set up)"
        return f"PrivacyEngine({name}, step {self.step} of {self.plan.steps}, delta={self.delta:g})"

    def _repr_html_(self) -> str:
        text = str(self.statement()) if self._release_log is not None else repr(self)
        return f"<pre>{escape(text)}</pre>"

    def commit(self) -> None:
        """Sync the ledger to disk; called automatically before checkpoints and statements."""
        if self._release_log is not None:
            self.ledger.commit()

    def statement(self) -> Statement:
        """The privacy statement: what is proved, what is only as published, what is not covered. Print it."""
        from gradveil.accounting import statement
        from gradveil.accounting.evidence import checks_of

        self.commit()
        releases = self.releases
        return statement(self.header, releases, checks=checks_of(self.ledger.notes, batches=len(releases)))
