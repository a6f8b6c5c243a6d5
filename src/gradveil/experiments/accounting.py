"""What five accountants say of the same runs, and how accurate these are: C = 4, sigma = 6."""

from __future__ import annotations

from gradveil.experiments import published, sensitivity
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.experiment import DYNAMIC_SENSITIVITY, READINGS, Experiment, Found, Row, proved, share
from gradveil.experiments.plan import Plan

CLIP = 4.0


def cells(plan: Plan) -> list[Cell]:
    sets = plan.sets_of(*sensitivity.SETS)
    return [cell for name in sets for row in DYNAMIC_SENSITIVITY for cell in sensitivity.runs(plan, name, row, CLIP)]


def report(plan: Plan, found: Found) -> Report:
    spent: list[Entry] = []
    accuracies: list[Entry] = []
    means: dict[str, dict[str, float]] = {}
    orders: list[bool] = []
    for dataset in plan.sets_of(*sensitivity.SETS):
        first = found[sensitivity.runs(plan, dataset, Row("baseline"), CLIP)[0]]
        told = published.ACCOUNTING.get(dataset, {})
        for method in published.METHODS:
            epsilon = first["as_published"][method]
            where = {"set": dataset, "accountant": method}
            given = told.get(method)
            tolerance = 0.0015 * given if given is not None else 0.0
            spent.append(Entry(where=where, published=given, measured=[epsilon], tolerance=tolerance))
        by_method = first["as_published"]
        orders.append(by_method["MA"] < by_method["zCDP"] < min(by_method[m] for m in ("BaseC", "AdvC", "OptC")))
        for row in DYNAMIC_SENSITIVITY:
            mine = sensitivity.runs(plan, dataset, row, CLIP)
            accuracy = found.figures_of(mine, "accuracy")
            means.setdefault(dataset, {})[row.label] = sum(accuracy) / len(accuracy)
            accuracies.append(
                Entry(
                    where={"set": dataset, "strategy": row.label},
                    published=published.SENSITIVITY.get(dataset, {}).get(row.strategy, {}).get(CLIP),
                    measured=accuracy,
                    digits=4,
                    tolerance=sensitivity.TOLERANCE,
                    beside={"MA, as published": f"{by_method['MA']:.3f}", "proved epsilon": proved(found[mine[0]])},
                )
            )
    tables = [
        Table.of(
            "Epsilon as published, the same for all four algorithms",
            spent,
            "Measured: the published formulas on the run's own ledger; the sampling rate is the batch size over the "
            "training examples, .0097 for LFW where the paper takes .01.",
        ),
        Table.of("Accuracy at C = 4, sigma = 6", accuracies),
    ]
    claims = [
        Claim.judged(
            "accounting 1",
            "the moments accountant counts least, zCDP next, on every set",
            {"all": all(orders)},
            share(orders),
        ),
        _best(means),
    ]
    return Report(tables=tables, entries=[*spent, *accuracies], claims=claims)


def _best(means: dict[str, dict[str, float]]) -> Claim:
    held, told = {}, []
    for reading in READINGS:
        mine = Row("dyn-s", reading).label
        others = ("baseline", "dyn-s-decay", Row("dyn-s-l2max", reading).label)
        wins = [rows[mine] > max(rows[other] for other in others) for rows in means.values()]
        held[reading] = all(wins)
        told.append(f"{reading}: first on {share(wins)} sets")
    text = "decay and l2-max together are the most accurate at the same published epsilon"
    return Claim.judged("accounting 2", text, held, "; ".join(told))


EXPERIMENT = Experiment(
    name="accounting",
    title="Five accountants on the same runs, and their accuracy: C = 4, sigma = 6",
    paper="table of privacy spending under five accountants",
    cells=cells,
    report=report,
)
