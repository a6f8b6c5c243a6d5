"""A ledger whose process is interrupted, killed, forked, out of disk space or robbed of its directory."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gradveil.accounting import _ledger_file, _ledger_lines
from gradveil.accounting import ledger as ledgers
from gradveil.accounting.ledger import Ledger
from gradveil.errors import LedgerError, PrivacyViolation
from gradveil.mechanism.records import Release, RunHeader
from made_ledgers import make_header, make_release, write

OURS = {ledgers.__file__, _ledger_file.__file__, _ledger_lines.__file__}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ledgers.FILE_NAME


# ---- an exception at every line


class Injected(BaseException):
    pass


class Bomb:
    """Raises when the ``at``-th line of the ledger's own code is about to run."""

    def __init__(self, at: int) -> None:
        self.left, self.where = at, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in OURS:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise Injected
        return self


def interrupted(action: Callable[[], Any], at: int) -> str | None:
    """Where the action was interrupted; None if it came to its end before."""
    bomb, before = Bomb(at), sys.gettrace()
    sys.settrace(bomb)
    try:
        action()
    except Injected:
        return bomb.where
    finally:
        sys.settrace(before)
    return None


def actions(
    ledger: Ledger, steps: Iterator[int], appended: list[int], tried: list[int]
) -> dict[str, Callable[[], Any]]:
    def append() -> None:
        step = next(steps)
        tried.append(step)
        ledger.append(make_release(ledger.header, step))
        appended.append(step)

    def append_with_digest() -> None:
        append()
        ledger.add_digest(appended[-1], "d" * 32)

    def append_and_commit() -> None:
        append()
        ledger.commit()

    def look() -> None:
        assert len(ledger.releases) >= len(appended)
        assert ledger.length > len(ledger.releases)
        assert ledger.head

    return {
        "append": append,
        "append and commit": append_and_commit,
        "append, then its digest": append_with_digest,
        "note": lambda: ledger.note("public", {"examples": 3}),
        "look": look,
    }


@pytest.mark.parametrize("where", ["disk", "disk, fsync each", "disk, fsync due", "memory"])
def test_an_exception_at_any_line_leaves_each_release_in_the_ledger_once_or_not_at_all(
    path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "disk, fsync due":
        monkeypatch.setattr(ledgers, "_SYNC_AFTER", 0.0)
    header = make_header(steps=10_000)
    durability: Any = "fsync" if where == "disk, fsync each" else "write"
    ledger = Ledger(header, None if where == "memory" else path, durability=durability)
    steps, appended, tried = iter(range(10_000)), [], []
    places: set[str] = set()
    injections = 0
    for name, action in actions(ledger, steps, appended, tried).items():
        for at in range(1, 400):
            place = interrupted(action, at)
            if place is None:
                break  # it has no more lines than that
            places.add(place)
            injections += 1
            # Interrupted again while it is put right, and then left in peace.
            interrupted(lambda: ledger.length, 1 + at % 12)
            if at % 3:
                action()
        else:
            pytest.fail(f"{name} has more lines than were tried")
        action()
    assert injections >= (100 if where == "memory" else 200)
    assert len(places) >= (20 if where == "memory" else 40)
    kept = [release.step for release in ledger.releases]
    assert len(set(kept)) == len(kept), "a release is in the ledger twice"
    assert set(appended) <= set(kept) <= set(tried)
    assert kept == sorted(kept)
    if where != "memory":
        ledger.commit()
        found = ledgers.read(path)
        assert found.releases == tuple(ledger.releases)
        assert (found.length, found.head, found.torn) == (ledger.length, ledger.head, False)
        assert found.notes == ledger.notes
        assert path.stat().st_size == found.size


@pytest.mark.parametrize("at", range(1, 60))
def test_an_end_that_was_interrupted_can_be_repeated_or_has_happened(path: Path, at: int) -> None:
    ledger = write(path, make_header(), 2)
    interrupted(lambda: ledger.end("finished"), at)
    if ledger.is_open:
        ledger.end("finished")
    ledger.commit()
    found = ledgers.read(path)
    assert (found.ended, found.length) == ("finished", 4)


@pytest.mark.parametrize("at", range(1, 90, 3))
def test_a_ledger_whose_creation_was_interrupted_leaves_its_path_free_or_holds_a_header(path: Path, at: int) -> None:
    interrupted(lambda: Ledger(make_header(), path), at)
    if path.exists() and path.stat().st_size:
        assert ledgers.read(path).length == 1
    elif not path.exists():
        Ledger(make_header(), path)


class Handler(Bomb):
    """Looks at the ledger before every line of its code, as a signal handler that saves a checkpoint would."""

    def __init__(self, ledger: Ledger, at: int) -> None:
        super().__init__(at)
        self.ledger = ledger

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_code.co_filename in OURS:
            self.ledger.commit()
            assert self.ledger.length == 1 + len(self.ledger.releases)
        super().__call__(frame, event, argument)
        return self if frame.f_code.co_filename in OURS else None


def test_a_signal_handler_that_commits_in_the_middle_of_an_append_does_no_harm(path: Path) -> None:
    header = make_header(steps=1000)
    ledger = Ledger(header, path)
    appended = []
    for step in range(150):
        handler = Handler(ledger, step + 1)  # which is interrupted itself, too
        sys.settrace(handler)
        try:
            ledger.append(make_release(header, step))
            appended.append(step)
        except Injected:
            pass
        finally:
            sys.settrace(None)
    kept = [release.step for release in ledger.releases]
    assert set(appended) <= set(kept)
    assert len(set(kept)) == len(kept)
    assert len(appended) > 50 and len(appended) < 150
    assert ledgers.read(path).releases == tuple(ledger.releases)


def test_threads_that_append_and_commit_at_once_make_one_chain(path: Path) -> None:
    header = make_header(steps=10_000)
    ledger = Ledger(header, path)

    def work(first: int) -> None:
        for step in range(first, first + 200):
            ledger.append(make_release(header, step))
            if step % 17 == 0:
                ledger.commit()

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 200, 400)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = ledgers.read(path)
    assert sorted(r.step for r in found.releases) == list(range(600))
    assert found.releases == tuple(ledger.releases)


# ---- killed


def test_every_release_that_was_appended_is_in_the_file_after_sigkill(path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from made_ledgers import make_header, make_release
from gradveil.accounting.ledger import Ledger
header = make_header(steps=200)
ledger = Ledger(header, Path({str(path)!r}))
for step in range(100):
    ledger.append(make_release(header, step))
    os.write(1, b".")  # what an eavesdropper has received
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout) == 100
    assert [r.step for r in ledgers.read(path).releases] == list(range(100))


def test_a_line_is_written_with_one_call_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = make_header()
    ledger = Ledger(header, path)
    calls: list[bytes] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: (calls.append(data), real(descriptor, data))[1])
    ledger.append(make_release(header, 0))
    monkeypatch.undo()
    assert len(calls) == 1
    assert path.read_bytes().endswith(calls[0])
    assert calls[0].count(b"\n") == 1


# ---- no space


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can grow beyond ``size`` bytes: a write that would is cut short, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 30, 50])
def test_a_line_that_fits_only_in_part_is_cut_off_and_the_ledger_goes_on(path: Path, room: int) -> None:
    header = make_header()
    ledger = write(path, header, 3)
    before = path.read_bytes()
    for _ in range(2):
        with room_for(len(before) + room), pytest.raises(OSError, match="too large") as caught:
            ledger.append(make_release(header, 3))
        assert caught.value.errno == errno.EFBIG
        assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    assert len(ledger.releases) == 3
    ledger.append(make_release(header, 3))
    assert [r.step for r in ledgers.read(path).releases] == [0, 1, 2, 3]


def test_a_full_disk_is_named_with_its_file_and_what_to_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = make_header()
    ledger = write(path, header, 1)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        ledger.append(make_release(header, 1))
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)  # the command line prints "gradveil: <filename>: <strerror>"
    assert "nothing was released" in caught.value.strerror
    assert "free space" in caught.value.strerror
    ledger.append(make_release(header, 1))
    assert len(ledgers.read(path).releases) == 2


def test_a_part_that_cannot_be_cut_off_at_once_is_cut_off_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = make_header()
    ledger = write(path, header, 2)
    size = path.stat().st_size

    def broken(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "ftruncate", broken)
    with room_for(size + 50), pytest.raises(OSError):
        ledger.append(make_release(header, 2))
    assert ledgers.read(path).torn
    monkeypatch.undo()
    ledger.append(make_release(header, 2))
    found = ledgers.read(path)
    assert not found.torn and len(found.releases) == 3


# ---- other processes, forks, directories that move


def test_what_another_process_wrote_between_check_and_write_is_noticed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = make_header()
    ledger = write(path, header, 1)
    real = os.write

    def after_another(descriptor: int, data: bytes) -> int:
        with open(path, "ab") as other:
            other.write(b"{}\n")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", after_another)
    with pytest.raises(LedgerError, match="another process"):
        ledger.append(make_release(header, 1))
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="another process"):
        ledger.append(make_release(header, 1))


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_forked_process_cannot_append(path: Path, on_disk: bool) -> None:
    header = make_header()
    ledger = Ledger(header, path if on_disk else None)
    ledger.append(make_release(header, 0))
    child = os.fork()
    if child == 0:  # no exception may leave: it would run the rest of the tests twice
        status = 1
        with contextlib.suppress(BaseException):
            try:
                ledger.append(make_release(header, 1))
            except PrivacyViolation as error:
                ledger.commit()
                status = 0 if "forked" in str(error) and len(ledger.releases) == 1 else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ledger.append(make_release(header, 1))
    if on_disk:
        assert [r.step for r in ledgers.read(path).releases] == [0, 1]


def _deleted(run: Path) -> None:
    (run / ledgers.FILE_NAME).unlink()


def _moved(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def _replaced(run: Path) -> None:
    copy = (run / ledgers.FILE_NAME).read_bytes()
    (run / ledgers.FILE_NAME).unlink()
    (run / "keeps the inode").write_bytes(b"")
    (run / ledgers.FILE_NAME).write_bytes(copy)


def _a_file(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))
    run.write_bytes(b"")


@pytest.mark.parametrize("change", [_deleted, _moved, _replaced, _a_file])
def test_a_directory_that_was_deleted_or_moved_is_an_error_at_the_next_append(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    header = make_header()
    ledger = write(run / ledgers.FILE_NAME, header, 2)
    change(run)
    with pytest.raises(LedgerError, match="deleted, moved or replaced"):
        ledger.append(make_release(header, 2))
    assert len(ledger.releases) == 2


def test_a_directory_that_is_moved_back_is_taken_up_again(tmp_path: Path) -> None:
    run, header = tmp_path / "run", make_header()
    run.mkdir()
    ledger = write(run / ledgers.FILE_NAME, header, 2)
    _moved(run)
    with pytest.raises(LedgerError):
        ledger.append(make_release(header, 2))
    (tmp_path / "elsewhere").rename(run)
    ledger.append(make_release(header, 2))
    assert len(ledgers.read(run / ledgers.FILE_NAME).releases) == 3


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    header = make_header()
    ledger = Ledger(header, Path(ledgers.FILE_NAME))
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    ledger.append(make_release(header, 0))
    assert len(ledgers.read(tmp_path / ledgers.FILE_NAME).releases) == 1


def test_ledgers_that_are_gone_leave_no_open_file(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    before = count()
    for n in range(20):
        ledger = write(tmp_path / str(n), make_header(), 1)
        if n % 2:
            ledger.end("finished")
    del ledger
    assert count() == before


def _released(header: RunHeader, count: int) -> list[Release]:
    return [make_release(header, step) for step in range(count)]


def test_fsync_is_called_at_every_append_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = make_header()
    ledgers_ = {d: Ledger(header, tmp_path / d, durability=d) for d in ("write", "fsync")}  # type: ignore[arg-type]
    calls: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(descriptor), real(descriptor))[1])
    for durability, count in (("write", 0), ("fsync", 5)):
        for release in _released(header, 5):
            ledgers_[durability].append(release)
        assert len(calls) == count
    monkeypatch.setattr(ledgers, "_SYNC_AFTER", 0.0)
    ledgers_["write"].append(make_release(header, 5))
    assert len(calls) == 6, "the last fsync is too long ago"
    with pytest.raises(ValueError, match="durability 'often'"):
        Ledger(header, tmp_path / "other", durability="often")  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()
