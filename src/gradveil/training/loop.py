"""Training behind the command line: a new run, or one that goes on from its newest checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradveil.accounting import manifest, statement_of
from gradveil.accounting.ledger import Contents
from gradveil.errors import RunDirectoryError
from gradveil.mechanism.distributed.ranks import joined
from gradveil.training.config import RunConfig, read_toml
from gradveil.training.environment import environment
from gradveil.training.inputs import Inputs
from gradveil.training.results import Progress, Result
from gradveil.training.run_directory import RunDirectory, write_whole
from gradveil.training.session import Session


def train(
    config: RunConfig,
    *,
    run_dir: Path,
    seed: int | None = None,
    inputs: Inputs | None = None,
    progress: Callable[[Progress], None] | None = None,
    command: Sequence[str] = (),
) -> Result:
    """Train one model as configured, into a new run directory. With a target epsilon, sigma is calibrated first.

    ``inputs``: those of an earlier run on the same data, from :func:`gradveil.training.inputs.prepare`.
    """
    if config.epsilon is not None:
        config = config.model_copy(update={"calibrated": False})  # a sigma found before may be of another plan
    with joined(config.device) as ranks, contextlib.ExitStack() as kept:
        session = Session(config, seed, inputs)  # everything that can be wrong with the settings shows here
        config = session.config

        def begin() -> RunDirectory:
            run = RunDirectory.create(run_dir)
            kept.enter_context(run.lock())
            run.check_empty()  # another process may have begun there in between
            if seed is not None:
                run.write_seed(seed)  # before config.toml, which makes it a run that can be resumed: not without it
            write_whole(run.environment, json.dumps(environment(config, command), indent=1).encode())
            write_whole(run.config, config.to_toml().encode(), what="the settings")
            return run

        session.start(ranks.from_first(begin), resume=False)
        return session.fit(progress)


def resume(
    run_dir: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    new_noise: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Go on with an interrupted run from its newest checkpoint; ``settings`` must be those it began with.

    A seeded run repeats the steps after its checkpoint bit for bit, or refuses. ``new_noise`` gives the rest of
    the run fresh noise instead.
    """
    device = RunConfig.check(read_toml(RunDirectory.open(run_dir).config)).device
    with joined(device) as ranks, contextlib.ExitStack() as kept:

        def begin() -> tuple[RunDirectory, RunConfig, int | None, Contents | None]:
            kept.enter_context(RunDirectory.open(run_dir).lock())
            return _begun(run_dir, settings, seed, new_noise=new_noise)

        run, stored, stored_seed, contents = ranks.from_first(begin)
        if contents is not None and contents.ended is not None:
            return _finished(run, contents)
        session = Session(stored, None if new_noise else stored_seed)
        session.start(run, resume=contents is not None)
        return session.fit(progress)


def _begun(
    run_dir: Path, settings: Mapping[str, Any] | None, seed: int | None, *, new_noise: bool
) -> tuple[RunDirectory, RunConfig, int | None, Contents | None]:
    """What is there of a run that is to go on."""
    run = RunDirectory.open(run_dir)
    stored = RunConfig.check(read_toml(run.config))
    for name, value in (settings or {}).items():
        if getattr(stored, name, None) != value:
            raise RunDirectoryError(
                f"the run in {run_dir} was started with {name} = {getattr(stored, name, None)!r} and cannot continue "
                f"with {value!r}: a run keeps its settings. Resume it without that setting, or start a new run."
            )
    stored_seed = None if new_noise and seed is None else run.read_seed()
    if seed is not None and seed != stored_seed:
        raise RunDirectoryError(f"the run in {run_dir} was not started with that seed. Resume it without --seed.")
    if not run.list_checkpoints() and not run.metrics.exists() and _has_no_whole_line(run.ledger):
        run.ledger.unlink()  # killed before the header was whole: nothing was released
    begun = bool(run.list_checkpoints()) or run.metrics.exists()
    contents = run.verified_ledger() if run.ledger.exists() or begun else None
    if contents is not None:
        _check_files(run, contents)
    if contents is not None and contents.header.seeded and stored_seed is None and not new_noise:
        raise RunDirectoryError(
            f"the run in {run_dir} was started with a seed, but secret.json is missing. Restore it, with mode 0600."
        )
    return run, stored, stored_seed, contents


def _check_files(run: RunDirectory, contents: Contents) -> None:
    bad = [str(file) for file in manifest.file_states(run.path, contents) if file.state in manifest.BAD]
    if bad:
        raise RunDirectoryError(
            f"{run.path} is not as its ledger says: {'; '.join(bad)}. A run keeps its settings and checkpoints as they "
            "were written. Put the files back, or start a new run."
        )


def _finished(run: RunDirectory, contents: Contents) -> Result:
    """The result of a run that is complete already, from what it left."""
    checkpoint, metrics = run.newest_checkpoint(), run.read_metrics()
    looked = [m for m in metrics if m.get("accuracy") is not None]
    releases = contents.releases
    return Result(
        run_dir=run.path,
        steps=checkpoint.step if checkpoint is not None else 0,
        accuracy=float(looked[-1]["accuracy"]) if looked else float("nan"),
        seconds_per_step=float(looked[-1]["seconds"]) / max(1, int(looked[-1]["step"])) if looked else float("nan"),
        ended=contents.ended or "",
        budget_exhausted="more than the budget" in (contents.ended or ""),
        not_finite_examples=0,
        statement=statement_of(contents),
        noise_std_first=max(releases[0].noise_std) if releases else None,
        noise_std_last=max(releases[-1].noise_std) if releases else None,
        accuracy_unaveraged=looked[-1].get("accuracy_unaveraged") if looked else None,
        ledger_head=contents.head,
    )


def _has_no_whole_line(ledger: Path) -> bool:
    return ledger.exists() and b"\n" not in ledger.read_bytes()
