"""The attack at work: reconstructions of one victim over the iterations, from the plain gradient."""

from __future__ import annotations

from typing import Any

from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Report, Table
from gradveil.experiments.experiment import Experiment, Found, share
from gradveil.experiments.leakage import FACES, SETS, pictures_of
from gradveil.experiments.plan import Plan

_CLEAR_DB = 30.0


def _trial(plan: Plan, dataset: str) -> Cell:
    size: dict[str, Any] = {"victims": 1, "iterations": 300 if plan.scale == "full" else 60}
    return Cell("attack", {"dataset": dataset, "attack": "cpl", "view": "per-example", "shown": 1, **size})


def cells(plan: Plan) -> list[Cell]:
    return [_trial(plan, dataset) for dataset in plan.sets_of(*SETS, kind="image")]


def report(plan: Plan, found: Found) -> Report:
    from gradveil.attacks.scoring.pictures import Line, draw_grid

    sets = plan.sets_of(*SETS, kind="image")
    lines: list[Line] = []
    rows, clear = [], []
    for dataset in sets:
        cell = _trial(plan, dataset)
        result = found[cell]["result"]
        clear.append(result["psnr_median"] >= _CLEAR_DB)
        reached = result["iterations_to_30_db_median"]
        rows.append([dataset, f"{result['psnr_median']:.1f}", "-" if reached is None else f"{reached:.0f}"])
        if dataset in FACES and plan.sets is None:
            continue  # a face is drawn for who names the set
        pictures = pictures_of(found, cell)
        frames = sorted((int(name.split()[1]), image) for name, image in pictures.items() if name.startswith("frame"))
        shown = [("original", pictures["original"][0]), *((f"iteration {i}", image[0]) for i, image in frames)]
        lines.append((dataset, [*shown, ("end", pictures["found"][0])]))
    path = found.folder / "attack-frames.png"
    if lines:
        draw_grid(lines, path)
    table = Table(
        title="One victim of each set, the plain gradient of an untrained network, cpl",
        head=["set", "PSNR at the end, dB", "iterations to 30 dB"],
        rows=rows,
    )
    text = "the plain gradient gives the example back within the iterations"
    claim = Claim.judged("attack frames 1", text, {"all": all(clear)}, f"on {share(clear)} sets")
    return Report(tables=[table], claims=[claim], figures=[path])


EXPERIMENT = Experiment(
    name="attack-frames",
    title="Reconstructions over the attack's iterations",
    paper="figure of the attack's visualisation",
    cells=cells,
    report=report,
)
