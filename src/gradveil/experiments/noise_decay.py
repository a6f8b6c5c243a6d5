"""Accuracy at an epsilon as published, with sigma decaying from 6 by three policies: where does each accountant end?

The paper gives no rates. Each policy's is fitted here to one of its figures, the step at which the moments accountant
has spent what sigma = 6 spends over the whole run; the other four ends, and all accuracies, are then compared. Runs are
of full length, and their accuracy is that of the last look before an accountant's end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from gradveil.accounting import paper_curve
from gradveil.experiments import published, sensitivity
from gradveil.experiments.cells import Cell, Result
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.experiment import READINGS, Experiment, Found, Row, proved, rows_of, share
from gradveil.experiments.plan import Plan
from gradveil.mechanism import schedules
from gradveil.training.config import DEFAULTS
from gradveil.training.data import CATALOGUE

CLIP, SIGMA, DELTA = 4.0, 6.0, 1e-5
ROWS = rows_of("dyn-sigma", "dyn-sigma-decay", "dyn-sigma-l2max", "dyn-s-sigma")
FIXED = {
    "dyn-sigma": "baseline",
    "dyn-sigma-decay": "dyn-s-decay",
    "dyn-sigma-l2max": "dyn-s-l2max",
    "dyn-s-sigma": "dyn-s",
}
_LEVELS = 200
_PAPER_STEPS = DEFAULTS["mnist"][0]


def dataset(plan: Plan) -> str:
    return plan.sets_of("mnist")[0]


def rate(plan: Plan) -> float:
    return float(plan.length(dataset(plan))["batch_size"] / CATALOGUE[dataset(plan)].train)


@lru_cache
def end_sigma(policy: str, *, start: float, steps: int, at: int, q: float) -> float:
    """Where sigma must end, that MA has counted after step ``at`` what it counts for sigma = 6 over all steps."""
    budget = _spent([SIGMA] * steps, q)
    low, high = 0.02 * start, start
    for _ in range(20):
        middle = math.sqrt(low * high)
        if _spent(_coarse(_sigmas(policy, start, steps, middle)[:at]), q) > budget:
            low = middle  # too little noise is left
        else:
            high = middle
    return high


def fitted_end(policy: str, steps: int, q: float) -> float:
    """Such that MA ends where the paper's does: at the same share of the steps."""
    at = round(published.NOISE_DECAY[policy].iterations["MA"] / _PAPER_STEPS * steps)
    return end_sigma(policy, start=SIGMA, steps=steps, at=at, q=q)


def _sigmas(policy: str, start: float, steps: int, end: float) -> list[float]:
    schedule = schedules.decay(policy, start, end=end, steps=steps)
    return [schedule(t) for t in range(steps)]


def _coarse(sigmas: Sequence[float]) -> list[float]:
    """As many steps, but few different sigmas: each stands for its neighbours. Ten times as quick to account for."""
    every = -(-len(sigmas) // _LEVELS)
    middles = [sigmas[min(i + every // 2, len(sigmas) - 1)] for i in range(0, len(sigmas), every)]
    return [sigma for sigma in middles for _ in range(every)][: len(sigmas)]


def _spent(sigmas: Sequence[float], q: float) -> float:
    return float(paper_curve(sigmas, q, DELTA, methods=["MA"])["MA"][-1])


def ends(policy: str, steps: int, q: float) -> dict[str, int]:
    """The step after which each accountant has spent what it counts for sigma = 6 over all steps."""
    fixed = paper_curve([SIGMA] * steps, q, DELTA)
    moving = paper_curve(_sigmas(policy, SIGMA, steps, fitted_end(policy, steps, q)), q, DELTA)
    slack = 1.0 + 1e-9
    return {m: int(np.searchsorted(moving[m], fixed[m][-1] * slack, side="right")) for m in published.METHODS}


def run(plan: Plan, policy: str, row: Row, *, name: str | None = None) -> Cell:
    """One run; ``name``: on another data set."""
    where = name or dataset(plan)
    length = plan.length(where)
    q = length["batch_size"] / CATALOGUE[where].train
    end = fitted_end(policy, length["steps"], q)
    return plan.train(where, **row.settings, clip=CLIP, sigma=SIGMA, sigma_decay=policy, sigma_end=end)


def cells(plan: Plan) -> list[Cell]:
    fixed = [sensitivity.runs(plan, dataset(plan), row, CLIP)[0] for row in _fixed_rows()]
    return [*fixed, *(run(plan, policy, row) for policy in published.POLICIES for row in ROWS)]


def _fixed_rows() -> tuple[Row, ...]:
    return tuple(Row(FIXED[row.strategy], row.reading) for row in ROWS)


def last_look(result: Result, step: int) -> Result | None:
    """The last look that was not after a step."""
    before = [look for look in result["trace"] if look["step"] <= step]
    return before[-1] if before else None


def report(plan: Plan, found: Found) -> Report:
    steps = plan.length(dataset(plan))["steps"]
    compared = plan.scale == "full" and dataset(plan) == "mnist"
    where_ends: list[Entry] = []
    accuracies: list[Entry] = []
    table: dict[str, dict[str, dict[str, float]]] = {"fixed sigma": {}}
    for row, mine in zip(ROWS, _fixed_rows(), strict=True):
        result = found[sensitivity.runs(plan, dataset(plan), mine, CLIP)[0]]
        told = published.NOISE_DECAY_FIXED[mine.strategy] if compared else None
        accuracies.append(_accuracy("fixed", mine.label, "all", told, result["accuracy"], proved(result)))
        table["fixed sigma"][row.label] = {method: float(result["accuracy"]) for method in published.METHODS}
    for policy in published.POLICIES:
        stops = ends(policy, steps, rate(plan))
        printed = published.NOISE_DECAY[policy]
        for method, stop in stops.items():
            told = printed.iterations[method] if compared else None
            where = {"sigma": policy, "accountant": method}
            where_ends.append(Entry(where=where, published=told, measured=[stop], digits=0, tolerance=0.005 * steps))
        for row in ROWS:
            result = found[run(plan, policy, row)]
            for method, stop in stops.items():
                look = last_look(result, stop)
                if look is None:
                    continue
                told = printed.accuracies[row.strategy][method] if compared else None
                accuracies.append(_accuracy(policy, row.label, method, told, look["accuracy"], proved(result)))
                table.setdefault(policy, {}).setdefault(row.label, {})[method] = look["accuracy"]
    tables = [
        Table.of(
            "Where each accountant's budget ends",
            where_ends,
            "The rate of each policy is fitted to the published end of MA; the other four follow from it.",
        ),
        Table.of(
            "Accuracy at that end",
            accuracies,
            "Proved epsilon: of the whole run, to its last step; stopping earlier spends less.",
            folded=True,
        ),
    ]
    tables.insert(1, _pivot(accuracies))
    return Report(tables=tables, entries=[*where_ends, *accuracies], claims=_claims(table), data={"accuracy": table})


def _pivot(entries: Sequence[Entry]) -> Table:
    """Measured, and published in brackets."""
    rows = []
    for policy, label in dict.fromkeys((e.where["sigma"], e.where["strategy"]) for e in entries):
        by = {e.where["accountant"]: e for e in entries if (e.where["sigma"], e.where["strategy"]) == (policy, label)}
        shown = [by.get(method, by.get("all")) for method in published.METHODS]
        cells = [
            "-" if e is None else f"{e.mean:.4f}" + (f" ({e.published:.4f})" if e.published else "") for e in shown
        ]
        rows.append([policy, label, *cells])
    head = ["sigma", "strategy", *published.METHODS]
    return Table(title="Accuracy where each accountant ends, and as published in brackets", head=head, rows=rows)


def _accuracy(policy: str, label: str, method: str, told: float | None, accuracy: float, epsilon: str) -> Entry:
    return Entry(
        where={"sigma": policy, "strategy": label, "accountant": method},
        published=told,
        measured=[accuracy],
        digits=4,
        tolerance=sensitivity.TOLERANCE,
        beside={"proved epsilon": epsilon},
    )


def _claims(table: dict[str, dict[str, dict[str, float]]]) -> list[Claim]:
    moving = {policy: rows for policy, rows in table.items() if policy != "fixed sigma"}
    helps: dict[str, bool | None] = {}
    best: dict[str, bool | None] = {}
    told_helps, told_best = [], []
    for reading in READINGS:
        labels = [row.label for row in ROWS if row.reading in (None, reading)]
        wins = [
            rows[label][m] > table["fixed sigma"][label][m]
            for rows in moving.values()
            for label in labels
            for m in rows[label]
        ]
        firsts = [
            rows[labels[-1]][m] >= max(rows[label][m] for label in labels)
            for rows in moving.values()
            for m in rows[labels[-1]]
        ]
        helps[reading], best[reading] = all(wins), all(firsts)
        told_helps.append(f"{reading}: {share(wins)}")
        told_best.append(f"{reading}: {share(firsts)}")
    every = [a for policy in ("linear", "cyclic") for a in _against("exponential", policy, moving)]
    return [
        Claim.judged(
            "noise decay 1",
            "a decaying sigma is more accurate than a fixed one at the same published epsilon",
            helps,
            "; ".join(told_helps),
        ),
        Claim.judged("noise decay 2", "everything together is the most accurate", best, "; ".join(told_best)),
        Claim.judged("noise decay 3", "exponential decay is the best policy", {"all": all(every)}, share(every)),
    ]


def _against(first: str, second: str, table: dict[str, dict[str, dict[str, float]]]) -> list[bool]:
    if first not in table or second not in table:
        return []
    return [table[first][r][m] >= table[second][r][m] for r in table[first] for m in table[first][r]]


EXPERIMENT = Experiment(
    name="noise-decay",
    title="Accuracy at a published epsilon with a decaying sigma",
    paper="table of eight algorithms under three decay policies",
    cells=cells,
    report=report,
)
