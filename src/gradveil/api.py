"""Everything the command line does, in a few lines of Python.

    import gradveil

    run = gradveil.train(dataset="mnist", strategy="dyn-s-decay", data_dir="data", run_dir="runs/a")
    gradveil.attack("runs/a", attack="map")
    gradveil.report("runs/a", examples=2)

Your own model, optimizer and loop: :class:`gradveil.PrivacyEngine`.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.errors import ConfigError
from gradveil.mechanism.strategies import SIGMA_END_RATIO
from gradveil.reports.facts import ATTACKS, FRAMES, PICTURES, RESULT, SECRET
from gradveil.training.config import RunConfig
from gradveil.training.run_directory import write_whole

if TYPE_CHECKING:
    from gradveil.accounting import PaperEpsilon, ProvedEpsilon
    from gradveil.attacks.trial import AttackResult
    from gradveil.reports.gates import Gate
    from gradveil.training.results import Progress, Result

Where = str | os.PathLike[str]


def train(
    *,
    run_dir: Where | None = None,
    seed: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> Result:
    """Train a model as ``gradveil train`` does, and write a run directory.

    Args:
        run_dir: The new run directory. By default runs/<data set>-<strategy>-<time>.
        seed: Makes the run reproducible; anyone who knows it can subtract the noise.
        progress: Called with the state of the run at each evaluation.
        settings: Those of the command line: dataset, strategy, clip, sigma or epsilon, steps, batch_size, lr, ...

    Returns:
        Accuracy, statement and how the run ended.

    Raises:
        ConfigError: A setting is invalid.
        RunDirectoryError: The directory holds a run already.

    >>> import tempfile
    >>> run = train(run_dir=tempfile.mkdtemp(), dataset="digits", strategy="baseline", steps=3, batch_size=64)
    >>> run.steps, run.statement.proved.neighbours
    (3, 'add-remove')
    """
    from gradveil.training import loop as training

    config = RunConfig.check(settings)
    where = Path(run_dir) if run_dir is not None else _new_run(config)
    return training.train(config, run_dir=where, seed=seed, progress=progress)


def _new_run(config: RunConfig) -> Path:
    return Path("runs") / f"{config.dataset}-{config.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"


def attack(
    run: Where | None = None,
    *,
    dataset: str = "digits",
    data_dir: str | None = None,
    model_factory: str | None = None,
    data_factory: str | None = None,
    progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> AttackResult:
    """Reconstruct examples from gradients as a strategy would release them, and score the result.

    Args:
        run: A run directory: its model is attacked at its next step, and the result is stored in it. Without it, an
            untrained network is attacked.
        dataset: Data set of the victims, if there is no run.
        data_dir: Directory of the data sets.
        progress: Called with the iteration.
        settings: Fields of :class:`gradveil.attacks.trial.AttackConfig`: attack, strategy, victims, view, clip, sigma,
            iterations, seed, device. A run has its own strategy, steps and batch size.
        model_factory, data_factory: "module:function", to rebuild a run of your own model that did not record them.

    Returns:
        Reconstructions, their score, the scores of guessing, and the bound on any attack.

    >>> found = attack(attack="cpl", strategy="non-private", victims=2, iterations=20)
    >>> bool(found.score.summary()["psnr_median"] > 30)
    True
    """
    from gradveil.attacks import trial
    from gradveil.training import data

    if run is None:
        return trial.run(trial.AttackConfig(**settings), data.load(dataset, data_dir=data_dir), progress=progress)
    from gradveil.attacks.from_run import load_target

    target = load_target(Path(run), data_dir=data_dir, model_factory=model_factory, data_factory=data_factory)
    tried = target.settings(settings)
    outcome = target.attack(tried, progress)
    where = Path(run) / ATTACKS / f"{tried.attack}-{time.strftime('%Y%m%d-%H%M%S')}"
    keep_attack([outcome], where, dataset=target.data.name, model=target.network, run=Path(run))
    return outcome


def keep_attack(
    outcomes: list[AttackResult], folder: Path, *, dataset: str, model: str, run: Path | None = None
) -> None:
    """Write attack results into a directory: figures readable by everyone, images and seeds by the owner only.

    The seed of an attack is not the run's, but it reveals which examples were attacked. ``run``: the run directory that
    the folder is in; its ledger will name the files.
    """
    from gradveil.accounting import manifest
    from gradveil.attacks.scoring.pictures import draw_frames, keep_pictures

    folder.mkdir(parents=True, exist_ok=True)
    trials = [outcome.to_dict() for outcome in outcomes]
    secret = {"seeds": [trial["settings"].pop("seed") for trial in trials], "salt": manifest.new_salt()}
    write_whole(folder / SECRET, json.dumps(secret).encode(), mode=0o600)
    results = {"dataset": dataset, "model": model, "trials": trials}
    keep_pictures(outcomes, folder / PICTURES)
    draw_frames(outcomes, folder / FRAMES)
    write_whole(folder / RESULT, (json.dumps(results, indent=1) + "\n").encode())
    if run is not None:
        bind_evidence(run, *(folder / name for name in (RESULT, PICTURES, FRAMES)))


def bind_evidence(run: Path, *files: Path) -> None:
    """Name files in a run's ledger; a warning says where that cannot be."""
    from gradveil.accounting.manifest import bind_written

    why = bind_written(run, [file for file in files if file.exists()])
    if why is not None:
        warnings.warn(f"{run}: what was written is not bound to the ledger, because {why}.", stacklevel=3)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Epsilons of a run, never merged: ``proved`` by neighbours, and ``as_published`` by accountant (no guarantee)."""

    proved: Mapping[str, ProvedEpsilon]
    as_published: Mapping[str, PaperEpsilon]


def account(
    run: Where | None = None,
    *,
    sigma: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    delta: float | None = None,
    layers: int = 1,
    sampling: str = "poisson",
    decay: str | None = None,
    sigma_end: float | None = None,
) -> Account:
    """Compute every epsilon of a run directory, or of the run that the arguments describe.

    Args:
        run: A run directory or a ledger file. Without it, sigma, sample_rate and steps are required.
        sigma: Noise scale at the first step.
        sample_rate: Expected batch size / number of examples.
        steps: Number of steps.
        delta: By default the run's, or 1e-5.
        layers: Number of layers clipped separately; their joint sensitivity is sqrt(layers) times that of one.
        sampling: The sampler.
        decay: Shape of sigma's decay.
        sigma_end: Sigma at the last step.

    Returns:
        The proved epsilon under both neighbouring relations, and the published figures, which are not guarantees.

    Raises:
        LedgerError: The ledger of the run failed verification.

    >>> found = account(sigma=6.0, sample_rate=0.01, steps=10_000, delta=1e-5)
    >>> round(found.proved["add-remove"].epsilon, 3), round(found.as_published["MA"].epsilon, 3)
    (0.601, 0.823)
    """
    from gradveil import accounting

    if run is not None:
        if sigma is not None or sample_rate is not None or steps is not None:
            raise ConfigError("a run's ledger says its sigma, sample rate and steps: give the run, or the parameters.")
        from gradveil.accounting.ledger import read

        path = Path(run)
        contents = read(path / "ledger.jsonl" if path.is_dir() else path)
        told = accounting.statement_of(contents, delta=delta)
        both = {view.neighbours: view for view in (told.proved, told.proved_other)}
        return Account(proved=both, as_published=told.paper)
    if sigma is None or sample_rate is None or steps is None:
        raise ConfigError("an epsilon needs sigma, sample_rate and steps, or a run directory.")
    delta = 1e-5 if delta is None else delta
    end = sigma_end if sigma_end is not None or decay is None else sigma * SIGMA_END_RATIO
    sigmas = accounting.sigmas_of(accounting.sigma_schedule(sigma, steps=steps, decay=decay, end=end), steps)
    setting = accounting.Setting(sample_rate=sample_rate, layers=layers, sampling=sampling)
    proved = {
        neighbours: accounting.planned_epsilon(sigmas, setting, delta=delta, neighbours=neighbours)
        for neighbours in ("add-remove", "replace-one")
    }
    return Account(proved=proved, as_published=accounting.paper_epsilons(sigmas, sample_rate, delta))


def report(*runs: Where, out: Where | None = None, examples: int = 0, title: str | None = None) -> Path:
    """Write one HTML page about runs.

    Args:
        runs: Run directories.
        out: The file. By default report.html in the run, or in the working directory for several runs.
        examples: How many victims of each attack to show. They are training examples.
        title: Title of the page.

    Returns:
        The path of the page.
    """
    from gradveil.reports.facts import read_run
    from gradveil.reports.page import write_page

    if not runs:
        raise ConfigError("no run is named. Give the directories of one or more runs.")
    facts = [read_run(Path(run)) for run in runs]
    path = Path(out) if out is not None else Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html")
    write_page(facts, path, examples=examples, title=title)
    return path


def compare(*runs: Where) -> list[dict[str, Any]]:
    """Compare runs: one row of plain data per run with accuracy, the three epsilons, noise and attacks.

    >>> import tempfile
    >>> where = tempfile.mkdtemp()
    >>> _ = train(run_dir=where, dataset="digits", strategy="non-private", steps=2, batch_size=64)
    >>> row, = compare(where)
    >>> row["strategy"], row["epsilon_proved"]
    ('non-private', 'inf')
    """
    from gradveil.reports.comparison import row_of
    from gradveil.reports.facts import read_run

    return [row_of(read_run(Path(run))) for run in runs]


def check(run: Where, **limits: Any) -> list[Gate]:
    """Check a run against limits.

    Args:
        run: The run directory.
        limits: max_epsilon (proved), neighbours, max_delta, max_attack_psnr, min_accuracy.

    Returns:
        One gate per limit, with ``passed`` and ``reason``. What cannot be judged has not passed.
    """
    from gradveil.reports.facts import read_run
    from gradveil.reports.gates import Limits, judge

    return judge(read_run(Path(run)), Limits(**limits))
