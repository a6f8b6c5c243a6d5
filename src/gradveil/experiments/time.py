"""Seconds per step of plain and private training, by data set."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gradveil.experiments import published
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.experiment import Experiment, Found, Row, rows_of, share
from gradveil.experiments.plan import Plan

SETS = ("mnist", "fashion-mnist", "cifar10", "lfw", "location", "retail-10")
PAPERS = rows_of("non-private", "baseline", "dyn-s-decay", "dyn-s-l2max", "dyn-s", "dyn-s-sigma")
ROWS = (*PAPERS, *rows_of("quantile-clip", "adaclip"))  # those of the experiment adaptive-clipping
_SLIGHT = 1.10  # what is called negligible here


def cell(plan: Plan, dataset: str) -> Cell:
    """Short runs of all rows in turn, timed while nothing else runs: what drifts on the machine drifts for all.

    ``steps`` of each are counted, after ``warm_up`` times as many that are not.
    """
    length = plan.length(dataset)
    steps, warm_up, repeats = 10, 1, 1
    if plan.scale == "full":  # a step of a CPU takes as long as its batch is large
        steps, warm_up, repeats = min(100, max(10, 6000 // length["batch_size"])), 1, 7
        if plan.device.startswith("cuda"):  # steps are captured after some, and the rarer graphs last
            steps, warm_up, repeats = (150, 3, 3) if length["batch_size"] >= 200 else (400, 1, 5)
    shared = {"dataset": dataset, "seed": 0, "device": plan.device, "repeats": repeats, "warm_up": warm_up}
    settings = [{k: v for k, v in row.settings.items() if v is not None} for row in ROWS]
    return Cell("time", {**shared, **length, "steps": steps, "rows": settings})


def seconds(plan: Plan, dataset: str, found: Found) -> dict[Row, list[float]]:
    """Per step, by row: one figure of each time round."""
    return dict(zip(ROWS, found[cell(plan, dataset)]["seconds_per_step"], strict=True))


def ratio(took: Sequence[float], base: Sequence[float]) -> list[float]:
    """Of each time round, to what was measured beside it."""
    return [mine / theirs for mine, theirs in zip(took, base, strict=True)]


def cells(plan: Plan) -> list[Cell]:
    return [cell(plan, dataset) for dataset in plan.sets_of(*SETS)]


def report(plan: Plan, found: Found) -> Report:
    entries: list[Entry] = []
    extra: list[bool] = []
    costs: dict[str, float] = {}
    for dataset in plan.sets_of(*SETS):
        took = seconds(plan, dataset, found)
        plain, baseline = took[PAPERS[0]], took[PAPERS[1]]
        told = published.SECONDS.get(dataset, {})
        costs[dataset] = median(ratio(baseline, plain))
        for row, mine in took.items():
            over = ratio(mine, plain)
            theirs = told.get(row.strategy)
            entries.append(
                Entry(
                    where={"set": dataset, "strategy": row.label},
                    published=None if theirs is None else theirs / told["non-private"],
                    measured=[median(over)],
                    digits=2,
                    tolerance=0.1,
                    beside={
                        "rounds": f"{min(over):.2f} to {max(over):.2f}",
                        "over baseline": f"{median(ratio(mine, baseline)):.2f}",
                        "seconds per step": f"{median(mine):.5f}",
                        "published seconds": "-" if theirs is None else f"{theirs:g}",
                    },
                )
            )
            if row in PAPERS[2:]:
                extra.append(median(ratio(mine, baseline)) <= _SLIGHT)
    note = (
        "Compared: seconds per step over those of plain training, the median of some rounds in which the strategies "
        "take turns. Absolute seconds are of different machines."
    )
    claims = [
        Claim.judged(
            "time 1",
            "dynamic parameters cost next to nothing over the baseline (at most 10 % more)",
            {"all": all(extra)},
            share(extra),
        ),
        Claim.judged(
            "time 2",
            "private training costs several times plain training",
            {"all": all(cost > 2.0 for cost in costs.values())},
            ", ".join(f"{name} {cost:.2f} times" for name, cost in costs.items()),
        ),
    ]
    tables = [Table.of(f"Time of a step, in units of a plain one, on {plan.device}", entries, note)]
    return Report(tables=tables, entries=entries, claims=claims)


EXPERIMENT = Experiment(
    name="time",
    title="Seconds per step of plain and private training",
    paper="table of time cost",
    cells=cells,
    report=report,
)
