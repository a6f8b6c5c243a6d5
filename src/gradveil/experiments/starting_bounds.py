"""Does dyn-private forget the bound it starts with? From 1, 4 and 32, at the proved epsilon of the baseline.

Ours, not the paper's. The baseline, sigma = 6, at every clip bound is beside it: the best of those is what somebody who
tuned C would have, and C = 32 what somebody who guessed it wrong has. dyn-private has a little more noise on its
gradients, so that they and the counts that it follows cost together what the baseline's gradients cost.
"""

from __future__ import annotations

import statistics
from typing import Any

from gradveil.experiments import sensitivity
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Report, Table
from gradveil.experiments.drawing import line, panels
from gradveil.experiments.experiment import Experiment, Found, Row, proved
from gradveil.experiments.noise_decay import dataset
from gradveil.experiments.plan import Plan

STARTS = (1.0, 4.0, 32.0)
SIGMA = 6.0
NEAR = 0.006  # what counts as the same accuracy


def at_the_baselines_epsilon(plan: Plan, name: str) -> dict[str, Any]:
    """Sigma and the noise of the counts: 1 / SIGMA^2 = 1 / sigma^2 + 1 / (2 noise)^2 in every layer."""
    counts = max(plan.length(name)["batch_size"] / 20.0, 5.0 * SIGMA)
    return {"sigma": (SIGMA**-2 - (2.0 * counts) ** -2) ** -0.5, "options": {"count_noise": counts}}


def runs(plan: Plan, start: float) -> list[Cell]:
    name = dataset(plan)
    settings = at_the_baselines_epsilon(plan, name)
    return [plan.train(name, "dyn-private", seed=s, clip=start, **settings) for s in plan.seeds_of(3)]


def _named(plan: Plan) -> dict[str, list[Cell]]:
    baseline = {
        f"baseline, C = {clip:g}": sensitivity.runs(plan, dataset(plan), Row("baseline"), clip)
        for clip in sensitivity.bounds(plan)
    }
    return baseline | {f"dyn-private from {start:g}": runs(plan, start) for start in STARTS}


def cells(plan: Plan) -> list[Cell]:
    return [cell for found in _named(plan).values() for cell in found]


def report(plan: Plan, found: Found) -> Report:
    rows, accuracy = [], {}
    traces = {}
    for label, wanted in _named(plan).items():
        results = [found[cell] for cell in wanted]
        values = [float(result["accuracy"]) for result in results]
        accuracy[label], traces[label] = statistics.fmean(values), results[0]["trace"]
        looks = [traces[label][i]["noise_std"] for i in (0, len(traces[label]) // 2, -1)]
        spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"
        rows.append([label, f"{accuracy[label]:.4f}", spread, proved(results[0]), *(f"{std:.3g}" for std in looks)])
    fixed = {label: value for label, value in accuracy.items() if label.startswith("baseline")}
    best = max(fixed, key=fixed.__getitem__)
    ours = [accuracy[f"dyn-private from {start:g}"] for start in STARTS]
    path = found.folder / "starting-bounds.svg"
    widest = f"baseline, C = {max(sensitivity.bounds(plan)):g}"
    shown = [f"dyn-private from {start:g}" for start in STARTS] + list(dict.fromkeys([best, widest]))
    with panels(path, 1, width=6.4, height=3.4) as (ax,):
        for place, label in enumerate(shown):
            trace = traces[label]
            steps, noise = [look["step"] for look in trace], [look["noise_std"] for look in trace]
            line(ax, place, steps, noise, label, markevery=max(1, len(trace) // 10))
        ax.set_yscale("log")
        ax.set_xlabel("step")
        ax.set_ylabel("standard deviation of the noise\non the summed gradient, largest layer")
        ax.set_title(dataset(plan), loc="left")
    claims = [
        Claim.judged(
            "starting bounds 1",
            f"dyn-private ends at the same accuracy (within {NEAR:g}) from 1, 4 and 32",
            {"all": max(ours) - min(ours) <= NEAR},
            ", ".join(f"{value:.4f}" for value in ours),
        ),
        Claim.judged(
            "starting bounds 2",
            f"and at that of the baseline at its best C (within {NEAR:g}, or above), at the same proved epsilon",
            {"all": min(ours) >= fixed[best] - NEAR},
            f"{min(ours):.4f} at least, {best} {fixed[best]:.4f}",
        ),
    ]
    head = ["run", "accuracy", "spread", "proved epsilon", "noise at first", "half-way", "at last"]
    note = (
        "Spread: standard deviation over seeds. Noise: standard deviation on the summed gradient, largest over the "
        "layers. The best C of the baseline was found by test accuracy; dyn-private was given three, and found none."
    )
    tables = [Table(title="dyn-private from any bound, beside the baseline at each", head=head, rows=rows, note=note)]
    drawn = {label: [[look["step"], look["noise_std"]] for look in traces[label]] for label in shown}
    return Report(tables=tables, claims=claims, figures=[path], data={"accuracy": accuracy, "noise_std": drawn})


EXPERIMENT = Experiment(
    name="starting-bounds",
    title="dyn-private forgets the bound it starts with",
    paper="",
    cells=cells,
    report=report,
)
