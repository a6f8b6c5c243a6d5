"""The noise S sigma over the steps of a run: fixed, by l2-max, and by l2-max with sigma decaying from 15."""

from __future__ import annotations

from gradveil.experiments import sensitivity
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Report, Table
from gradveil.experiments.drawing import line, panels
from gradveil.experiments.experiment import READINGS, Experiment, Found, Row, rows_of
from gradveil.experiments.noise_decay import CLIP, dataset
from gradveil.experiments.noise_decay_target import run
from gradveil.experiments.plan import Plan

FIXED_SIGMA = rows_of("baseline", "dyn-s-decay", "dyn-s-l2max")
DECAYING = tuple(Row("dyn-s-sigma", reading) for reading in READINGS)


def _named(plan: Plan) -> dict[str, Cell]:
    found = {row.label: sensitivity.runs(plan, dataset(plan), row, CLIP)[0] for row in FIXED_SIGMA}
    return found | {f"{row.label}, sigma from 15": run(plan, "exponential", row) for row in DECAYING}


def cells(plan: Plan) -> list[Cell]:
    return list(_named(plan).values())


def report(plan: Plan, found: Found) -> Report:
    traces = {label: found[cell]["trace"] for label, cell in _named(plan).items()}
    rows = []
    for label, trace in traces.items():
        shown = [trace[0], trace[len(trace) // 2], trace[-1]]
        rows.append([label, *(f"{look['noise_std']:.3g}" for look in shown), f"{trace[-1]['accuracy']:.4f}"])
    path = found.folder / "noise-variance.svg"
    with panels(path, 1, width=6.4, height=3.4) as (ax,):
        for place, (label, trace) in enumerate(traces.items()):
            steps, noise = [look["step"] for look in trace], [look["noise_std"] for look in trace]
            line(ax, place, steps, noise, label, markevery=max(1, len(trace) // 10))
        ax.set_yscale("log")
        ax.set_xlabel("step")
        ax.set_ylabel("standard deviation of the noise\non the summed gradient, S sigma")
        ax.set_title(f"{dataset(plan)}, C = 4", loc="left")
    held: dict[str, bool | None] = {}
    told = []
    for reading in READINGS:
        mine, base = traces[f"{Row('dyn-s-sigma', reading).label}, sigma from 15"], traces["baseline"]
        early, late = mine[0]["noise_std"], mine[-1]["noise_std"]
        held[reading] = early > base[0]["noise_std"] and late < base[-1]["noise_std"]
        told.append(f"{reading}: {early:.3g} first, {late:.3g} last, baseline {base[0]['noise_std']:.3g}")
    text = "more noise than the baseline early and less late, where l2-max and a decaying sigma from 15 come together"
    tables = [
        Table(
            title="Noise on the summed gradient, largest over the layers",
            head=["strategy", "first look", "middle", "last", "accuracy"],
            rows=rows,
            note="The paper calls S sigma the noise variance; it is the standard deviation.",
        )
    ]
    claim = Claim.judged("noise variance 1", text, held, "; ".join(told))
    drawn = {label: [[k["step"], k["noise_std"]] for k in trace] for label, trace in traces.items()}
    return Report(tables=tables, claims=[claim], figures=[path], data={"noise_std": drawn})


EXPERIMENT = Experiment(
    name="noise-variance",
    title="The noise S sigma over the steps of a run",
    paper="figure of the noise variance",
    cells=cells,
    report=report,
)
