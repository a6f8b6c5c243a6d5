"""A run as other tools and registries read it: one file for each form, each validated against its public schema.

What only a person can say (who publishes the model, what for, where) comes from ``about`` in the run's settings;
:attr:`Export.missing` names what is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from gradveil.errors import ConfigError, LedgerError, UnknownNameError
from gradveil.reports.facts import RunFacts

# By the name on the command line: the module, and the file it is written to by default.
FORMS = {
    "registry": ("registry", "registry.yaml"),
    "model-card": ("model_card", "README.md"),
    "cyclonedx": ("cyclonedx", "bom.cdx.json"),
    "statement": ("statement", "statement.json"),
}
NOT_STATED = "not stated"


@dataclass(frozen=True)
class Export:
    """The text of the file, and what of it only a person can give and nobody has."""

    text: str
    missing: tuple[str, ...] = ()


def export(run: RunFacts, form: str) -> Export:
    """``run`` in one of :data:`FORMS`; refused where its evidence does not hold."""
    if form not in FORMS:
        raise UnknownNameError("form", form, FORMS)
    if run.contents is None or run.statement is None:
        raise LedgerError(f"{run.path} has no ledger that holds: {run.ledger_problem or 'it is missing'}")
    if run.contradictions:
        raise LedgerError(f"{run.path} is not as its ledger says: {' '.join(run.contradictions)}")
    made: Callable[[RunFacts], Export] = import_module(f"gradveil.reports.exports.{FORMS[form][0]}").made
    return made(run)


def proved_or_refuse(run: RunFacts, what: str) -> float:
    """The proved epsilon; ``what`` is of private models only."""
    proved = run.proved
    if proved is None or proved == float("inf"):
        reason = run.statement.proved.reason if run.statement is not None else "there is no ledger"
        raise ConfigError(f"{what} states a proved epsilon, and none is proved for {run.path}, because {reason}.")
    return proved
