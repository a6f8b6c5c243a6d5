"""What the first step's gradients give away, by strategy: to the paper's attack, and to one that knows the defence.

An untrained CPL net; the gradient of a single example as the strategy releases it, clipped at C = 4 and noised for a
batch of 600. The published success rates count a mean squared error below .70, which for images in [0, 1] a black one
passes too: they stand beside the same rate measured, and beside success that is better than guessing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gradveil.experiments import published
from gradveil.experiments.cells import Cell, Result
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.experiment import Experiment, Found, share
from gradveil.experiments.plan import Plan

SETS = ("mnist", "fashion-mnist", "cifar10", "lfw")
STRATEGIES: dict[str, dict[str, Any]] = {
    "non-private": {"strategy": "non-private"},
    "baseline": {"strategy": "baseline"},
    "quantile-clip": {"strategy": "quantile-clip"},
    "adaclip": {"strategy": "adaclip"},
    "dyn-s-sigma, sigma_0 = 6": {"strategy": "dyn-s-sigma"},
    "dyn-s-sigma, sigma_0 = 15": {"strategy": "dyn-s-sigma", "sigma": 15.0},
}
ATTACKS = ("cpl", "map")
FACES = ("lfw",)  # shown to nobody who did not ask for them


def trial(plan: Plan, dataset: str, label: str, attack: str) -> Cell:
    size: dict[str, Any] = {"victims": 50, "iterations": 300}
    if plan.scale == "quick":
        size = {"victims": 5, "iterations": 40}
    view = "per-example" if label == "non-private" else "per-example-noised"
    settings = {"dataset": dataset, "attack": attack, "view": view, "shown": 1, **size}
    return Cell("attack", {**settings, **STRATEGIES[label]})


def cells(plan: Plan) -> list[Cell]:
    sets = plan.sets_of(*SETS, kind="image")
    return [trial(plan, dataset, label, attack) for dataset in sets for label in STRATEGIES for attack in ATTACKS]


def report(plan: Plan, found: Found) -> Report:
    entries: list[Entry] = []
    results: dict[str, dict[str, dict[str, Result]]] = {}
    for dataset in plan.sets_of(*SETS, kind="image"):
        for label in STRATEGIES:
            both = {attack: found[trial(plan, dataset, label, attack)] for attack in ATTACKS}
            results.setdefault(dataset, {})[label] = both
            told = published.LEAKAGE.get(dataset, {}).get(STRATEGIES[label]["strategy"])
            cpl, knows = both["cpl"]["result"], both["map"]["result"]
            bound = both["map"]["success_bound"]
            entries.append(
                Entry(
                    where={"set": dataset, "strategy": label},
                    published=None if told is None else told.asr,
                    measured=[cpl["paper"]["asr_mse_per_pixel"]],
                    digits=2,
                    tolerance=0.05,
                    beside={
                        "cpl by l2 distance": f"{cpl['paper']['asr_l2_distance']:.2f}",
                        "cpl, dB": f"{cpl['psnr_median']:.1f}",
                        "cpl beats guessing": f"{cpl['success_rate']:.0%}",
                        "map, dB": f"{knows['psnr_median']:.1f}",
                        "map beats guessing": f"{knows['success_rate']:.0%}",
                        "best guess, dB": f"{knows['guess_psnr_median']:.1f}",
                        "labels": f"{knows['labels_right']:.0%}",
                        "at most": "no bound" if bound is None else f"{bound:.2f}",
                    },
                )
            )
    figures = [_draw(plan, found)]
    note = (
        "Compared: the paper's attack success rate, a mean squared error below .70 on clamped images. At most: the "
        "proved bound on the success of any attack on this release, given how often guessing succeeds."
    )
    tables = [Table.of("Leakage of the first step", entries, note)]
    return Report(tables=tables, entries=entries, claims=_claims(results), figures=figures)


def _claims(results: dict[str, dict[str, dict[str, Result]]]) -> list[Claim]:
    def psnr(rows: dict[str, dict[str, Result]], label: str) -> float:
        return float(rows[label]["map"]["result"]["psnr_median"])

    open_ = [rows["non-private"]["cpl"]["result"]["success_rate"] >= 0.9 for rows in results.values()]
    weaker = [
        psnr(rows, label) > psnr(rows, "baseline") + 0.5
        for rows in results.values()
        for label in ("quantile-clip", "adaclip")
    ]
    best = {
        start: [
            psnr(rows, f"dyn-s-sigma, sigma_0 = {start}") < min(psnr(rows, n) for n in list(STRATEGIES)[:4]) - 0.5
            for rows in results.values()
        ]
        for start in (6, 15)
    }
    told = "; ".join(f"sigma_0 = {start}: on {share(wins)} sets" for start, wins in best.items())
    return [
        Claim.judged("leakage 1", "plain gradients leak on every set", {"all": all(open_)}, f"on {share(open_)} sets"),
        Claim.judged(
            "leakage 2",
            "quantile clipping and AdaClip leak more than the baseline (map, by half a decibel or more)",
            {"all": all(weaker)},
            f"in {share(weaker)} comparisons",
        ),
        Claim.judged(
            "leakage 3",
            "dyn-s-sigma is the most resilient (map, by half a decibel or more)",
            {f"sigma_0 = {start}": all(wins) for start, wins in best.items()},
            told,
        ),
    ]


def _draw(plan: Plan, found: Found) -> Path:
    """One victim of each set that shows no face: the original, and what both attacks make of each release."""
    from gradveil.attacks.scoring.pictures import Line, draw_grid

    lines: list[Line] = []
    for dataset in plan.sets_of(*SETS, kind="image"):
        if dataset in FACES:
            continue
        for attack in ATTACKS:
            row: list[tuple[str, Any]] = []
            for label in STRATEGIES:
                pictures = pictures_of(found, trial(plan, dataset, label, attack))
                if not row:
                    row.append(("original", pictures["original"][0]))
                row.append((label.replace(", ", "\n"), pictures["found"][0]))
            lines.append((f"{dataset}\n{attack}", row))
    path = found.folder / "leakage.png"
    if lines:
        draw_grid(lines, path)
    return path


def pictures_of(found: Found, cell: Cell) -> dict[str, Any]:
    """The images that an attack cell kept."""
    import torch

    with np.load(found.cells(cell) / "pictures.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


EXPERIMENT = Experiment(
    name="leakage",
    title="Leakage of the first step's gradients, by strategy",
    paper="table of gradient leakage resilience and figure of reconstructions",
    cells=cells,
    report=report,
)
