"""Files that are on disk whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gradveil import _files

_SAFE = "Nothing else was changed: {mend} and try again."


def write_whole(path: Path, data: bytes, mode: int = 0o644, *, what: str = "", then: str = _SAFE) -> None:
    """Write a file so that it is there whole, and on disk, or not at all.

    Where the operating system refuses, the error says ``what`` was being written, and ``then``: what is safe, and how
    to go on.
    """
    try:
        _write_whole(path, data, mode)
    except OSError as error:
        raise _files.explained(error, path, f"writing {what or path.name}", then) from None


def _write_whole(path: Path, data: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode & ~_umask() if mode != 0o600 else mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_directory(path: Path) -> None:
    """Put the directory's entries on disk: a renamed file survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
