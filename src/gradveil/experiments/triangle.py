"""Privacy, utility and resilience in one table: accuracy, proved epsilon, and what the attack that knows gets.

Ours, not the paper's. Accuracy and epsilon of the run at C = 4, sigma = 6; the attack sees the gradient of one example
with the noise of its batch, the hardest case for the defence: at step 0, and late, at the run's last step. dyn-private
has the noise that makes gradient and counts together cost what the baseline costs.
"""

from __future__ import annotations

from typing import Any

from gradveil.experiments import adaptive_clipping, noise_decay_target, sensitivity, starting_bounds
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Report, Table
from gradveil.experiments.drawing import COLOURS, MARKERS, enlarge, panels
from gradveil.experiments.experiment import Experiment, Found, Row, proved
from gradveil.experiments.noise_decay import CLIP, dataset
from gradveil.experiments.plan import Plan
from gradveil.experiments.starting_bounds import at_the_baselines_epsilon

_SIGMA = 6.0


def _runs(plan: Plan) -> dict[str, tuple[Cell, dict[str, Any]]]:
    """By label: the training run, and how the first step is released."""
    name = dataset(plan)
    found: dict[str, tuple[Cell, dict[str, Any]]] = {
        "non-private": (sensitivity.plain(plan, name)[0], {"strategy": "non-private"})
    }
    for row in (Row("baseline"), Row("dyn-s-decay"), Row("dyn-s-l2max", "batch"), Row("dyn-s", "batch")):
        found[row.label] = (sensitivity.runs(plan, name, row, CLIP)[0], row.settings)
    for row in (Row("quantile-clip"), Row("adaclip")):
        found[row.label] = (adaptive_clipping.runs(plan, name, row)[0], row.settings)
    settings: dict[str, Any] = {"strategy": "dyn-private", "sigma": at_the_baselines_epsilon(plan, name)["sigma"]}
    found["dyn-private, at the baseline's epsilon"] = (starting_bounds.runs(plan, CLIP)[0], settings)
    settings = {"strategy": "normalised", "sigma": _SIGMA}
    found["normalised"] = (plan.train(name, **settings), settings)
    for row in (Row("dyn-sigma"), Row("dyn-s-sigma", "batch")):
        cell = noise_decay_target.run(plan, "exponential", row)
        found[f"{row.label}, sigma from 15"] = (cell, {**row.settings, "sigma": 15.0})
    return found


def _shared(plan: Plan, strategy: str) -> dict[str, Any]:
    victims, iterations = (50, 300) if plan.scale == "full" else (5, 40)
    view = "per-example" if strategy == "non-private" else "per-example-noised"
    return {"dataset": dataset(plan), "attack": "map", "view": view, "victims": victims, "iterations": iterations}


def _trial(plan: Plan, settings: dict[str, Any]) -> Cell:
    """At step 0."""
    length = plan.length(dataset(plan))
    kept = {k: v for k, v in settings.items() if v is not None}
    return Cell("attack", {**_shared(plan, kept["strategy"]), "training_batch": length["batch_size"], **kept})


def _late(plan: Plan, run: Cell) -> Cell:
    """At the last step of the run."""
    return Cell("attack", {**_shared(plan, run.settings["strategy"]), "of_run": dict(run.settings)})


def cells(plan: Plan) -> list[Cell]:
    return [c for run, settings in _runs(plan).values() for c in (run, _trial(plan, settings), _late(plan, run))]


def report(plan: Plan, found: Found) -> Report:
    rows, points = [], {}
    for label, (run, settings) in _runs(plan).items():
        result, attacked = found[run], found[_trial(plan, settings)]["result"]
        late = found[_late(plan, run)]["result"]
        epsilon, accuracy, psnr = proved(result), float(result["accuracy"]), float(attacked["psnr_median"])
        published = result["as_published"].get("MA")
        points[label] = (accuracy, psnr, epsilon)
        rows.append(
            [
                label,
                f"{accuracy:.4f}",
                epsilon,
                "-" if published is None else f"{published:.3f}",
                f"{psnr:.1f}",
                f"{attacked['success_rate']:.0%}",
                f"{float(late['psnr_median']):.1f}",
                f"{late['success_rate']:.0%}",
                f"{attacked['guess_psnr_median']:.1f}",
            ]
        )
    path = found.folder / "triangle.svg"
    with panels(path, 2, width=4.4, height=3.6) as (whole, near):
        for ax in (whole, near):
            for place, (label, (accuracy, psnr, epsilon)) in enumerate(points.items()):
                colour = COLOURS[place % len(COLOURS)]
                look = {"color": colour, "marker": MARKERS[place % len(MARKERS)], "markersize": 8}
                hollow = {"markerfacecolor": "none"} if epsilon == "infinite" else {}
                ax.plot([psnr], [accuracy], linestyle="", label=label, **look, **hollow)
            ax.set_xlabel("what the attack gets back: PSNR of map, dB")
        whole.set_ylabel("test accuracy")
        whole.set_title(f"{dataset(plan)}: filled, a finite epsilon is proved; hollow, none is", loc="left")
        near.set_title("enlarged; to the left: less leaks", loc="left")
        enlarge(near, [(psnr, accuracy) for label, (accuracy, psnr, _) in points.items() if label != "non-private"])
    head = [
        "strategy",
        "accuracy",
        "proved epsilon",
        "MA, as published",
        "map at step 0, dB",
        "beats guessing",
        "map late, dB",
        "beats guessing",
        "best guess, dB",
    ]
    note = (
        "The attack sees one example's gradient as it is released, at step 0 or at the last step of the run, and knows "
        "everything that is public. At step 0 the network is the one that attacks are shown on; late it is the run's."
    )
    table = Table(title="Privacy, utility, resilience", head=head, rows=rows, note=note)
    return Report(tables=[table], figures=[path], data={"points": points})


EXPERIMENT = Experiment(
    name="triangle",
    title="Privacy, utility and resilience in one table",
    paper="",
    cells=cells,
    report=report,
)
