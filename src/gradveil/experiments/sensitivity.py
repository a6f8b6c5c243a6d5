"""Accuracy of fixed and dynamic sensitivity over the clip bound, at sigma = 6: the paper's main accuracy table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradveil.experiments import published
from gradveil.experiments.cells import Cell
from gradveil.experiments.compare import Claim, Entry, Report, Table
from gradveil.experiments.drawing import line, panels
from gradveil.experiments.experiment import DYNAMIC_SENSITIVITY, READINGS, Experiment, Found, Row, proved, share
from gradveil.experiments.plan import Plan

SETS = ("mnist", "fashion-mnist", "cifar10", "lfw", "location", "retail-10")
BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_SEEDS_AT_4 = 3
TOLERANCE = 0.006
_RATES = {"full": (0.02, 0.1, 0.2), "quick": (0.1,)}


def bounds(plan: Plan) -> tuple[float, ...]:
    return BOUNDS if plan.scale == "full" else (1.0, 4.0, 32.0)


def runs(plan: Plan, dataset: str, row: Row, clip: float) -> list[Cell]:
    """One cell for each seed; the bound that all other tables use has three."""
    seeds = plan.seeds_of(_SEEDS_AT_4 if clip == 4.0 else 1)
    return [plan.train(dataset, **row.settings, clip=clip, sigma=6.0, seed=seed) for seed in seeds]


def plain(plan: Plan, dataset: str) -> list[Cell]:
    return [plan.train(dataset, "non-private", seed=seed) for seed in plan.seeds_of()]


def tuned(plan: Plan, dataset: str) -> dict[float, Cell]:
    """The baseline at C = 4 by learning rate, the usual one among them: what tuning that alone gives."""
    usual = runs(plan, dataset, Row("baseline"), 4.0)[0]
    others = _RATES[plan.scale] if plan.lr is None else ()
    found = {float(usual.settings["lr"]): usual}
    return found | {lr: plan.train(dataset, "baseline", clip=4.0, sigma=6.0, lr=lr) for lr in others}


def cells(plan: Plan) -> list[Cell]:
    found: list[Cell] = []
    for dataset in plan.sets_of(*SETS):
        found += plain(plan, dataset)
        found += tuned(plan, dataset).values()
        for clip in bounds(plan):
            for row in DYNAMIC_SENSITIVITY:
                found += runs(plan, dataset, row, clip)
    return found


def report(plan: Plan, found: Found) -> Report:
    entries: list[Entry] = []
    means: dict[str, dict[str, dict[float, float]]] = {}
    for dataset in plan.sets_of(*SETS):
        accuracy = found.figures_of(plain(plan, dataset), "accuracy")
        where = {"set": dataset, "strategy": "non-private", "C": "-"}
        told = published.NON_PRIVATE.get(dataset)
        entries.append(_entry(where, told, accuracy, "infinite"))
        entries.append(_tuned(plan, dataset, found))
        table = published.SENSITIVITY.get(dataset, {})
        for row in DYNAMIC_SENSITIVITY:
            for clip in bounds(plan):
                mine = runs(plan, dataset, row, clip)
                accuracy = found.figures_of(mine, "accuracy")
                where = {"set": dataset, "strategy": row.label, "C": f"{clip:g}"}
                told = table.get(row.strategy, {}).get(clip)
                entries.append(_entry(where, told, accuracy, proved(found[mine[0]])))
                means.setdefault(dataset, {}).setdefault(row.label, {})[clip] = sum(accuracy) / len(accuracy)
    drawn = _draw(means, plan, found)
    note = (
        "Test accuracy; sigma = 6. The published l2-max figures stand beside both of its readings. The best learning "
        "rate is chosen by the test accuracy of seed 0."
    )
    tables = [_pivot(dataset, entries) for dataset in plan.sets_of(*SETS)]
    tables.append(Table.of("Accuracy by clip bound, one by one", entries, note, folded=True))
    return Report(tables=tables, entries=entries, claims=_claims(means), figures=[drawn], data={"means": _plain(means)})


def _entry(where: dict[str, str], told: float | None, accuracy: Sequence[float], epsilon: str) -> Entry:
    return Entry(
        where=where,
        published=told,
        measured=accuracy,
        digits=4,
        tolerance=TOLERANCE,
        beside={"proved epsilon": epsilon},
    )


def _tuned(plan: Plan, dataset: str, found: Found) -> Entry:
    tried = {lr: found[cell] for lr, cell in tuned(plan, dataset).items()}
    best = max(tried, key=lambda lr: float(tried[lr]["accuracy"]))
    where = {"set": dataset, "strategy": f"baseline at its best learning rate, {best:g}", "C": "4"}
    told = published.SENSITIVITY.get(dataset, {}).get("baseline", {}).get(4.0)
    return _entry(where, told, [float(tried[best]["accuracy"])], proved(tried[best]))


def _pivot(dataset: str, entries: Sequence[Entry]) -> Table:
    """One set at a glance: measured, and published in brackets."""
    mine = [e for e in entries if e.where["set"] == dataset]
    clips = sorted({e.where["C"] for e in mine if e.where["C"] != "-"}, key=float)
    rows = []
    for strategy in dict.fromkeys(e.where["strategy"] for e in mine):
        by = {e.where["C"]: e for e in mine if e.where["strategy"] == strategy}
        shown = [beside(by[c]) if c in by else "-" for c in clips]
        if "-" in by:  # no clip bound: once, at the left
            shown[0] = beside(by["-"])
        rows.append([strategy, *shown, next(iter(by.values())).beside["proved epsilon"]])
    head = ["", *(f"C = {clip}" for clip in clips), "proved epsilon"]
    return Table(title=f"{dataset}: test accuracy, and as published in brackets", head=head, rows=rows)


def beside(entry: Entry) -> str:
    """What was measured, and in brackets what was published."""
    measured = "-" if entry.mean is None else f"{entry.mean:.4f}"
    return measured if entry.published is None else f"{measured} ({entry.published:.3f})"


def _plain(means: dict[str, dict[str, dict[float, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    return {s: {r: {f"{c:g}": a for c, a in by.items()} for r, by in rows.items()} for s, rows in means.items()}


def _claims(means: dict[str, dict[str, dict[float, float]]]) -> list[Claim]:
    """The three observations, each in both readings, over all sets and bounds."""

    def above(first: str, second: str) -> list[bool]:
        return [rows[first][c] > rows[second][c] for rows in means.values() for c in rows[first]]

    def judged(name: str, text: str, first: str, seconds: Sequence[str]) -> Claim:
        held, told = {}, []
        for reading in READINGS:
            mine = Row(first, reading).label
            others = [Row(s, reading).label if s == "dyn-s-l2max" else s for s in seconds]
            wins = [w for other in others for w in above(mine, other)]
            held[reading] = all(wins) if wins else None
            told.append(f"{reading}: {share(wins)}")
        return Claim.judged(name, text, held, "; ".join(told))

    return [
        judged(
            "sensitivity 1",
            "l2-max is more accurate than the baseline at every clip bound on every set",
            "dyn-s-l2max",
            ["baseline"],
        ),
        judged("sensitivity 2", "l2-max is more accurate than a decaying clip bound", "dyn-s-l2max", ["dyn-s-decay"]),
        judged(
            "sensitivity 3",
            "both together are the most accurate of all",
            "dyn-s",
            ["baseline", "dyn-s-decay", "dyn-s-l2max"],
        ),
    ]


def _draw(means: dict[str, dict[str, dict[float, float]]], plan: Plan, found: Found) -> Path:
    path = found.folder / "sensitivity.svg"
    with panels(path, len(means)) as axes:
        for ax, (dataset, rows) in zip(axes, means.items(), strict=True):
            for place, (label, by) in enumerate(rows.items()):
                line(ax, place, list(by), list(by.values()), label)
            ax.set_xscale("log", base=2)
            ax.set_xticks(list(bounds(plan)), [f"{c:g}" for c in bounds(plan)])
            ax.minorticks_off()
            ax.set_title(dataset, loc="left")
            ax.set_xlabel("clip bound C")
            ax.set_ylabel("test accuracy")
    return path


EXPERIMENT = Experiment(
    name="sensitivity",
    title="Accuracy of baseline, decaying clip bound and l2-max by clip bound, sigma = 6",
    paper="table of dynamic sensitivity",
    cells=cells,
    report=report,
)
