"""Gates: what a run must keep to, judged from its facts. A gate that cannot be judged has not been passed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from gradveil.accounting._rounding import at_least, at_most
from gradveil.accounting.ledger import Contents
from gradveil.errors import DataError, LedgerError
from gradveil.reports import signatures
from gradveil.reports.facts import AUDIT, RESULT, RunFacts
from gradveil.training.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is asked of a run; None: not asked. ``neighbours`` default to those that suit the run's sampler."""

    max_epsilon: float | None = None
    neighbours: str | None = None
    max_delta: float | None = None
    max_attack_psnr: float | None = None
    min_accuracy: float | None = None
    unfinished: bool = False  # whether a run that has not ended, or has released nothing, may pass
    bound: bool = False  # whether what is judged must be bound to the ledger
    signed_by: Path | None = None  # a public key; what is judged must then be bound by lines that it signed
    head: str | None = None  # of a line of the ledger


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One question and its answer. ``reason`` says why, whichever way it went."""

    run: str
    name: str
    passed: bool
    reason: str
    invalid: bool = False  # failed because the ledger is not the one that was signed, or that the head is of


def judge(run: RunFacts, limits: Limits) -> list[Gate]:
    """Every gate of one run; its ledger is always one, and so is each file that could not be read."""
    found = [_ledger(run, limits), *(_gate(run, "files", False, problem) for problem in run.problems)]
    trust = _Trust(strict=limits.bound)
    if limits.signed_by is not None:
        found.append(_signature(run, limits.signed_by, trust))
    if limits.head is not None:
        found.append(_head(run, limits.head))
    if limits.max_epsilon is not None:
        found.append(_epsilon(run, limits.max_epsilon, limits.neighbours))
    if limits.max_delta is not None:
        found.append(_delta(run, limits.max_delta))
    if limits.max_attack_psnr is not None:
        found.append(_attack(run, limits.max_attack_psnr, trust))
    if limits.min_accuracy is not None:
        found.append(_accuracy(run, limits.min_accuracy, trust))
    if run.audit is not None:
        found.append(_audit(run, trust))
    return found


@dataclass
class _Trust:
    """By which files may be judged. ``unsigned``: those that were bound after the signature that was asked for."""

    strict: bool
    unsigned: tuple[str, ...] = ()


def _signature(run: RunFacts, key: Path, trust: _Trust) -> Gate:
    trust.strict = True
    if run.contents is None:
        return _gate(run, "signature", False, "there is no ledger that holds, so nothing that was signed.")
    try:
        found = signatures.verify(run.path, run.contents, key)
    except (LedgerError, signatures.NotSigned, DataError) as error:
        return replace(_gate(run, "signature", False, str(error)), invalid=isinstance(error, LedgerError))
    trust.unsigned = found.later
    later = f"; bound later, and not signed: {', '.join(found.later)}" if found.later else ""
    return _gate(run, "signature", True, f"{found.lines} lines signed by {found.key}{later}.")


def _head(run: RunFacts, head: str) -> Gate:
    if run.contents is None:
        return _gate(run, "head", False, "there is no valid ledger.")
    try:
        number = signatures.head_line(run.path, run.contents, head)
    except LedgerError as error:
        return replace(_gate(run, "head", False, str(error)), invalid=True)
    return _gate(run, "head", True, f"{head[:16]} is that of line {number}.")


def _gate(run: RunFacts, name: str, passed: bool, reason: str) -> Gate:
    return Gate(run=run.name, name=name, passed=passed, reason=reason)


def _ledger(run: RunFacts, limits: Limits) -> Gate:
    if run.ledger_problem is not None:
        return _gate(run, "ledger", False, f"the ledger failed verification: {run.ledger_problem}")
    if run.contents is None:
        return _gate(run, "ledger", False, "there is no ledger: what was released is unknown.")
    if run.contradictions:
        told = " ".join(run.contradictions)
        return _gate(run, "ledger", False, f"the run directory is not as its ledger says: {told}")
    if not limits.unfinished and (why := _unfinished(run.contents)) is not None:
        return _gate(run, "ledger", False, f"{why} --allow-unfinished lets it pass.")
    lines = f"{run.contents.length} lines, each verified"
    torn = ", and one that a crash cut off, which is charged" if run.contents.torn else ""
    bound = [file for file in run.files if file.state == "bound"]
    loose = [file.path for file in run.files if file.state == "not bound"]
    files = f"; {len(bound)} files bound" if bound else "; no file is bound to it (an older version wrote it)"
    if bound and loose:
        files += f", not bound: {', '.join(loose)}"
    running = f"; still running: {run.writer} writes to it" if run.state == "running" else ""
    told = f"{lines}{torn}{running}{files}."
    if limits.signed_by is None and limits.head is None:
        told += " Whether all of it was written anew is not known: no --signed-by and no --head was given."
    return _gate(run, "ledger", True, told)


def _unfinished(contents: Contents) -> str | None:
    """Why the ledger may not be whole; a ledger that was cut off has no end."""
    if contents.ended is None:
        return (
            "the run has not ended: it is running, was interrupted, or its ledger was cut off, so more may have been "
            "released than it holds."
        )
    if not contents.releases and contents.header.guarantee != "none":
        return f"the run declared {contents.header.steps} steps, and its ledger holds no release."
    return None


def _evidence(run: RunFacts, file: Path, trust: _Trust) -> tuple[bool, str]:
    """Whether a file may be judged by, and what is to be said of it."""
    name = file.relative_to(run.path).as_posix()
    if run.bound(file) and name not in trust.unsigned:
        return True, ""
    if run.bound(file):
        return False, f" ({name} was bound after the ledger was signed: sign it again)"
    return not trust.strict, f" ({name} is not bound to the ledger: it may be of another run, or edited)"


def _epsilon(run: RunFacts, limit: float, neighbours: str | None) -> Gate:
    name = "proved epsilon"
    if run.statement is None:
        return _gate(run, name, False, "nothing can be proved without a valid ledger.")
    proved = run.statement.proved
    if neighbours is not None and neighbours != proved.neighbours:
        proved = run.statement.proved_other
    if not math.isfinite(proved.epsilon):
        why = f"no finite epsilon is proved under {proved.neighbours}, because {proved.reason}."
        return _gate(run, name, False, f"{why} A published figure does not pass.")
    bound = f"epsilon = {at_most(proved.epsilon)} at delta = {proved.delta:g}"
    at = f"{bound} under {proved.neighbours} ({proved.accountant})"
    if proved.epsilon > limit:
        return _gate(run, name, False, f"{at} is more than {limit:g}.")
    return _gate(run, name, True, f"{at}, at most {limit:g}.")


def _delta(run: RunFacts, limit: float) -> Gate:
    if run.statement is None:
        return _gate(run, "delta", False, "nothing can be proved without a valid ledger.")
    delta = run.statement.proved.delta
    return _gate(run, "delta", delta <= limit, f"delta = {delta:g}; the limit is {limit:g}.")


def _attack(run: RunFacts, limit: float, trust: _Trust) -> Gate:
    name = "attack PSNR"
    strongest = run.strongest
    if strongest is None or strongest.psnr is None:
        tried = f"{len(run.attacks)} attack(s) without images" if run.attacks else "no attack was run"
        return _gate(
            run, name, False, f"{tried}, so resistance to attacks is not shown. Run: gradveil attack {run.path}"
        )
    misfits = {i: why for i, attack in enumerate(run.attacks) if (why := run.misfit(attack)) is not None}
    if len(misfits) == len(run.attacks):
        why = f"no attack was on what this run released: {next(iter(misfits.values()))}"
        return _gate(run, name, False, f"{why}. Run: gradveil attack {run.path}")
    trusted, note = _evidence(run, strongest.folder / RESULT, trust)
    told = f"{strongest.name} reached {strongest.psnr:.1f} dB (median), the best of {len(run.attacks)} attack(s)"
    return _gate(run, name, trusted and strongest.psnr <= limit, f"{told}; at most {limit:g} dB is asked{note}.")


def _accuracy(run: RunFacts, limit: float, trust: _Trust) -> Gate:
    if run.accuracy is None:
        return _gate(run, "accuracy", False, "no test accuracy was recorded.")
    trusted, note = _evidence(run, RunDirectory(run.path).metrics, trust)
    told = f"{run.accuracy:.4f}, at least {limit:g} is asked{note}."
    return _gate(run, "accuracy", trusted and run.accuracy >= limit, told)


def _audit(run: RunFacts, trust: _Trust) -> Gate:
    """Always asked where there is an audit: a lower bound above what is proved is a fault of the code."""
    assert run.audit is not None
    bound, proved = run.audited, run.audit_limit
    if bound is None or proved is None:
        return _gate(run, "audit", False, "audit.json has no lower bound to compare with the proved epsilon.")
    unit = f" of {run.audit['unit']}" if "unit" in run.audit else ""
    trusted, note = _evidence(run, run.path / AUDIT, trust)
    told = f"audited epsilon{unit} is at least {at_least(bound)}, proved at most {at_most(proved)}{note}"
    return _gate(run, "audit", trusted and bound <= proved, f"{told}.")


def to_junit(gates: Sequence[Gate]) -> str:
    """The gates as a JUnit test suite."""
    failed = [gate for gate in gates if not gate.passed]
    suite = ElementTree.Element("testsuite", name="gradveil check", tests=str(len(gates)), failures=str(len(failed)))
    for gate in gates:
        case = ElementTree.SubElement(suite, "testcase", classname=gate.run, name=gate.name)
        if not gate.passed:
            ElementTree.SubElement(case, "failure", message=gate.reason)
        else:
            ElementTree.SubElement(case, "system-out").text = gate.reason
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
