"""Gates: what a run must keep to, judged from its facts. A gate that cannot be judged has not been passed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from gradveil.reports.facts import RunFacts


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is asked of a run; None: not asked. ``neighbours`` default to those that suit the run's sampler."""

    max_epsilon: float | None = None
    neighbours: str | None = None
    max_delta: float | None = None
    max_attack_psnr: float | None = None
    min_accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One question and its answer. ``reason`` says why, whichever way it went."""

    run: str
    name: str
    passed: bool
    reason: str


def judge(run: RunFacts, limits: Limits) -> list[Gate]:
    """Every gate of one run; its ledger is always one, and so is each file that could not be read."""
    found = [_ledger(run), *(_gate(run, "files", False, problem) for problem in run.problems)]
    if limits.max_epsilon is not None:
        found.append(_epsilon(run, limits.max_epsilon, limits.neighbours))
    if limits.max_delta is not None:
        found.append(_delta(run, limits.max_delta))
    if limits.max_attack_psnr is not None:
        found.append(_attack(run, limits.max_attack_psnr))
    if limits.min_accuracy is not None:
        found.append(_accuracy(run, limits.min_accuracy))
    if run.audit is not None:
        found.append(_audit(run))
    return found


def _gate(run: RunFacts, name: str, passed: bool, reason: str) -> Gate:
    return Gate(run=run.name, name=name, passed=passed, reason=reason)


def _ledger(run: RunFacts) -> Gate:
    if run.ledger_problem is not None:
        return _gate(run, "ledger", False, f"the ledger does not hold: {run.ledger_problem}")
    if run.contents is None:
        return _gate(run, "ledger", False, "there is no ledger: what was released is not known.")
    lines = f"{run.contents.length} lines, each verified"
    torn = ", and one that a crash cut off, which is charged" if run.contents.torn else ""
    running = f"; still running: {run.writer} writes to it" if run.state == "running" else ""
    return _gate(run, "ledger", True, f"{lines}{torn}{running}.")


def _epsilon(run: RunFacts, limit: float, neighbours: str | None) -> Gate:
    name = "proved epsilon"
    if run.statement is None:
        return _gate(run, name, False, "nothing can be proved without a ledger that holds.")
    proved = run.statement.proved
    if neighbours is not None and neighbours != proved.neighbours:
        proved = run.statement.proved_other
    if not math.isfinite(proved.epsilon):
        why = f"no finite epsilon is proved under {proved.neighbours}, because {proved.reason}."
        return _gate(run, name, False, f"{why} A published figure does not pass.")
    at = f"epsilon = {proved.epsilon:.4g} at delta = {proved.delta:g} under {proved.neighbours} ({proved.accountant})"
    if proved.epsilon > limit:
        return _gate(run, name, False, f"{at} is more than {limit:g}.")
    return _gate(run, name, True, f"{at}, at most {limit:g}.")


def _delta(run: RunFacts, limit: float) -> Gate:
    if run.statement is None:
        return _gate(run, "delta", False, "nothing can be proved without a ledger that holds.")
    delta = run.statement.proved.delta
    return _gate(run, "delta", delta <= limit, f"delta = {delta:g}, at most {limit:g} is asked.")


def _attack(run: RunFacts, limit: float) -> Gate:
    name = "attack PSNR"
    strongest = run.strongest
    if strongest is None or strongest.psnr is None:
        tried = f"{len(run.attacks)} attack(s) without images" if run.attacks else "no attack was run"
        return _gate(run, name, False, f"{tried}: not shown to withstand one. Run: gradveil attack {run.path}")
    told = f"{strongest.name} reached {strongest.psnr:.1f} dB (median), the nearest of {len(run.attacks)} trial(s)"
    return _gate(run, name, strongest.psnr <= limit, f"{told}; at most {limit:g} dB is asked.")


def _accuracy(run: RunFacts, limit: float) -> Gate:
    if run.accuracy is None:
        return _gate(run, "accuracy", False, "no test accuracy was recorded.")
    return _gate(run, "accuracy", run.accuracy >= limit, f"{run.accuracy:.4f}, at least {limit:g} is asked.")


def _audit(run: RunFacts) -> Gate:
    """Always asked where there is an audit: a lower bound above what is proved is a fault of the code."""
    assert run.audit is not None
    bound, proved = run.audited, run.audit_limit
    if bound is None or proved is None:
        return _gate(run, "audit", False, "audit.json holds no lower bound that could be compared with what is proved.")
    unit = f" of {run.audit['unit']}" if "unit" in run.audit else ""
    told = f"audited epsilon{unit} is at least {bound:.4g}, proved at most {proved:.4g}"
    return _gate(run, "audit", bound <= proved, f"{told}.")


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
