"""What the operating system refuses: the file, what was being written, what is safe, and how to go on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from digits_runs import SEED, equal, interrupted, settings, tensors
from gradveil.accounting import ledger as ledgers
from gradveil.errors import RunDirectoryError
from gradveil.training import loop as training
from gradveil.training.run_directory import RunDirectory, write_whole


def _refusing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, *, when: Any) -> None:
    """``os.<name>`` fails where ``when`` says so of its arguments."""
    real = getattr(os, name)

    def call(*arguments: Any, **more: Any) -> Any:
        if when(*arguments):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **more)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(
    ("name", "code", "part", "what"),
    [
        ("replace", errno.ENOSPC, "step-00000008.safetensors", "writing the checkpoint of step 8"),
        ("replace", errno.EACCES, "step-00000008.json", "writing the checkpoint of step 8"),
        ("open", errno.EROFS, "step-00000008.json", "writing the checkpoint of step 8"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_says_how_to_go_on_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, part: str, what: str
) -> None:
    where, whole = tmp_path / "run", tmp_path / "whole"
    training.train(settings(), run_dir=whole, seed=SEED)
    _refusing(monkeypatch, name, code, when=lambda *a: part in str(a[0]))
    with pytest.raises(OSError) as caught:
        training.train(settings(), run_dir=where, seed=SEED)
    monkeypatch.undo()
    told = caught.value
    assert told.errno == code and part.split(".")[0] in str(told.filename)
    assert f"{os.strerror(code)}, while {what}. The ledger is safe" in str(told.strerror)
    assert f"gradveil train --resume {where}" in str(told.strerror)
    assert not list(where.rglob(".*.part"))
    training.resume(where)
    assert equal(tensors(where), tensors(whole))


def test_metrics_that_cannot_be_written_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.metrics.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        run.append_metrics({"step": 1})
    assert "while writing the metrics. The ledger is safe" in str(caught.value.strerror)
    assert caught.value.filename == str(run.metrics)


def test_a_full_disk_on_the_command_line_is_one_sentence(gradveil_main, tmp_path: Path, monkeypatch) -> None:
    where = interrupted(settings(), tmp_path / "run", after=4).path

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    code, err = gradveil_main("train", "--resume", where)
    monkeypatch.undo()
    told = " ".join(err.split())
    assert code == 2 and f"gradveil: {where / ledgers.FILE_NAME}: No space left on device, while writing" in told
    assert "The ledger is safe" in told and f"gradveil train --resume {where}" in told
    assert RunDirectory(where).verified_ledger().length


@pytest.fixture
def gradveil_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from gradveil.cli import main

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["gradveil", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(str(caught.value.code)), capsys.readouterr().err

    return call


def test_an_error_without_a_file_is_not_printed_with_empty_colons(gradveil_main, monkeypatch) -> None:
    def broken(**_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("gradveil.cli.cli", broken)
    assert gradveil_main("strategies") == (2, "gradveil: Input/output error\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_directory_that_may_not_be_written_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="locking the run directory"):
        RunDirectory(tmp_path).lock()


def test_what_a_killed_writer_left_is_swept_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    run = interrupted(settings(), tmp_path / "run", after=4)
    dead, live = run.path / ".report.html.999999999.part", run.path / f".audit.json.{os.getppid()}.part"
    other = run.checkpoints / ".step-00000009.json.999999999.part"
    orphan, kept = run.checkpoints / "step-00000009.safetensors", run.path / ".mine.part"
    for path in (dead, live, other, orphan, kept):
        path.write_bytes(b"half")
    run.lock().release()
    assert not dead.exists() and not other.exists() and not orphan.exists()
    assert live.exists() and kept.exists()
    training.resume(run.path)


def test_a_directory_of_a_run_that_was_killed_before_it_began_can_be_used(tmp_path: Path) -> None:
    where = tmp_path / "run"
    where.mkdir()
    (where / "secret.json").write_text('{"seed": 1}')
    (where / ".config.toml.999999999.part").write_text("half")
    training.train(settings(steps=2), run_dir=where)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("")
    with pytest.raises(RunDirectoryError, match="not empty"):
        training.train(settings(steps=2), run_dir=other)


def test_a_whole_file_replaces_another_or_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"one")
    _refusing(monkeypatch, "fsync", errno.EIO, when=lambda *_: True)
    with pytest.raises(OSError, match="while writing the page"):
        write_whole(path, b"two", what="the page")
    monkeypatch.undo()
    assert path.read_bytes() == b"one" and [p.name for p in tmp_path.iterdir()] == ["file"]
