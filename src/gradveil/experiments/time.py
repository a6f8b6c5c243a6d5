"""Seconds per step of plain and private training, by data set."""

from __future__ import annotations

from gradveil.experiments import published
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.experiment import Experiment, Found, rows_of, share
from gradveil.experiments.plan import Plan

SETS = ("mnist", "fashion-mnist", "cifar10", "lfw", "location", "retail-10")
ROWS = rows_of("non-private", "baseline", "dyn-s-decay", "dyn-s-l2max", "dyn-s", "dyn-s-sigma")
_SLIGHT = 1.10  # what is called negligible here


def run(plan: Plan, dataset: str, settings: dict[str, object]) -> Cell:
    """Some short runs of one strategy, timed while nothing else runs."""
    length = plan.length(dataset)
    steps, repeats = (100, 3) if plan.scale == "full" else (20, 1)
    shared = {"dataset": dataset, "seed": 0, "device": plan.device, "repeats": repeats}
    kept = {k: v for k, v in settings.items() if v is not None}
    return Cell("time", {**shared, **length, "steps": steps, **kept})


def cells(plan: Plan) -> list[Cell]:
    return [run(plan, dataset, row.settings) for dataset in plan.sets_of(*SETS) for row in ROWS]


def report(plan: Plan, found: Found) -> Report:
    entries: list[Entry] = []
    extra: list[bool] = []
    costs: dict[str, float] = {}
    for dataset in plan.sets_of(*SETS):
        seconds = {row: float(found[run(plan, dataset, row.settings)]["seconds_per_step"]) for row in ROWS}
        plain, baseline = seconds[ROWS[0]], seconds[ROWS[1]]
        told = published.SECONDS.get(dataset)
        costs[dataset] = baseline / plain
        for row, took in seconds.items():
            ratio = None if told is None else told[row.strategy] / told["non-private"]
            entries.append(
                Entry(
                    where={"set": dataset, "strategy": row.label},
                    published=ratio,
                    measured=[took / plain],
                    digits=2,
                    tolerance=0.1,
                    beside={
                        "seconds per step": f"{took:.5f}",
                        "published seconds": "-" if told is None else f"{told[row.strategy]:g}",
                    },
                )
            )
            if row not in ROWS[:2]:
                extra.append(took <= _SLIGHT * baseline)
    note = "Compared: seconds per step over those of plain training; absolute seconds are of different machines."
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
