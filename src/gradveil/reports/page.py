"""The report: one HTML file that shows what is proved, what leaks and what was not tested.

It asks nothing of the network, and holds no seed, no captured gradient and, unless ``examples`` are asked for, no
image. Everything that comes from files is escaped, and a policy in the page lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gradveil import __version__
from gradveil.errors import DataError
from gradveil.reports.charts import WITHHELD, figures, mark, must_withhold
from gradveil.reports.checklist import Item, checklist, not_tested
from gradveil.reports.comparison import HEADINGS, row_of, shown
from gradveil.reports.facts import AttackFacts, RunFacts
from gradveil.training.run_directory import write_whole

if TYPE_CHECKING:
    import numpy as np

    from gradveil.accounting import ProvedEpsilon

_HERE = Path(__file__).parent
# What is shown of audit.json, if it is there, and under which name.
_AUDIT = {
    "unit": "of",
    "epsilon_proved": "proved for that, at most",
    "epsilon_as_published": "as published for that",
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
        "headings": HEADINGS,
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
        why = f"its lines are whole, but what they say does not fit together ({error})."
        return replace(run, contents=None, ledger_problem=why)
    return run


def at_most(value: float) -> str:
    """A bound in four digits, rounded up: what is written is proved too.

    >>> at_most(1.11601), at_most(1.5), at_most(float("inf")), at_most(12345.6)
    ('1.117', '1.5', 'infinite', '12350')
    """
    if not math.isfinite(value):
        return "infinite"
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    up = math.ceil(value / unit - 1e-9) * unit
    return f"{up:.4g}" if up < 1e4 else f"{up:.0f}"


def number(value: object, digits: int = 4) -> str:
    """A number from a file, in words; a dash where there is none.

    >>> number(1e-5), number(None), number(float("inf"))
    ('1e-5', '-', 'infinite')
    """
    if value == "inf":
        return "infinite"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if not math.isfinite(value):
        return "infinite"
    return re.sub(r"e([+-])0", r"e\1", f"{value:.{digits}g}")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``kind`` is one of: proved, nothing proved, ledger invalid, not private, nothing released."""

    kind: str
    sentence: str
    meaning: str
    because: str = ""


@dataclass(frozen=True, kw_only=True)
class _Frame:
    at: int  # iteration
    name: str
    image: str  # a data URI
    psnr: str


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One victim."""

    original: _Frame
    frames: Sequence[_Frame]
    found: _Frame


@dataclass(frozen=True, kw_only=True)
class _Trial:
    run: str
    style: int
    attack: AttackFacts
    figures: Sequence[tuple[str, str]]
    rows: Sequence[_Row]
    problem: str = ""


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
        no_limit = "No limit is proved to what can be learned about one example."
        if run.ledger_problem is not None:
            broken, why = "The ledger does not hold:", run.ledger_problem
            return Verdict(kind="ledger invalid", sentence=broken, because=why, meaning=no_limit)
        if statement is None:
            why = "There is no ledger: nothing was released, and there is nothing to prove."
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
    def state(self) -> str:
        run = self.run
        if run.ledger_problem is not None:
            return "Ledger invalid: what was released is not known."
        if run.contents is None:
            return "Not begun: no step was taken."
        declared = run.contents.header.steps
        if run.contents.ended is None:
            return (
                f"Not ended: interrupted, or still running, after step {run.steps_taken} of {declared}. What is said "
                "here holds for what was released so far."
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
            (words, number(audit[name]))
            for name, words in _AUDIT.items()
            if isinstance(audit.get(name), str | int | float)
        ]
        return [("epsilon is at least", number(audit.get("epsilon_lower_bound"))), *kept]

    @property
    def fault(self) -> str:
        """A lower bound above the upper one cannot be."""
        found, proved = self.run.audited, self.run.audit_limit
        if found is not None and proved is not None and found > proved:
            return "More than what is proved: the code, the accounting or the audit is at fault."
        return ""

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Of the table: what is written, and what it is sorted by."""
        row = row_of(self.run) | {"run": self.label}
        if self.withheld:
            row["epsilon_as_published"] = None
        words = dict(zip(HEADINGS, shown(row), strict=True)) | {"delta": number(row["delta"])}
        if isinstance(row["epsilon_proved"], float):
            words["epsilon_proved"] = at_most(row["epsilon_proved"])
        if isinstance(row["attack_success"], float):
            words["attack_success"] = f"{row['attack_success']:.0%}"
        return [(words[name], "" if row[name] is None else str(row[name])) for name in HEADINGS]

    @property
    def checklist(self) -> list[Item]:
        return checklist(self.run)

    @property
    def not_tested(self) -> list[str]:
        return not_tested(self.run)

    def trials(self, examples: int) -> list[_Trial]:
        return [_trial(self, attack, examples) for attack in self.run.attacks]

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


# ---- reconstructions


def _trial(of: _Shown, attack: AttackFacts, examples: int) -> _Trial:
    rows: Sequence[_Row] = ()
    problem = ""
    if examples:
        try:
            rows = list(_rows(attack, examples))
        except (DataError, OSError, ValueError, KeyError, IndexError) as error:
            problem = f"Its pictures cannot be read: {error}"
        if not rows and not problem:
            problem = "It kept no pictures."
    return _Trial(run=of.label, style=of.style, attack=attack, figures=_figures(attack), rows=rows, problem=problem)


def _figures(attack: AttackFacts) -> list[tuple[str, str]]:
    result, settings, bound = attack.result, attack.trial["settings"], attack.trial.get("success_bound")
    found = [("seen", f"{settings.get('view', '-')}, step {settings.get('step', '-')}")]
    alone = settings.get("batch", 1) == 1
    found.append(("victims", f"{settings.get('victims', '-')}, {'each alone' if alone else 'in batches'}"))
    if attack.psnr is not None:
        found.append(("PSNR, median", f"{attack.psnr:.1f} dB{_interval(result.get('psnr_median_interval'))}"))
        found.append(("best guess without it", f"{number(result.get('guess_psnr_median'), 3)} dB"))
        found.append(("nearest 5 % of victims", f"{number(result.get('psnr_worst_5_percent'), 3)} dB"))
    elif "wrong_median" in result:
        found.append(
            ("wrong features, median", f"{number(result['wrong_median'])} of {number(result.get('features'))}")
        )
        found.append(("best guess without it", f"{number(result.get('guess_wrong_median'))} wrong"))
    found.append(("beats guessing by 6 dB", _share(result.get("success_rate"))))
    found.append(("proved limit to that", "none" if bound is None else f"at most {_share(bound)}"))
    found.append(("labels found", _share(result.get("labels_right"))))
    return found


def _share(value: object) -> str:
    return f"{100 * value:.3g} %" if isinstance(value, int | float) and math.isfinite(value) else "-"


def _interval(value: object) -> str:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value):
        return f" ({value[0]:.1f} to {value[1]:.1f})"
    return ""


def _rows(attack: AttackFacts, examples: int) -> Iterable[_Row]:
    pictures = attack.pictures()
    if "original" not in pictures or "found" not in pictures:
        return
    iterations = sorted(int(name.removeprefix("frame ")) for name in pictures if name.startswith("frame "))
    alone = attack.trial["settings"].get("batch") == 1  # in a batch it is not known which reconstruction is whose

    def frame(name: str, words: str, at: int, victim: int) -> _Frame:
        near = _psnr(pictures[name][victim], pictures["original"][victim]) if alone and name != "original" else ""
        return _Frame(at=at, name=words, image=_data_uri(pictures[name][victim]), psnr=near)

    for victim in range(min(examples, len(pictures["original"]))):
        yield _Row(
            original=frame("original", "original", 0, victim),
            frames=[frame(f"frame {i}", f"iteration {i}", i, victim) for i in iterations],
            found=frame("found", "final", iterations[-1] if iterations else 0, victim),
        )


def _psnr(x: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> str:
    error = float(((x - truth) ** 2).mean())
    return f"{-10 * math.log10(error):.1f} dB" if error > 0 else "exact"


def _data_uri(image: np.ndarray[Any, Any]) -> str:
    """A (C, H, W) image in [0, 1] as PNG."""
    import numpy as np
    from PIL import Image

    pixels = (255 * np.clip(image, 0, 1)).round().astype(np.uint8)
    grey = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels.mean(0)
    whole = io.BytesIO()
    Image.fromarray(grey.astype(np.uint8)).save(whole, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(whole.getvalue()).decode()
