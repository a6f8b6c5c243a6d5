"""What was measured beside what was published: entries with a verdict in words, claims, and the tables of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HOLDS, PARTLY, FAILS, OPEN = "holds", "holds only in this reading", "does not hold", "not measured"
CLAIMED = "What is claimed, and what was seen here"
_COMPARED = ("published", "measured", "spread", "difference", "verdict")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One figure of a table: ``where`` it stands, by column, and what was published and measured there.

    ``tolerance``: a difference that is not called one; twice the standard error of the mean counts too.
    """

    where: Mapping[str, str]
    published: float | None
    measured: Sequence[float]
    digits: int = 3
    tolerance: float = 0.0
    missing: str = OPEN  # why nothing was measured, where nothing was
    beside: Mapping[str, str] = field(default_factory=dict)  # further columns, such as the proved epsilon

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.measured) if self.measured else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; None for a single one."""
        return statistics.stdev(self.measured) if len(self.measured) > 1 else None

    @property
    def difference(self) -> float | None:
        return None if self.published is None or self.mean is None else self.mean - self.published

    @property
    def verdict(self) -> str:
        if self.mean is None:
            return self.missing
        if self.difference is None:
            return "nothing published"
        error = 0.0 if self.spread is None else 2.0 * self.spread / math.sqrt(len(self.measured))
        if abs(self.difference) <= max(self.tolerance, error, 0.5 * 10.0**-self.digits) + 1e-9:
            return "agrees"
        return "higher" if self.difference > 0 else "lower"

    def cells(self) -> list[str]:
        def shown(value: float | None, sign: str = "") -> str:
            return "-" if value is None else format(value, f"{sign}.{self.digits}f")

        figures = [shown(self.published), shown(self.mean), shown(self.spread), shown(self.difference, "+")]
        return [*self.where.values(), *figures, self.verdict, *self.beside.values()]

    def to_dict(self) -> dict[str, Any]:
        computed = {"mean": self.mean, "spread": self.spread, "difference": self.difference, "verdict": self.verdict}
        return {**dict(self.where), "published": self.published, "measured": list(self.measured), **computed} | {
            "beside": dict(self.beside)
        }


@dataclass(frozen=True, kw_only=True)
class Table:
    """``folded``: long, and in a document shown to who asks for it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: bool = False

    @classmethod
    def of(cls, title: str, entries: Sequence[Entry], note: str = "", *, folded: bool = False) -> Table:
        head = [*entries[0].where, *_COMPARED, *entries[0].beside] if entries else []
        return cls(title=title, head=head, rows=[e.cells() for e in entries], note=note, folded=folded)

    def to_markdown(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in (self.head, *self.rows)]
        table = "\n".join([lines[0], "|" + "---|" * len(self.head), *lines[1:]])
        table += f"\n\n{self.note}" if self.note else ""
        if self.folded:
            return f"<details>\n<summary>{self.title}</summary>\n\n{table}\n\n</details>"
        return f"**{self.title}**\n\n{table}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An observation of the paper, in our words, and whether it was seen here."""

    name: str
    text: str
    verdict: str
    evidence: str

    @classmethod
    def judged(cls, name: str, text: str, readings: Mapping[str, bool | None], evidence: str) -> Claim:
        """From what each reading of l2-max gave; None: not measured there."""
        known = {reading: held for reading, held in readings.items() if held is not None}
        if not known:
            return cls(name=name, text=text, verdict=OPEN, evidence=evidence or "-")
        holding = [reading for reading, held in known.items() if held]
        if len(holding) == len(known):
            verdict = HOLDS
        elif holding:
            verdict = f"{PARTLY}: {', '.join(holding)}"
        else:
            verdict = FAILS
        return cls(name=name, text=text, verdict=verdict, evidence=evidence)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an experiment found."""

    tables: Sequence[Table]
    entries: Sequence[Entry] = ()
    claims: Sequence[Claim] = ()
    figures: Sequence[Path] = ()
    data: Mapping[str, Any] = field(default_factory=dict)  # what figures are drawn from, beyond the entries

    def to_dict(self) -> dict[str, Any]:
        return {
            "entries": [e.to_dict() for e in self.entries],
            "claims": [asdict(c) for c in self.claims],
            "tables": [asdict(t) for t in self.tables],
            "data": dict(self.data),
        }

    def to_markdown(self) -> str:
        parts = [table.to_markdown() for table in self.tables]
        if self.claims:
            rows = [[c.name, c.text, c.verdict, c.evidence] for c in self.claims]
            parts.append(Table(title=CLAIMED, head=["", "claim", "here", "figures"], rows=rows).to_markdown())
        return "\n\n".join(parts)
