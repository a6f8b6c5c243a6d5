"""Kill -9, many times, at random moments of training runs: what must hold after each kill and at the end.

Two kinds of moments, both drawn by a seeded generator: after a random time (set-up, steps), and at a random
count of the calls that bring something to disk (the moments between the writes of a file, its fsync and its
rename, which time alone would seldom hit). Processes come from a fork server that has torch loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from gradveil.accounting import from_releases, proved_epsilon
from gradveil.accounting import ledger as ledgers
from gradveil.errors import GradveilError, LedgerError, RunDirectoryError
from gradveil.training.config import RunConfig
from gradveil.training.run_directory import RunDirectory

SEED = 918273645
REFUSED = 77  # exit status of a process that ended with a gradveil error

SHARED: dict[str, Any] = {"dataset": "digits", "batch_size": 32, "lr": 0.2, "checkpoint_every": 7, "evaluate_every": 28}
RUNS: dict[str, dict[str, Any]] = {
    "dyn-sigma": {"strategy": "dyn-sigma", "sigma": 6.0, "steps": 120},
    "quantile-clip": {"strategy": "quantile-clip", "sigma": 3.0, "momentum": 0.9, "steps": 60},
    "adaclip": {"strategy": "adaclip", "sigma": 3.0, "optimizer": "adam", "lr": 0.01, "steps": 60},
}
KILLS = {"dyn-sigma": 36, "quantile-clip": 12, "adaclip": 12}


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo and torch._refs are what torch itself loads at the first optimizer and the first model.
    loaded = [
        "gradveil.training.loop",
        "gradveil.accounting",
        "sklearn.datasets",
        "torch._dynamo",
        "torch._refs",
        "pytest",
    ]
    context.set_forkserver_preload(loaded)
    return context


def _die_at(count: int) -> None:
    """Kill this process at the ``count``-th moment before or after a call that brings something to disk."""
    left = count

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tick()
            result = function(*args, **kwargs)
            tick()
            return result

        return call

    for name in ("fsync", "replace", "fchmod"):
        setattr(os, name, wrap(getattr(os, name)))


def _process(settings: Mapping[str, Any], where: Path, fresh: bool, die_at: int | None) -> None:
    """The whole life of one training process."""
    torch.set_num_threads(1)
    from gradveil.engine import PrivacyEngine
    from gradveil.training import loop as training

    # The closing statement can take minutes (PLD, another sigma at every step); the test has its own below.
    PrivacyEngine.statement = lambda self: None  # type: ignore[method-assign,assignment,return-value]
    if die_at is not None:
        _die_at(die_at)
    try:
        if fresh:
            training.train(RunConfig.check(settings), run_dir=where, seed=SEED, command=["test", "--seed", str(SEED)])
        else:
            training.resume(where)
    except GradveilError as error:
        where.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        os._exit(REFUSED)


@dataclass
class Tally:
    """What was met on the way, to show that the moments were spread."""

    kills: int = 0
    in_setup: int = 0
    with_checkpoint: int = 0
    fresh_starts: int = 0
    half_lines: int = 0
    redone: int = 0
    steps_at_kill: list[int] = field(default_factory=list)


def _launch(settings: Mapping[str, Any], where: Path, *, fresh: bool, after: float | None, die_at: int | None) -> int:
    """Run a process, kill it ``after`` seconds if it is still there; its exit status (-9: killed)."""
    process = _context().Process(target=_process, args=(settings, where, fresh, die_at))
    process.start()
    process.join(60 if after is None else after)
    if process.is_alive():
        assert after is not None or die_at is not None, "the run did not finish in a minute"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    status = process.exitcode
    process.close()
    assert status is not None
    return status


def _uninterrupted(settings: Mapping[str, Any], where: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the tensors that a run ends with when it is left alone."""
    status = _launch(settings, where, fresh=True, after=None, die_at=None)
    error = where.with_suffix(".error")
    assert status == 0, error.read_text() if error.exists() else status
    return _final_tensors(where)


def _reads_as_secret(where: Path) -> list[str]:
    """Files that others may read and that hold the seed."""
    readable = [p for p in where.rglob("*") if p.is_file() and stat.S_IMODE(p.stat().st_mode) & 0o077]
    return [p.name for p in readable if str(SEED).encode() in p.read_bytes()]


def _whole_lines(where: Path) -> bytes:
    path = where / ledgers.FILE_NAME
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def _check_after_kill(where: Path, tally: Tally) -> bool:
    """All that must hold of a killed run's directory. False: nothing was begun that could be resumed."""
    if not where.exists():
        return False
    assert _reads_as_secret(where) == []
    if not (where / "config.toml").exists():
        with pytest.raises(RunDirectoryError, match=r"no config\.toml"):
            RunDirectory.open(where)
        assert not (where / ledgers.FILE_NAME).exists(), "there is a ledger, but no way to resume its run"
        return False
    run = RunDirectory.open(where)
    if not _whole_lines(where):
        assert run.newest_checkpoint() is None
        tally.in_setup += 1
        return True
    contents = run.verified_ledger()
    assert contents.header.seeded
    checkpoint = run.newest_checkpoint()
    if checkpoint is None:
        tally.in_setup += not contents.releases
        return True
    tally.with_checkpoint += 1
    tally.steps_at_kill.append(checkpoint.step)
    pinned = int(checkpoint.facts["ledger_length"])
    covered = {r.step for r in contents.releases[:pinned]}
    assert covered >= set(range(checkpoint.step)), "an update reached a checkpoint without its release in the ledger"
    run.read_tensors(checkpoint)
    return True


def _half_a_line(where: Path) -> bool:
    """What a crash inside the operating system's write leaves: half a line at the end. False: not now."""
    path = where / ledgers.FILE_NAME
    contents = ledgers.read(path)
    if not contents.releases or contents.torn:
        return False
    last = path.read_bytes().splitlines()[-1]
    with open(path, "ab") as file:
        file.write(last[: len(last) // 2])
    return True


def _final_tensors(where: Path) -> tuple[int, dict[str, torch.Tensor]]:
    run = RunDirectory(where)
    checkpoint = run.newest_checkpoint()
    assert checkpoint is not None
    return checkpoint.step, safetensors.torch.load(run.read_tensors(checkpoint))


def _train_under_fire(
    name: str,
    settings: Mapping[str, Any],
    where: Path,
    wanted: int,
    tally: Tally,
    random: np.random.Generator,
    span: float,
) -> None:
    """One run from start to end, killed again and again while kills are ``wanted``; ``span``: seconds that it takes."""
    fresh, before = True, b""
    while True:
        attack = tally.kills < wanted
        by_count = attack and random.random() < 0.6
        # Up to 25 moments of set-up, 15 per checkpoint; the times span set-up and the first half of a run.
        die_at = int(random.integers(1, 26 if fresh and random.random() < 0.5 else 90)) if by_count else None
        after = float(random.uniform(0.02, 0.6 * span)) if attack and not by_count else None
        status = _launch(settings, where, fresh=fresh, after=after, die_at=die_at)
        if status == 0:
            return
        if status == REFUSED:
            # Only a run that was killed before the ledger had its first line may be refused.
            message = where.with_suffix(".error").read_text()
            assert not _whole_lines(where), message
            assert message.startswith("LedgerError"), message
            assert "header" in message, message
            shutil.rmtree(where)
            fresh, before = True, b""
            tally.fresh_starts += 1
            continue
        assert status == -signal.SIGKILL, f"a process of the {name} run ended with {status}"
        tally.kills += 1
        fresh = not _check_after_kill(where, tally)
        if fresh:
            shutil.rmtree(where, ignore_errors=True)
            before = b""
            tally.fresh_starts += 1
            continue
        now = _whole_lines(where)
        assert now.startswith(before), "the ledger is no longer append-only"
        before = now
        if now and ledgers.read(where / ledgers.FILE_NAME).ended is not None:
            return  # killed after the last line of all
        if now and tally.kills % 2 == 0:
            tally.half_lines += _half_a_line(where)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", list(RUNS))
def test_runs_killed_at_random_moments_lose_no_release_and_end_bit_equal(name: str, tmp_path: Path) -> None:
    settings = SHARED | RUNS[name]
    began = time.perf_counter()
    steps, expected = _uninterrupted(settings, tmp_path / "whole")
    span = time.perf_counter() - began
    assert steps == settings["steps"]
    reference = RunDirectory(tmp_path / "whole").verified_ledger()
    random = np.random.default_rng(SEED)

    tally, runs, recovered = Tally(), 0, 0
    while tally.kills < KILLS[name]:
        runs += 1
        assert runs < 40, "runs end before they can be killed"
        where = tmp_path / f"run-{runs}"
        _train_under_fire(name, settings, where, KILLS[name], tally, random, span)

        contents = RunDirectory(where).verified_ledger()
        assert contents.ended == "finished"
        assert not contents.torn
        assert {r.step for r in contents.releases} >= set(range(settings["steps"]))
        assert len(contents.releases) >= len(reference.releases)
        tally.redone += len(contents.releases) - len(reference.releases)
        recovered += sum(r.recovered for r in contents.releases)
        assert _reads_as_secret(where) == []

        reached, tensors = _final_tensors(where)
        assert reached == steps
        assert tensors.keys() == expected.keys()
        different = [k for k, v in expected.items() if not torch.equal(v, tensors[k])]
        assert different == [], f"run {runs} does not equal the uninterrupted one"

        published = from_releases(reference.header, reference.releases)
        for accountant, spent in from_releases(contents.header, contents.releases).items():
            assert spent.epsilon >= published[accountant].epsilon
        least = proved_epsilon(reference.header, reference.releases, accountant="RDP").epsilon
        assert proved_epsilon(contents.header, contents.releases, accountant="RDP").epsilon >= least

    assert tally.kills >= KILLS[name]
    assert tally.with_checkpoint >= KILLS[name] // 4
    assert tally.redone > 0
    # At least: a kill may cut a line by itself, or come while one is mended, which is then counted again.
    assert recovered >= tally.half_lines > 0, "a half-written line is not counted as spent"
    print(f"{name}: {runs} runs, {tally}, {time.perf_counter() - began:.1f} s")


def test_the_three_runs_are_killed_at_least_fifty_times() -> None:
    assert sum(KILLS.values()) >= 50


@pytest.mark.parametrize("name", ["dyn-sigma"])
def test_a_kill_at_every_moment_of_set_up_is_resumed_bit_equal_or_refused(name: str, tmp_path: Path) -> None:
    """Every moment before the first checkpoint, one by one: resumed, the run is the seeded one, or it says why not."""
    settings = SHARED | RUNS[name] | {"steps": 2, "checkpoint_every": 2, "evaluate_every": 2}
    _, expected = _uninterrupted(settings, tmp_path / "whole")
    wrong = []
    for moment in range(1, 90, 2):  # odd: before a call; after it is as before the next
        where = tmp_path / f"moment-{moment}"
        status = _launch(settings, where, fresh=True, after=None, die_at=moment)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        there = sorted(p.name for p in where.rglob("*") if p.is_file())
        status = _launch(settings, where, fresh=False, after=None, die_at=None)
        if status == REFUSED:
            assert not _whole_lines(where) or RunDirectory(where).verified_ledger().ended is not None
            continue
        assert status == 0
        contents = RunDirectory(where).verified_ledger()
        _, tensors = _final_tensors(where)
        if not contents.header.seeded or any(not torch.equal(v, tensors[k]) for k, v in expected.items()):
            wrong.append((moment, there))
    else:
        pytest.fail("set-up and the first two steps have more moments than were tried")
    assert moment > 40
    assert wrong == [], "killed at these moments, with these files there, the run went on as another one"


def test_a_run_killed_before_its_ledger_has_a_line_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / ledgers.FILE_NAME).write_bytes(b'{"n":1,"kind":"hea')
    with pytest.raises(LedgerError, match="header") as caught:
        RunDirectory(tmp_path).verified_ledger()
    assert caught.value.line == 1
