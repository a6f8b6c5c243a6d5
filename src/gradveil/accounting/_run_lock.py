"""One writer for a run directory at a time: an advisory lock (flock) on ``.lock`` in it, for the writer's lifetime.

The operating system releases the lock when its owner ends, however it ends, so a killed run can be resumed at once
and a lock is never stale. The file holds the owner's process number and host, for messages only. Readers take no
lock: they ask who holds it (:func:`writer`), and read again what a writer was changing (:func:`steady`).

Over several processes of one run (torchrun) the first holds the lock: it alone writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gradveil.accounting import files
from gradveil.errors import LedgerError, RunDirectoryError

FILE_NAME = ".lock"
T = TypeVar("T")

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # of file systems without locks
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)  # seconds between two looks at what is being written


class _Held:
    """An open lock file, and how many objects of this process hold it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.holders = descriptor, 0


_held: dict[str, _Held] = {}  # by path of the lock file


class Hold:
    """A lock on a run directory, until it is released, collected, or the process ends.

    Objects of one process share it: a notebook that resumes a run may have the earlier engine still around, and its
    ledger refuses to write once the newer one has.
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock; :class:`RunDirectoryError` at once, with the owner, where another process has it."""
        path = os.path.join(os.path.realpath(directory), FILE_NAME)
        held = _held.get(path)
        if held is None or not _is_at(held.descriptor, path):
            held = _held[path] = _Held(_locked(path, directory))
        held.holders += 1
        self._release = weakref.finalize(self, _release, path, held, os.getpid())
        self._release.atexit = False  # the system releases it, after the last line

    def release(self) -> None:
        """Let other processes write. Doing it twice is the same as once."""
        self._release()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _locked(path: str, directory: Path) -> int:
    """The descriptor of the locked file."""
    for pause in (*_PAUSES, None):  # a reader that asks for the owner has the lock for a moment
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            then = "Nothing was written: {mend} and try again."
            raise files.explained(error, path, "locking the run directory", then) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):  # not one that its owner was just removing
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
                return descriptor
        except OSError as error:
            if error.errno in _NO_LOCKS:
                _warn_without_locks(directory, error)
                return descriptor
            if not isinstance(error, BlockingIOError):
                os.close(descriptor)
                raise
        os.close(descriptor)
        if pause is not None:
            time.sleep(pause)
    owner = writer(directory) or "another process"
    raise RunDirectoryError(
        f"{directory} is being written by {owner}. A run has one writer at a time, so this one was refused and nothing "
        f"was changed. Wait until that one has ended, or end it, and go on: gradveil train --resume {directory}"
    )


def _warn_without_locks(directory: Path, error: OSError) -> None:
    warnings.warn(
        f"{directory} cannot be locked ({error.strerror}): its file system has no locks. Make sure that only one "
        "process writes to this run.",
        stacklevel=2,
    )


def _release(path: str, held: _Held, process: int) -> None:
    if os.getpid() != process:
        return
    held.holders -= 1
    if held.holders:
        return
    if _held.get(path) is held:
        del _held[path]
    with contextlib.suppress(OSError):
        if _is_at(held.descriptor, path):
            os.unlink(path)
    os.close(held.descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the open file is still the one at ``path``."""
    try:
        there, opened = os.stat(path), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)


def _forget() -> None:
    """In a forked process, which would otherwise keep the lock after its parent has ended."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def writer(directory: Path) -> str | None:
    """Who is writing to the run, in words; None if nobody is, as far as can be told."""
    try:
        descriptor = os.open(os.path.join(directory, FILE_NAME), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(os.pread(descriptor, 1000, 0))
    except OSError:
        return None
    finally:
        os.close(descriptor)  # and with it the shared lock
    return None


def _owner(data: bytes) -> str:
    try:
        told = json.loads(data)
        process, host = int(told["pid"]), str(told["host"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "another process"
    return f"process {process}" if host == socket.gethostname() else f"process {process} on {host}"


def steady(read: Callable[[], T], path: Path, is_torn: Callable[[T], bool] = lambda _: False) -> T:
    """What ``read`` gives of the file at ``path``, tried again where a writer may have been in the middle of a change.

    An error is raised, and something torn is returned, if it is still so when nobody writes or nothing has changed.
    """
    for pause in (*_PAUSES, None):
        before, problem, found = _stamp(path), None, None
        try:
            found = read()
            if not is_torn(found):
                return found
        except (LedgerError, RunDirectoryError, FileNotFoundError) as error:
            problem = error
        if pause is None or (writer(path.parent) is None and _stamp(path) == before):
            break
        time.sleep(pause)
    if problem is not None:
        raise problem
    assert found is not None
    return found


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
