"""Fixed settings of the baseline, C = 1, sigma = 1 and C = 4, sigma = 6, and no defence: what comes back."""

from __future__ import annotations

from typing import Any

from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Report, Table
from gradveil.experiments.experiment import Experiment, Found, share
from gradveil.experiments.leakage import ATTACKS, FACES, SETS, pictures_of
from gradveil.experiments.plan import Plan

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "non-private", "view": "per-example"},
    "C = 1, sigma = 1": {"strategy": "baseline", "view": "per-example-noised", "clip": 1.0, "sigma": 1.0},
    "C = 4, sigma = 6": {"strategy": "baseline", "view": "per-example-noised", "clip": 4.0, "sigma": 6.0},
}


def _trial(plan: Plan, dataset: str, label: str, attack: str) -> Cell:
    victims, iterations = (20, 300) if plan.scale == "full" else (2, 40)
    size = {"victims": victims, "iterations": iterations, "shown": 1}
    return Cell("attack", {"dataset": dataset, "attack": attack, **size, **SETTINGS[label]})


def cells(plan: Plan) -> list[Cell]:
    sets = plan.sets_of(*SETS, kind="image")
    return [_trial(plan, name, label, attack) for name in sets for label in SETTINGS for attack in ATTACKS]


def report(plan: Plan, found: Found) -> Report:
    from gradveil.attacks.scoring.pictures import Line, draw_grid

    lines: list[Line] = []
    rows, more = [], {attack: list[bool]() for attack in ATTACKS}
    for dataset in plan.sets_of(*SETS, kind="image"):
        drawn: list[Any] = []
        psnr: dict[tuple[str, str], float] = {}
        for label in SETTINGS:
            for attack in ATTACKS:
                cell = _trial(plan, dataset, label, attack)
                result = found[cell]["result"]
                psnr[label, attack] = result["psnr_median"]
                guess = f"{result['guess_psnr_median']:.1f}"
                rows.append([dataset, label, attack, f"{result['psnr_median']:.1f}", guess])
                pictures = pictures_of(found, cell)
                if not drawn:
                    drawn.append(("original", pictures["original"][0]))
                drawn.append((f"{label}\n{attack}", pictures["found"][0]))
        for attack in ATTACKS:
            more[attack].append(psnr["C = 1, sigma = 1", attack] > psnr["C = 4, sigma = 6", attack] + 1.0)
        if dataset not in FACES or plan.sets is not None:  # a face is drawn for who names the set
            lines.append((dataset, drawn))
    path = found.folder / "fixed-parameters.png"
    if lines:
        draw_grid(lines, path)
    table = Table(
        title="Fixed settings of the baseline, seen per example",
        head=["set", "setting", "attack", "PSNR, dB", "best guess, dB"],
        rows=rows,
        note="The picture shows the first victim, the table the median of all.",
    )
    text = "too little noise (C = 1, sigma = 1) leaks more than C = 4, sigma = 6, by a decibel or more"
    told = "; ".join(f"{attack}: on {share(wins)} sets" for attack, wins in more.items())
    claim = Claim.judged("fixed parameters 1", text, {a: all(wins) for a, wins in more.items()}, told)
    return Report(tables=[table], claims=[claim], figures=[path])


EXPERIMENT = Experiment(
    name="fixed-parameters",
    title="What fixed privacy parameters give away",
    paper="figure of fixed parameter settings",
    cells=cells,
    report=report,
)
