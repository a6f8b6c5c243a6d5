"""What dyn-s-sigma spends until the baseline's accuracy is reached, sigma decaying from 15.

From 15, by three policies, to the end at which the whole run spends what sigma = 6 does by the moments accountant. The
published rows fit no single schedule; they stand beside for what they are.
"""

from __future__ import annotations

from gradveil.experiments import published, sensitivity
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.experiment import DYNAMIC_SENSITIVITY, READINGS, Experiment, Found, Row, share
from gradveil.experiments.noise_decay import CLIP, dataset, end_sigma, rate
from gradveil.experiments.plan import Plan
from gradveil.experiments.target_accuracy import NOTE, reaching

START = 15.0


def run(plan: Plan, policy: str, row: Row, *, start: float = START) -> Cell:
    steps = plan.length(dataset(plan))["steps"]
    end = end_sigma(policy, start=start, steps=steps, at=steps, q=rate(plan))
    settings = {**row.settings, "clip": CLIP, "sigma": start, "sigma_decay": policy}
    return plan.train(dataset(plan), **settings, sigma_end=end)


def cells(plan: Plan) -> list[Cell]:
    fixed = [sensitivity.runs(plan, dataset(plan), row, CLIP)[0] for row in DYNAMIC_SENSITIVITY]
    rows = [Row("dyn-s-sigma", reading) for reading in READINGS]
    return [*fixed, *(run(plan, policy, row) for policy in published.POLICIES for row in rows)]


def report(plan: Plan, found: Found) -> Report:
    compared = plan.scale == "full" and dataset(plan) == "mnist"
    target = float(found[sensitivity.runs(plan, dataset(plan), Row("baseline"), CLIP)[0]]["accuracy"])
    entries: list[Entry] = []
    spent: dict[str, float] = {}
    for row in DYNAMIC_SENSITIVITY:
        result = found[sensitivity.runs(plan, dataset(plan), row, CLIP)[0]]
        told = published.TARGET_ACCURACY["mnist"].spent[row.strategy] if compared else None
        entry, looks = reaching({"sigma": "fixed", "strategy": row.label}, [result], [target], told)
        entries.append(entry)
        if looks[0] is not None:
            spent[f"fixed {row.label}"] = looks[0]["as_published"]["MA"]
    for policy in published.POLICIES:
        for reading in READINGS:
            row = Row("dyn-s-sigma", reading)
            told = published.NOISE_DECAY_TARGET[policy] if compared else None
            result = found[run(plan, policy, row)]
            entry, looks = reaching({"sigma": policy, "strategy": row.label}, [result], [target], told)
            entries.append(entry)
            if looks[0] is not None:
                spent[f"{policy} {row.label}"] = looks[0]["as_published"]["MA"]
    tables = [Table.of(f"Privacy spent to an accuracy of {target:.4f}", entries, NOTE)]
    return Report(tables=tables, entries=entries, claims=[_claim(spent)], data={"MA": spent})


def _claim(spent: dict[str, float]) -> Claim:
    held: dict[str, bool | None] = {}
    told = []
    for reading in READINGS:
        mine = spent.get(f"exponential {Row('dyn-s-sigma', reading).label}")
        others = [value for name, value in spent.items() if reading in name or "reading" not in name]
        wins = [mine is not None and mine <= other for other in others]
        held[reading] = all(wins)
        told.append(f"{reading}: {'never reached' if mine is None else f'MA {mine:.3f}, at most {share(wins)}'}")
    text = "everything together with exponential decay spends least for the baseline's accuracy"
    return Claim.judged("noise decay target 1", text, held, "; ".join(told))


EXPERIMENT = Experiment(
    name="noise-decay-target",
    title="Privacy spent by dyn-s-sigma to the baseline's accuracy",
    paper="table of privacy spending of the best combination under a target accuracy",
    cells=cells,
    report=report,
)
