"""One run as one row: what ``gradveil compare`` prints and the report's table sorts by."""

from __future__ import annotations

import math
from typing import Any

from gradveil.accounting._rounding import at_least, at_most
from gradveil.reports.facts import RunFacts

HEADINGS = {
    "run": "run",
    "strategy": "strategy",
    "state": "state",
    "steps": "steps",
    "accuracy": "accuracy",
    "epsilon_proved": "eps proved",
    "neighbours": "neighbours",
    "delta": "delta",
    "epsilon_as_published": "eps as published (MA)",
    "epsilon_audited": "eps audited",
    "audited_unit": "audited, of",
    "epsilon_proved_of_audited": "eps proved of that",
    "noise_std_first": "noise first",
    "noise_std_last": "noise last",
    "attack": "attack",
    "attack_psnr": "attack, dB",
    "attack_guess_psnr": "guess, dB",
    "attack_success": "attack beats guessing",
    "seconds_per_step": "s/step",
}


def row_of(run: RunFacts) -> dict[str, Any]:
    """JSON-safe: an infinite epsilon is the string "inf"; None where there is nothing."""
    statement, strongest = run.statement, run.strongest
    paper = statement.paper.get("MA") if statement is not None else None
    releases = run.contents.releases if run.contents is not None else ()
    timed = [m for m in run.metrics if m.get("seconds") and m.get("step")]
    return {
        "run": run.name,
        "strategy": run.strategy,
        "state": run.state,
        "steps": run.steps_taken,
        "accuracy": run.accuracy,
        "epsilon_proved": _safe(run.proved),
        "neighbours": None if statement is None else statement.proved.neighbours,
        "delta": None if statement is None else statement.proved.delta,
        "epsilon_as_published": None if paper is None else _safe(paper.epsilon),
        "epsilon_audited": _safe(run.audited),
        "audited_unit": None if run.audit is None else str(run.audit.get("unit", "a whole run")),
        "epsilon_proved_of_audited": None if run.audit is None else _safe(run.audit_limit),
        "noise_std_first": max(releases[0].noise_std) if releases else None,
        "noise_std_last": max(releases[-1].noise_std) if releases else None,
        "attack": None if strongest is None else strongest.name,
        "attack_psnr": None if strongest is None else strongest.psnr,
        "attack_guess_psnr": None if strongest is None else strongest.result.get("guess_psnr_median"),
        "attack_success": None if strongest is None else strongest.result.get("success_rate"),
        "seconds_per_step": timed[-1]["seconds"] / timed[-1]["step"] if timed else None,
    }


def shown(row: dict[str, Any]) -> list[str]:
    """The row in words, in the order of ``HEADINGS``."""
    return [_rounded(name, row[name]) for name in HEADINGS]


_SPENT = ("eps proved", "published (MA)", "audited")
BRIEF = ("run", "strategy", "state", "accuracy", *_SPENT, "noise std", "attack", "s/step")


def brief(row: dict[str, Any]) -> list[str]:
    """The row for a terminal, in the order of ``BRIEF``: what belongs together in one column."""
    state = str(row["state"]).partition(",")[0]
    spent = [_rounded(name, row[name]) for name in ("epsilon_proved", "epsilon_as_published")]
    spent.append(_audited(row))
    noise = "-" if row["noise_std_first"] is None else f"{row['noise_std_first']:.3g} to {row['noise_std_last']:.3g}"
    attack = "not run"
    if row["attack"] is not None:
        attack = f"{row['attack']} {_words(row['attack_psnr'])} dB (guess {_words(row['attack_guess_psnr'])})"
    ends = [noise, attack, _words(row["seconds_per_step"])]
    return [row["run"], row["strategy"], state, _words(row["accuracy"]), *spent, *ends]


def _audited(row: dict[str, Any]) -> str:
    """The lower bound, and of what it is where that is not the whole run, which the other epsilons are of."""
    if row["epsilon_audited"] is None:
        return "-"
    told = f">= {_rounded('epsilon_audited', row['epsilon_audited'])}"
    if row["audited_unit"] == "a whole run":
        return told
    of = "epsilon_proved_of_audited"
    return f"{told} in {row['audited_unit']} (proved {_rounded(of, row[of])})"


_SAFE_SIDE = {"epsilon_proved": at_most, "epsilon_proved_of_audited": at_most, "epsilon_audited": at_least}


def _rounded(name: str, value: Any) -> str:
    """In words; an upper bound is never rounded down, a lower one never up."""
    return _SAFE_SIDE[name](value) if name in _SAFE_SIDE and isinstance(value, float) else _words(value)


def _words(value: Any) -> str:
    if value is None:
        return "-"
    if value == "inf":
        return "infinite"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _safe(value: Any) -> float | str | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else "inf"
