"""What is spent, as published, until the baseline's accuracy is reached at a fixed noise of standard deviation sigma C.

Here sigma_t = sigma C / S_t: the less S is, the less is counted as spent. What is proved does not follow S: noise of
the same size on sums that one example moves by C at most is the baseline, whatever S is called.
"""

from __future__ import annotations

import statistics

from gradveil.experiments import published, sensitivity
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.experiment import READINGS, Experiment, Found, Row, rows_of, share
from gradveil.experiments.plan import Plan
from gradveil.experiments.target_accuracy import NOTE, reaching

SETS = ("mnist", "cifar10")
MOVING = rows_of("dyn-s-decay", "dyn-s-l2max", "dyn-s")


def bounds(plan: Plan) -> tuple[float, ...]:
    return (4.0, 8.0) if plan.scale == "full" else (4.0,)


def runs(plan: Plan, dataset: str, row: Row, clip: float) -> list[Cell]:
    if row.strategy == "baseline":  # its S never moves: the same run with fixed variance and with fixed sigma
        return sensitivity.runs(plan, dataset, row, clip)[: len(plan.seeds_of())]
    settings = {**row.settings, "clip": clip, "sigma": 6.0, "fixed_variance": True}
    return [plan.train(dataset, **settings, seed=seed) for seed in plan.seeds_of()]


def cells(plan: Plan) -> list[Cell]:
    return [
        cell
        for dataset in plan.sets_of(*SETS)
        for clip in bounds(plan)
        for row in (Row("baseline"), *MOVING)
        for cell in runs(plan, dataset, row, clip)
    ]


def report(plan: Plan, found: Found) -> Report:
    entries: list[Entry] = []
    spent: dict[tuple[str, float], dict[str, float]] = {}
    for dataset in plan.sets_of(*SETS):
        for clip in bounds(plan):
            targets = [found[cell]["accuracy"] for cell in runs(plan, dataset, Row("baseline"), clip)]
            told = published.FIXED_VARIANCE.get((dataset, clip))
            for row in (Row("baseline"), *MOVING):
                results = [found[cell] for cell in runs(plan, dataset, row, clip)]
                where = {"set": f"{dataset} ({statistics.fmean(targets):.4f})", "C": f"{clip:g}", "strategy": row.label}
                reached, looks = reaching(where, results, targets, None)
                counted = [look["as_published"]["MA"] for look in looks if look is not None]
                printed = told.epsilons[row.strategy] if told is not None else None
                beside = {"steps": "-" if reached.mean is None else f"{reached.mean:.0f}", **reached.beside}
                beside.pop("MA")
                entries.append(
                    Entry(
                        where=where,
                        published=None if printed is None else printed["MA"],
                        measured=counted,
                        tolerance=0.01,
                        missing=reached.missing,
                        beside=beside,
                    )
                )
                if len(counted) == len(looks):
                    spent.setdefault((dataset, clip), {})[row.label] = statistics.fmean(counted)
    note = f"Compared: MA as published at that step. {NOTE}"
    tables = [Table.of("Privacy spent to the baseline's accuracy at fixed noise variance", entries, note)]
    return Report(tables=tables, entries=entries, claims=_claims(spent))


def _claims(spent: dict[tuple[str, float], dict[str, float]]) -> list[Claim]:
    least: dict[str, bool | None] = {}
    second: dict[str, bool | None] = {}
    told = []
    infinite = float("inf")
    for reading in READINGS:
        both, alone = Row("dyn-s", reading).label, Row("dyn-s-l2max", reading).label
        wins = [
            by.get(both, infinite) < min(by.get(alone, infinite), by.get("dyn-s-decay", infinite), by["baseline"])
            for by in spent.values()
        ]
        seconds = [by.get(alone, infinite) < by.get("dyn-s-decay", infinite) for by in spent.values()]
        least[reading], second[reading] = all(wins), all(seconds)
        told.append(f"{reading}: least in {share(wins)}, l2-max below decay in {share(seconds)}")
    evidence = "; ".join(told)
    return [
        Claim.judged("fixed variance 1", "decay and l2-max together spend least", least, evidence),
        Claim.judged("fixed variance 2", "l2-max spends less than a decaying clip bound", second, evidence),
    ]


EXPERIMENT = Experiment(
    name="fixed-variance",
    title="Privacy spent to the baseline's accuracy at a fixed noise variance",
    paper="table of privacy spending under a target accuracy and fixed noise variance",
    cells=cells,
    report=report,
)
