"""The report: one HTML file that shows what is proved, what leaks and what was not tested.

It asks nothing of the network, and holds no seed, no captured gradient and, unless ``examples`` are asked for, no
image. Everything that comes from files is escaped, and a policy in the page lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gradveil import __version__
from gradveil.accounting._rounding import at_least, at_most
from gradveil.accounting.manifest import settings_of
from gradveil.accounting.tradeoff import Tradeoff, tradeoff
from gradveil.reports.charts import WITHHELD, figures, mark, must_withhold
from gradveil.reports.checklist import Item, checklist, not_tested
from gradveil.reports.comparison import HEADINGS, row_of, shown
from gradveil.reports.facts import RunFacts
from gradveil.reports.reconstructions import Row, Trial, number, trial_of
from gradveil.reports.verdicts import ABOUT, GLOSSARY, Plain, percent, plain
from gradveil.training.run_directory import write_whole

if TYPE_CHECKING:
    from gradveil.accounting import ProvedEpsilon

_HERE = Path(__file__).parent
# What is shown of audit.json, if it is there, and under which name.
_AUDIT = {
    "unit": "of",
    "epsilon_proved": "proved, at most",
    "epsilon_as_published": "as published",
    "verdict": "verdict",
    "statistic": "statistic",
    "method": "method",
    "delta": "delta",
    "confidence": "confidence",
    "neighbours": "neighbours",
    "trials": "trials",
    "tests": "tests that share the confidence",
    "threat_model": "the auditor",
}


# Of the table: those of the comparison that tell runs apart, and two that are only here.
_COLUMNS = {
    "run": "run",
    "strategy": "strategy",
    "steps": "steps",
    "accuracy": "accuracy",
    "epsilon_proved": "epsilon, proved",
    "mu": "mu",
    "found": "found at 1 % FPR",
    "epsilon_as_published": "published (MA)",
    "epsilon_audited": "audited, at least",
    "attack_psnr": "attack, dB",
    "attack_success": "beats guessing",
}


def write_page(runs: Sequence[RunFacts], path: Path, *, examples: int = 0, title: str | None = None) -> None:
    """Write the report of ``runs`` to ``path``, whole or not at all.

    ``examples``: of how many victims of each attack the images are shown, which are training examples; then the file is
    for its owner only (mode 0600).
    """
    page = render(runs, examples=examples, title=title)
    write_whole(path, page.encode(), mode=0o600 if examples else 0o644)


def render(runs: Sequence[RunFacts], *, examples: int = 0, title: str | None = None) -> str:
    """The page as text."""
    runs = [_sound(run) for run in runs]
    labels = names_apart(runs)
    shown_runs = [
        _Shown(label=label, style=i, run=run) for i, (label, run) in enumerate(zip(labels, runs, strict=True))
    ]
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("template.html")
    trials = [trial for s in shown_runs for trial in s.trials(examples)]
    now = datetime.now(UTC)
    context: dict[str, Any] = {
        "title": title or (f"Privacy report: {labels[0]}" if len(runs) == 1 else f"Privacy report: {len(runs)} runs"),
        "written": f"{now.day} {now:%B %Y, %H:%M} UTC",
        "version": __version__,
        "runs": shown_runs,
        "examples": examples,
        "trials": trials,
        "iterations": sorted({frame.at for trial in trials for row in trial.rows for frame in row.frames}),
        "headings": _COLUMNS,
        "glossary": GLOSSARY,
        "groups": figures(list(zip(labels, runs, strict=True))),
        "general": _general(runs),
    }
    script = environment.get_template("template.html").blocks["script"]
    text = "".join(script(template.new_context(context)))
    context["script_hash"] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return template.render(context)


def names_apart(runs: Sequence[RunFacts]) -> list[str]:
    """A name for each run: its folder's, with as many folders above it as tell it from the others."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({i})" for i, run in enumerate(runs, start=1)]


def _sound(run: RunFacts) -> RunFacts:
    """Records that are whole but make no sense are shown as a ledger that does not hold."""
    try:
        _ = run.statement
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"its lines are intact, but their contents are inconsistent ({error})."
        return replace(run, contents=None, ledger_problem=why)
    return run


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``kind`` is one of: proved, nothing proved, ledger invalid, not private, nothing released."""

    kind: str
    sentence: str
    meaning: str
    because: str = ""


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """A run as the template reads it."""

    label: str
    style: int
    run: RunFacts

    @property
    def mark(self) -> Markup:
        return mark(self.style)

    @property
    def ident(self) -> str:
        return f"run-{self.style + 1}"

    @property
    def verdict(self) -> Verdict:
        run, statement = self.run, self.run.statement
        no_limit = "There is no proved limit on what can be learned about one example."
        if run.ledger_problem is not None:
            broken, why = "The ledger failed verification:", run.ledger_problem
            return Verdict(kind="ledger invalid", sentence=broken, because=why, meaning=no_limit)
        if statement is None:
            why = "There is no ledger: nothing was released."
            return Verdict(kind="nothing released", sentence=why, meaning="")
        if statement.header.guarantee == "none":
            return Verdict(kind="not private", sentence="Not private: trained without noise.", meaning=no_limit)
        proved = statement.proved
        meaning = statement.meaning()
        meaning = meaning[0].upper() + meaning[1:]
        if not math.isfinite(proved.epsilon):
            why = f"because {proved.reason}."
            return Verdict(kind="nothing proved", sentence="Nothing is proved,", because=why, meaning=meaning)
        if proved.steps_charged == 0:
            return Verdict(kind="nothing released", sentence="Nothing was released yet: epsilon is 0.", meaning="")
        return Verdict(
            kind="proved",
            sentence=f"epsilon ≤ {at_most(proved.epsilon)} at delta = {number(proved.delta)} under "
            f"{proved.neighbours}: proved.",
            meaning=meaning,
        )

    @property
    def plain(self) -> Plain:
        return plain(self.run)

    @cached_property
    def tradeoff(self) -> Tradeoff | None:
        run = self.run
        return None if run.contents is None else tradeoff(run.contents.header, run.contents.charged())

    @property
    def rates(self) -> list[tuple[str, str]]:
        """What any test for one example can do, beside epsilon."""
        if self.tradeoff is None:
            return []
        rates = self.tradeoff.true_positive_rates
        return [
            ("mu, Gaussian DP", at_most(self.tradeoff.mu, digits=3)),
            ("found at 1 % false positives", f"at most {percent(rates[0.01])}"),
            ("found at 0.1 % false positives", f"at most {percent(rates[0.001])}"),
        ]

    @property
    def about(self) -> list[tuple[str, str]]:
        told = self.run.about
        others = [(name.replace("_", " "), text) for name, text in told.items() if name not in ABOUT]
        return [(words, told.get(name) or "not stated") for name, words in ABOUT.items()] + others

    @property
    def files(self) -> list[tuple[str, str]]:
        """Which files the ledger binds, by state."""
        states = dict.fromkeys(file.state for file in self.run.files)
        return [
            (state, ", ".join(f.path for f in self.run.files if f.state == state))
            for state in states
            if state != "left out"
        ]

    @property
    def settings(self) -> str:
        """As the ledger records them."""
        told = None if self.run.contents is None else settings_of(self.run.contents)
        if told is not None:
            return json.dumps(told, indent=1, ensure_ascii=False)
        return "" if self.run.config is None else self.run.config.to_toml()

    def first_picture(self, examples: int) -> Row | None:
        """Of the strongest attack: the first victim, and what came back of it."""
        strongest = self.run.strongest
        if not examples or strongest is None:
            return None
        return next(iter(trial_of(self.label, self.style, strongest, 1).rows), None)

    @property
    def state(self) -> str:
        run = self.run
        if run.ledger_problem is not None:
            return "Ledger invalid: what was released is unknown."
        if run.contents is None:
            return "Not started: no step was taken."
        declared = run.contents.header.steps
        if run.contents.ended is None:
            return (
                f"Not finished: interrupted or still running after step {run.steps_taken} of {declared}. This page "
                "covers what was released so far."
            )
        if run.contents.ended == "finished":
            return f"Finished: {run.steps_taken} of {declared} steps taken."
        return f"Ended after step {run.steps_taken} of {declared}: {run.contents.ended}"

    @property
    def bounds(self) -> list[dict[str, str]]:
        """The proved value under both neighbours."""
        statement = self.run.statement
        return [] if statement is None else [_bound(p) for p in (statement.proved, statement.proved_other)]

    @property
    def withheld(self) -> str:
        """Why the published figures are not shown, if they are not."""
        return WITHHELD if must_withhold(self.run) else ""

    @property
    def statement(self) -> str:
        """In full, but for what must not be shown."""
        text = str(self.run.statement or "")
        if self.withheld:
            text = re.sub(r"^As published:.*?(?=^Audited:)", f"As published:   {WITHHELD}\n", text, flags=re.M | re.S)
        return text

    @property
    def published(self) -> list[dict[str, str]]:
        statement = self.run.statement
        if statement is None or self.withheld:
            return []
        names = {"AdvC-printed": "AdvC, as printed"}
        return [
            {
                "name": names.get(name, name),
                "epsilon": number(p.epsilon),
                "quoted": number(p.delta_nominal),
                "spent": number(p.delta_total, 3),
                "warning": "; ".join(p.warnings),
            }
            for name, p in statement.paper.items()
        ]

    @property
    def audited(self) -> list[tuple[str, str]]:
        audit = self.run.audit
        if audit is None:
            return []
        kept = [
            (words, _bounded(audit[name], at_most) if name == "epsilon_proved" else number(audit[name]))
            for name, words in _AUDIT.items()
            if isinstance(audit.get(name), str | int | float)
        ]
        return [("epsilon is at least", _bounded(audit.get("epsilon_lower_bound"), at_least)), *kept]

    @property
    def fault(self) -> str:
        """A lower bound above the upper one cannot be."""
        found, proved = self.run.audited, self.run.audit_limit
        if found is not None and proved is not None and found > proved:
            return "Above the proved epsilon: the code, the accounting or the audit is wrong."
        return ""

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Of the table: what is written, and what it is sorted by."""
        row = row_of(self.run) | {"run": self.label}
        if self.withheld:
            row["epsilon_as_published"] = None
        row["mu"] = None if self.tradeoff is None else self.tradeoff.mu
        row["found"] = None if self.tradeoff is None else self.tradeoff.true_positive_rates[0.01]
        words = dict(zip(HEADINGS, shown(row), strict=True))
        words["mu"] = "-" if row["mu"] is None else at_most(row["mu"], digits=3)
        words["found"] = "-" if row["found"] is None else percent(row["found"])
        if row["attack"] is not None:
            words["attack_psnr"] = f"{row['attack_psnr']:.1f} by {row['attack']} (guess {words['attack_guess_psnr']})"
        if isinstance(row["attack_success"], float):
            words["attack_success"] = f"{row['attack_success']:.0%}"
        if row["epsilon_audited"] is not None and row["audited_unit"] != "a whole run":
            words["epsilon_audited"] += f" of {row['audited_unit']}"
        return [(words[name], "" if row[name] is None else str(row[name])) for name in _COLUMNS]

    @property
    def checklist(self) -> list[Item]:
        return checklist(self.run)

    @property
    def not_tested(self) -> list[str]:
        return not_tested(self.run)

    def trials(self, examples: int) -> list[Trial]:
        return [trial_of(self.label, self.style, attack, examples) for attack in self.run.attacks]

    @property
    def reproduce(self) -> list[tuple[str, str]]:
        run, told = self.run, dict(self.run.environment)
        command = told.pop("command", None)
        words = " ".join(map(str, command)) if isinstance(command, list) else "not recorded"
        found = [("run directory", str(run.path)), ("command", words)]
        if run.config is not None:
            found.append(("digest of the settings", run.config.digest()))
        if run.contents is not None:
            found.append(("ledger", f"{run.contents.length} lines, head {run.contents.head}"))
            found.append(("ledger written by gradveil", run.contents.header.gradveil_version or "an unknown version"))
        return found + [(name.replace("_", " "), str(value)) for name, value in told.items() if "seed" not in name]


def _bounded(value: object, printed: Callable[[float], str]) -> str:
    """A bound from a file, rounded to the safe side."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return printed(float(value)) if is_number else number(value)  # type: ignore[arg-type]


def _bound(proved: ProvedEpsilon) -> dict[str, str]:
    return {
        "epsilon": at_most(proved.epsilon),
        "delta": number(proved.delta),
        "neighbours": proved.neighbours,
        "sampler": proved.sampler,
        "accountant": proved.accountant,
        "steps": str(proved.steps_charged),
        "reason": proved.reason or "",
    }


def _general(runs: Sequence[RunFacts]) -> Mapping[str, Any] | None:
    """The trust model and what no statement covers: the same for all runs, so that of one for which much is proved."""
    known = [run.statement for run in runs if run.statement is not None]
    return min(known, key=lambda statement: statement.proved.epsilon).to_dict() if known else None
