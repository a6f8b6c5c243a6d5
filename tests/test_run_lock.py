"""One writer for a run at a time; readers at any time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradveil.accounting import _run_lock
from gradveil.accounting import ledger as ledgers
from gradveil.accounting._run_lock import Hold, writer
from gradveil.accounting.ledger import Ledger
from gradveil.errors import LedgerError, RunDirectoryError
from gradveil.reports.facts import read_run
from gradveil.reports.gates import Limits, judge
from gradveil.training import loop as training
from gradveil.training.run_directory import RunDirectory
from made_ledgers import live_engine, make_header, take_steps

_HOLDS = """
import multiprocessing, sys, time
from pathlib import Path
from gradveil.accounting._run_lock import Hold
hold = Hold(Path(sys.argv[1]))
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""
_TRAINS = """
import sys
from pathlib import Path
from gradveil.training import loop
from gradveil.training.config import RunConfig
settings = {"dataset": "digits", "steps": 20000, "batch_size": 16, "checkpoint_every": 3, "evaluate_every": 10000}
loop.train(RunConfig.check(settings), run_dir=Path(sys.argv[1]), seed=3)
"""


def _process(code: str, where: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(where)], stdout=subprocess.PIPE, text=True)


def test_a_second_process_is_refused_at_once_with_the_owners_number(tmp_path: Path) -> None:
    owner = _process(_HOLDS, tmp_path)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    try:
        with pytest.raises(RunDirectoryError, match=f"process {owner.pid}") as caught:
            Hold(tmp_path)
        assert caught.value.exit_code == 2
        assert writer(tmp_path) == f"process {owner.pid}"
        with pytest.raises(RunDirectoryError, match=f"process {owner.pid}"):
            Ledger(make_header(), tmp_path / ledgers.FILE_NAME)
        assert not (tmp_path / ledgers.FILE_NAME).exists()
    finally:
        owner.kill()
        owner.communicate()
    try:  # a process that the dead owner has forked does not keep its lock
        os.kill(child, 0)
        assert writer(tmp_path) is None
        with Hold(tmp_path):
            assert writer(tmp_path) == f"process {os.getpid()}"
    finally:
        os.kill(child, signal.SIGKILL)
    assert not (tmp_path / _run_lock.FILE_NAME).exists()


def test_engines_hold_their_run_until_they_end(tmp_path: Path) -> None:
    engine, model, optimizer, loader = live_engine(tmp_path)
    take_steps(model, optimizer, loader, 1)
    other = multiprocessing.get_context("fork").Process(target=_tries_to_resume, args=(tmp_path,))
    other.start()
    other.join()
    assert other.exitcode == 77
    take_steps(model, optimizer, loader, 1)
    engine.close()
    assert writer(tmp_path) is None and not (tmp_path / _run_lock.FILE_NAME).exists()


def _tries_to_resume(where: Path) -> None:
    try:
        live_engine(where, resume=True)
    except RunDirectoryError as error:
        os._exit(77 if f"process {os.getppid()}" in str(error) else 1)
    os._exit(0)


def test_the_holders_of_one_process_share_the_lock(tmp_path: Path) -> None:
    first, second = Hold(tmp_path), Hold(tmp_path)
    first.release()
    first.release()
    assert writer(tmp_path) is not None
    second.release()
    assert writer(tmp_path) is None
    third = Hold(tmp_path)
    (tmp_path / _run_lock.FILE_NAME).unlink()  # somebody tidies up
    assert writer(tmp_path) is None
    fourth = Hold(tmp_path)
    third.release()
    assert writer(tmp_path) is not None
    fourth.release()


def test_readers_that_ask_for_the_owner_do_not_keep_a_writer_out(tmp_path: Path) -> None:
    asking = True

    def ask() -> None:
        while asking:
            writer(tmp_path)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            Hold(tmp_path).release()
    finally:
        asking = False
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"pid": "x", "host": 1}', b'{"pid": 1e999, "host": 1}', b"\xff\xfe", b"[" * 5000]
)
def test_an_owner_that_cannot_be_read_is_another_process(content: bytes) -> None:
    assert _run_lock._owner(content) == "another process"


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(_run_lock.fcntl, "flock", none)
    with pytest.warns(UserWarning, match="cannot be locked .Function not implemented"), Hold(tmp_path):
        assert writer(tmp_path) is None


def test_a_directory_that_another_process_has_just_taken_is_refused(tmp_path: Path) -> None:
    where = tmp_path / "run"
    run = RunDirectory.create(where)
    RunDirectory.create(where)  # both have seen it empty
    run.config.write_text("")
    with pytest.raises(RunDirectoryError, match="not empty"):
        run.check_empty()


# ---- readers


def test_what_is_read_while_it_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    answers = [LedgerError("in the middle", line=1), "torn", "whole"]

    def read() -> str:
        path.write_text(path.read_text() + "1")
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert _run_lock.steady(read, path, lambda found: found == "torn") == "whole"
    looks: list[int] = []

    def damaged() -> str:
        looks.append(1)
        raise LedgerError("for good", line=1)

    with pytest.raises(LedgerError, match="for good"):
        _run_lock.steady(damaged, path)
    assert looks == [1]  # nothing changes and nobody writes: no second look


def test_a_live_run_is_read_whole_refuses_a_second_writer_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    where = tmp_path / "run"
    process = _process(_TRAINS, where)
    try:
        run = RunDirectory(where)
        deadline = time.monotonic() + 60
        while not run.list_checkpoints():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        lengths = []
        for _ in range(40):
            facts = read_run(where)
            assert facts.ledger_problem is None and facts.state == "running", facts.ledger_problem
            assert facts.contents is not None
            lengths.append(facts.contents.length)
        assert lengths == sorted(lengths) and lengths[-1] > lengths[0], "the run was not running"
        ledger_gate = judge(facts, Limits(max_delta=1.0))[0]
        assert ledger_gate.passed and f"still running: process {process.pid}" in ledger_gate.reason
        told = subprocess.run(
            [sys.executable, "-m", "gradveil", "ledger", "verify", str(where)], capture_output=True, text=True
        )
        assert told.returncode == 0 and f"still running: process {process.pid}" in told.stdout
        with pytest.raises(RunDirectoryError, match=f"process {process.pid}"):
            training.resume(where)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert read_run(where).state == "interrupted"
    ledger = Ledger.resume(run.ledger, run.verified_ledger().header)  # as training.resume does, without 20 000 steps
    ledger.end("finished")
    assert run.verified_ledger().ended == "finished"
