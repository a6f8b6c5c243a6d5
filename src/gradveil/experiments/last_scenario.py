"""What others must spend for the accuracy that l2-max ends with: the last scenario of the fixed-variance table.

The baseline and the decaying clip bound reach it with less noise only. They are run at smaller and smaller sigmas, and
the largest sigma at which the target is reached counts.
"""

from __future__ import annotations

from gradveil.experiments import published, sensitivity
from gradveil.experiments.cells import Cell, Result
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.experiment import Experiment, Found, Row, proved, step_reaching
from gradveil.experiments.plan import Plan

CLIP = 4.0
TARGET = Row("dyn-s-l2max", "batch")  # in the other reading l2-max is the baseline, and there is nothing to reach
KEPT = (TARGET, Row("dyn-s", "batch"))


def sigmas(plan: Plan) -> tuple[float, ...]:
    return (6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.7) if plan.scale == "full" else (6.0, 2.0)


def _dataset(plan: Plan) -> str:
    return plan.sets_of("mnist")[0]


def _run(plan: Plan, row: Row, sigma: float) -> Cell:
    if sigma == 6.0:
        return sensitivity.runs(plan, _dataset(plan), row, CLIP)[0]
    return plan.train(_dataset(plan), **row.settings, clip=CLIP, sigma=sigma)


def cells(plan: Plan) -> list[Cell]:
    searched = [_run(plan, Row(name), sigma) for name in ("baseline", "dyn-s-decay") for sigma in sigmas(plan)]
    return [*searched, *(_run(plan, row, 6.0) for row in KEPT)]


def report(plan: Plan, found: Found) -> Report:
    dataset = _dataset(plan)
    target = float(found[_run(plan, TARGET, 6.0)]["accuracy"])
    told = published.LAST_SCENARIO.get((dataset, CLIP))
    entries: list[Entry] = []
    spent: dict[str, float] = {}
    for row in (Row("baseline"), Row("dyn-s-decay"), *KEPT):
        tried = (6.0,) if row in KEPT else sigmas(plan)
        reached: tuple[float, Result, Result] | None = None
        for sigma in tried:
            result = found[_run(plan, row, sigma)]
            look = step_reaching(result, target)
            if look is not None:
                reached = (sigma, result, look)
                break
        epsilons = {} if reached is None else reached[2]["as_published"]
        printed = told.epsilons[row.strategy] if told is not None else None
        beside = {
            "sigma": "-" if reached is None else f"{reached[0]:g}",
            "steps": "-" if reached is None else str(reached[2]["step"]),
        }
        for method in ("BaseC", "AdvC", "OptC", "zCDP"):
            here = f"{epsilons[method]:.3f}" if epsilons else "-"
            beside[method] = here if printed is None else f"{here} ({printed[method]:.3f})"
        beside["proved epsilon"] = "-" if reached is None else proved(reached[1])
        where = {"set": f"{dataset} ({target:.4f})", "strategy": row.label}
        if epsilons:
            spent[row.label] = epsilons["MA"]
        entries.append(
            Entry(
                where=where,
                published=None if printed is None else printed["MA"],
                measured=[epsilons["MA"]] if epsilons else [],
                tolerance=0.02 * (0.0 if printed is None else printed["MA"]),
                missing=f"never reached, down to sigma = {tried[-1]:g}",
                beside=beside,
            )
        )
    infinite = float("inf")
    both = spent.get(KEPT[1].label, infinite)
    more = spent.get("baseline", infinite) > 4 * spent.get(TARGET.label, infinite)
    labels = [entry.where["strategy"] for entry in entries]
    evidence = ", ".join(f"{n} {f'MA {spent[n]:.3f}' if n in spent else 'never'}" for n in labels)
    claims = [
        Claim.judged(
            "last scenario 1",
            "decay and l2-max together spend least for the accuracy of l2-max",
            {"batch": bool(spent) and both <= min(spent.values())},
            evidence,
        ),
        Claim.judged("last scenario 2", "the baseline must spend many times as much for it", {"batch": more}, evidence),
    ]
    note = "Compared: MA as published at the step that reaches the accuracy of l2-max (batch reading), published in ()."
    tables = [Table.of("Privacy spent to the accuracy of l2-max", entries, note)]
    return Report(tables=tables, entries=entries, claims=claims)


EXPERIMENT = Experiment(
    name="last-scenario",
    title="Privacy spent to the accuracy that l2-max ends with",
    paper="last scenario of the table at fixed noise variance",
    cells=cells,
    report=report,
)
