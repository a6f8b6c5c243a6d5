"""``gradveil demo``: the whole story on digits. Train, attack, report."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil.cli._output import number, table, upper
from gradveil.training.config import RunConfig

if TYPE_CHECKING:
    from gradveil.attacks.trial import AttackResult
    from gradveil.training.results import Result

# Digits has 1347 training examples, so a batch of 128 is a large share of them and epsilon is large too: the demo shows
# how the strategies differ, not a setting to copy. l2-max is shown in both of its readings: the batch one is the one
# with the published accuracy, and leaks more.
SHARED: dict[str, Any] = {
    "dataset": "digits",
    "clip": 1.0,
    "sigma": 3.0,
    "lr": 0.5,
    "steps": 600,
    "batch_size": 128,
}
RUNS: dict[str, dict[str, Any]] = {
    "non-private": {"strategy": "non-private"},
    "baseline": {"strategy": "baseline"},
    "dyn-s-decay": {"strategy": "dyn-s-decay"},
    "dyn-s-sigma-example": {"strategy": "dyn-s-sigma", "reading": "example", "sigma_end": 2.0},
    "dyn-s-sigma-batch": {"strategy": "dyn-s-sigma", "reading": "batch", "sigma_end": 2.0},
}
ATTACKS = {"cpl": 40, "map": 150}  # the paper's, and the one that knows the defence: iterations
NETWORK = "cpl-net"  # untrained: what leaks, leaks there
VICTIMS, SHOWN = 6, 3


@click.command("demo")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Directory for the runs.  [default: a new temporary one]"
)
@click.option("--seed", type=int, default=None, help="Make the demo reproducible.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(run_dir: Path | None, seed: int | None, as_json: bool) -> None:
    """Train digits five ways, with and without privacy, attack each, and write a report of what leaks."""
    from gradveil.api import report
    from gradveil.cli.train import _train
    from gradveil.training.loop import train

    where = run_dir or Path(tempfile.mkdtemp(prefix="gradveil-demo-"))
    results: dict[str, Result] = {}
    for name, extra in RUNS.items():
        config = RunConfig.check(SHARED | extra)
        results[name] = _train(lambda tell, c, n=name: train(c, run_dir=where / n, seed=seed, progress=tell), config)
    attacked = {name: _attack(name, where / name) for name in RUNS}
    page = report(
        *(where / name for name in RUNS),
        out=where / "report.html",
        examples=SHOWN,  # digits are public: they may be shown
        title="gradveil demo: digits, trained five ways",
    )
    if as_json:
        told = {name: r.to_dict() for name, r in results.items()}
        for name, outcomes in attacked.items():
            told[name]["attacks"] = {attack: o.to_dict() for attack, o in outcomes.items()}
        click.echo(json.dumps({"runs": told, "report": str(page)}))
        return
    _table(results, attacked)
    click.echo(f"\nThe page: {page}")
    click.echo(f"The runs, with their ledgers: {where}. Try: gradveil statement {where / 'baseline'}")


def _attack(name: str, run: Path) -> dict[str, AttackResult]:
    """Both attacks on the first step as the run releases it; kept in the run."""
    import torch

    from gradveil.api import keep_attack
    from gradveil.attacks.trial import AttackConfig
    from gradveil.attacks.trial import run as attack
    from gradveil.cli.attack import told
    from gradveil.mechanism.strategies import parameters
    from gradveil.reports.facts import ATTACKS as ATTACK_FOLDER
    from gradveil.training import data

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # eight by eight pixels are not worth sharing out
    config = RunConfig.check(SHARED | RUNS[name])
    private = config.strategy != "non-private"
    loaded = data.load(config.dataset)
    found: dict[str, AttackResult] = {}
    for kind, iterations in ATTACKS.items():
        trial = AttackConfig(
            strategy=config.strategy,
            attack=kind,
            view="per-example-noised" if private else "per-example",
            victims=VICTIMS,
            iterations=iterations,
            clip=config.clip,
            sigma=config.sigma,
            steps=config.steps or 1,
            reading=config.reading,
            training_batch=config.batch_size or 1,
            network=NETWORK,
        )
        plan = parameters(**config.plan_settings()) if private else None
        with told(trial) as progress:
            found[kind] = attack(trial, loaded, plan=plan, progress=progress)
    torch.set_num_threads(threads)
    folder = run / ATTACK_FOLDER / "first-step"
    keep_attack(list(found.values()), folder, dataset=config.dataset, model=f"{NETWORK}, untrained", run=run)
    return found


def _table(results: dict[str, Result], attacked: dict[str, dict[str, AttackResult]]) -> None:
    rows = []
    for name, r in results.items():
        paper = r.statement.paper
        psnr = {kind: o.score.summary()["psnr_median"] for kind, o in attacked[name].items()}
        rows.append(
            [
                name,
                f"{r.accuracy:.3f}",
                upper(r.statement.proved.epsilon),
                number(paper["MA"].epsilon) if paper else "-",
                "not run",
                *(f"{value:.1f}" for value in psnr.values()),
                f"{number(r.noise_std_first, 3)} / {number(r.noise_std_last, 3)}",
            ]
        )
    guess = next(iter(attacked.values()))["map"].score.summary()["guess_psnr_median"]
    head = ["run", "accuracy", "eps proved", "eps as published (MA)", "eps audited"]
    table(
        [*head, *(f"{kind}, dB" for kind in ATTACKS), "noise std first/last"],
        rows,
        title="digits: accuracy, guarantee and leakage of each way of training",
        note="eps proved: add or remove one example, delta 1e-5, PLD. Infinite where the noise depends on the data "
        "(l2-max) or there is none. The published figure is not a guarantee. dB: PSNR of attacks on the gradient of "
        f"one digit at the first step, median of {VICTIMS}; guessing reaches {guess:.1f}, above 30 is a copy. "
        "map knows the defence, cpl does not.",
    )
