"""What is spent until the baseline's accuracy is reached, at a fixed sigma of 6.

No run of its own: each run of full length is looked at now and then, and the first look at which the test accuracy is
the target's is where the paper would have stopped. The target is the accuracy that the baseline of the same seed ends
with. Stopping by the test accuracy looks at data; where that is private, all steps that were declared are charged.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradveil.experiments import published, sensitivity
from gradveil.experiments.cells import Cell, Result
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.experiment import (
    DYNAMIC_SENSITIVITY,
    READINGS,
    Experiment,
    Found,
    Row,
    proved,
    share,
    step_reaching,
)
from gradveil.experiments.plan import Plan

SETS = ("mnist", "fashion-mnist", "cifar10", "lfw")
CLIP = 4.0
NEVER = "never reached"
NOTE = (
    "Steps until the test accuracy is that of the baseline at the end (the paper's stopping rule: it looks at the test "
    "set). Proved, private test set: all declared steps are charged. Proved, public test set: the steps taken, by RDP."
)


def cells(plan: Plan) -> list[Cell]:
    return [
        cell
        for dataset in plan.sets_of(*SETS)
        for row in DYNAMIC_SENSITIVITY
        for cell in sensitivity.runs(plan, dataset, row, CLIP)
    ]


def report(plan: Plan, found: Found) -> Report:
    entries: list[Entry] = []
    steps: dict[str, dict[str, float | None]] = {}
    for dataset in plan.sets_of(*SETS):
        targets = [found[cell]["accuracy"] for cell in sensitivity.runs(plan, dataset, Row("baseline"), CLIP)]
        table = published.TARGET_ACCURACY.get(dataset)
        for row in DYNAMIC_SENSITIVITY:
            results = [found[cell] for cell in sensitivity.runs(plan, dataset, row, CLIP)]
            entry, looks = reaching(
                {"set": f"{dataset} ({statistics.fmean(targets):.4f})", "strategy": row.label},
                results,
                targets,
                table.spent[row.strategy] if table is not None else None,
            )
            entries.append(entry)
            reached = [look["step"] for look in looks if look is not None]
            steps.setdefault(dataset, {})[row.label] = statistics.fmean(reached) if len(reached) == len(looks) else None
    tables = [Table.of("Steps and privacy spent to the baseline's accuracy, sigma = 6", entries, NOTE)]
    return Report(tables=tables, entries=entries, claims=[_claim(steps)], data={"steps": steps})


def reaching(
    where: dict[str, str], results: Sequence[Result], targets: Sequence[float], told: published.Spent | None
) -> tuple[Entry, list[Result | None]]:
    """The steps that each run took to its target, with what had been spent by then."""
    looks = [step_reaching(result, target) for result, target in zip(results, targets, strict=True)]
    known = [look for look in looks if look is not None]
    beside: dict[str, str] = {}
    for method in published.METHODS:
        mine = [look["as_published"][method] for look in known]
        here = f"{statistics.fmean(mine):.3f}" if mine else "-"
        beside[method] = here if told is None else f"{here} ({told.epsilons[method]:.3f})"
    beside["proved, private test set"] = proved(results[0])
    rdp = [look["proved_rdp"] for look in known]
    finite = [value for value in rdp if value is not None]
    beside["proved, public test set"] = f"{statistics.fmean(finite):.3f}" if known and len(finite) == len(rdp) else "-"
    if len(known) < len(looks) and known:
        beside["proved, public test set"] += f"; reached by {len(known)} of {len(looks)} seeds"
    entry = Entry(
        where=where,
        published=None if told is None else told.iterations,
        measured=[look["step"] for look in known],
        digits=0,
        tolerance=0.05 * (told.iterations if told is not None else 0),
        missing=NEVER,
        beside=beside,
    )
    return entry, looks


def _claim(steps: dict[str, dict[str, float | None]]) -> Claim:
    held, told = {}, []
    for reading in READINGS:
        mine = Row("dyn-s", reading).label
        others = ("baseline", "dyn-s-decay", Row("dyn-s-l2max", reading).label)
        wins = []
        for by in steps.values():
            own = by[mine]
            wins.append(own is not None and all(by[o] is None or own < by[o] for o in others))  # type: ignore[operator]
        held[reading] = all(wins)
        told.append(f"{reading}: first on {share(wins)} sets")
    text = "decay and l2-max together reach the baseline's accuracy first, and so spend least"
    return Claim.judged("target accuracy 1", text, held, "; ".join(told))


EXPERIMENT = Experiment(
    name="target-accuracy",
    title="Privacy spent to the baseline's accuracy, sigma = 6",
    paper="table of privacy spending under a target accuracy and fixed noise scale",
    cells=cells,
    report=report,
)
