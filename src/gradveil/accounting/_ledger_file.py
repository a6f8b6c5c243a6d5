"""The file of a ledger: opened once, appended to with one ``write`` per change, never written by two processes.

Every append is preceded by one ``stat`` of the path, which shows both what must not happen unnoticed: the file has
another size than this process left (somebody else writes to it), or it is not the file that is open (the run directory
was deleted, moved or replaced, and lines would go into a file that nobody can find).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from gradveil.accounting import files
from gradveil.errors import LedgerError


class LedgerFile:
    """A file of whole lines, open for appending. It holds no state of its own but the descriptor."""

    def __init__(self, path: Path, *, create: bool) -> None:
        """``create``: the file must not exist yet, since a ledger is never overwritten."""
        self.path = path
        self._where = os.path.abspath(path)  # the working directory may change
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_EXCL if create else 0)
        self._descriptor = os.open(self._where, flags, 0o666)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False  # at exit the system closes it, after the last line
        found = os.fstat(self._descriptor)
        self._device, self._inode = found.st_dev, found.st_ino

    def size(self) -> int:
        """How many bytes there are; refused if the path does not lead to the open file any more."""
        try:
            found = os.stat(self._where)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if found is None or found.st_ino != self._inode or found.st_dev != self._device:
            raise LedgerError(
                f"the ledger {self.path} was deleted, moved or replaced during the run: a release written now would be "
                "in no file that can be found. Nothing was written. Put the run directory back where it was, or start "
                "a new run."
            )
        return found.st_size

    def check(self, expected: int) -> None:
        """Refuse to go on where another process has written to the file."""
        size = self.size()
        if size != expected:
            raise self._foreign(size, expected)

    def append(self, data: bytes, *, at: int) -> None:
        """Hand ``data`` to the operating system, in one call. ``at`` is the size that the file had at :meth:`check`.

        If the call writes only a part (the disk is nearly full), the rest is tried once more, which raises the reason;
        the caller cuts the part off.
        """
        written = os.write(self._descriptor, data)
        while written < len(data):
            written += os.write(self._descriptor, data[written:])
        end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if end != at + len(data):  # between check and write
            raise self._foreign(end - len(data), at)

    def settle(self, data: bytes, *, at: int) -> bool:
        """After an append that was interrupted: whether all of ``data`` is in the file. A part of it is cut off."""
        there = self.size() - at
        if not 0 <= there <= len(data) or os.pread(self._descriptor, there, at) != data[:there]:
            raise self._foreign(at + there, at)
        if 0 < there < len(data):
            os.ftruncate(self._descriptor, at)
        return there == len(data)

    def replace_torn_line(self, data: bytes, *, at: int) -> None:
        """Write ``data`` over the half-written line at ``at``, and only then cut off what is left of that line.

        Killed at any moment in between, the file still ends in a half-written line or in ``data``.
        """
        with open(self._where, "r+b") as file:
            file.seek(at)
            file.write(data)
            file.flush()
            file.truncate()
            os.fsync(file.fileno())

    def sync(self) -> None:
        """Return when everything written so far is on the disk."""
        os.fsync(self._descriptor)

    def sync_directory(self) -> None:
        """Return when the file's name is on the disk too: needed once, after it was created."""
        descriptor = os.open(os.path.dirname(self._where), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._close()

    def discard(self) -> None:
        """Close and delete a file that did not even get its first line."""
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self._where)

    def explained(self, error: OSError, fact: str) -> OSError:
        """The error with the file's name, ``fact`` and what to do."""
        where = str(self.path.parent).replace("{", "{{").replace("}", "}}")
        then = (
            f"{fact} The ledger is safe: its earlier lines are whole. To go on, {{mend}}, and then: gradveil train "
            f"--resume {where} (in your own loop: PrivacyEngine(run_dir=..., resume=True))"
        )
        return files.explained(error, self.path, "writing the ledger", then)

    def _foreign(self, size: int, expected: int) -> LedgerError:
        return LedgerError(
            f"the ledger {self.path} has {size} bytes where this process left {expected}: another process is writing "
            "to the same run, or the file was changed, and lines of two processes do not make one chain. This "
            "process releases nothing more. Let only one process work on a run; to go on, end both and resume the run."
        )
