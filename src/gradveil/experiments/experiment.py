"""What an experiment is: cells to run, and a report made of their results. And what several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.experiments.cells import Cell, Result
from gradveil.experiments.compare import Report
from gradveil.experiments.plan import Plan


@dataclass(frozen=True)
class Found:
    """Results of cells, by cell. ``folder`` is where figures go; ``cells`` where each cell's own files lie."""

    results: Mapping[str, Result]
    folder: Path
    cells: Callable[[Cell], Path]

    def __getitem__(self, cell: Cell) -> Result:
        return self.results[cell.key]

    def figures_of(self, cells: Iterable[Cell], name: str) -> list[float]:
        """One figure of each."""
        return [float(self[cell][name]) for cell in cells]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """``paper`` names the table or figure that it reruns; empty where it is one of ours."""

    name: str
    title: str
    paper: str
    cells: Callable[[Plan], Sequence[Cell]]
    report: Callable[[Plan, Found], Report]


@dataclass(frozen=True)
class Row:
    """A strategy of the paper's tables, in one of the readings of l2-max where it has two."""

    strategy: str
    reading: str | None = None

    @property
    def label(self) -> str:
        return self.strategy if self.reading is None else f"{self.strategy}, {self.reading} reading"

    @property
    def settings(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "reading": self.reading}


READINGS = ("example", "batch")


def rows_of(*strategies: str) -> tuple[Row, ...]:
    """Both readings side by side wherever there are two."""
    from gradveil.mechanism import strategies as known

    found: list[Row] = []
    for name in strategies:
        two = known.get(name).sensitivity == "l2max"
        found += [Row(name, reading) for reading in READINGS] if two else [Row(name)]
    return tuple(found)


DYNAMIC_SENSITIVITY = rows_of("baseline", "dyn-s-decay", "dyn-s-l2max", "dyn-s")


def proved(result: Result) -> str:
    """The proved epsilon of a training run, as a word where there is none."""
    epsilon = result["proved"]["epsilon"]
    return "infinite" if epsilon == "inf" or epsilon is None else f"{float(epsilon):.3f}"


def step_reaching(result: Result, target: float) -> Result | None:
    """The first look at which the test accuracy was at least the target; None: never."""
    return next((look for look in result["trace"] if look["accuracy"] >= target), None)


def share(values: Iterable[bool]) -> str:
    """How many of some comparisons hold, in words.

    >>> share([True, False, True])
    '2 of 3'
    """
    known = list(values)
    return f"{sum(known)} of {len(known)}"
