"""Reading a file that anybody may have written: a plain one, bounded in size; what is wrong with it is said in words.

Every problem is a :class:`~gradveil.errors.DataError` that names the file. Where content decides (a ledger, an audit, a
checkpoint) the caller lets it through or turns it into a failed gate; where content is only shown, it is a note.

And writing one so that it is on disk whole or not at all (:func:`write_whole`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import stat
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gradveil.errors import DataError

if TYPE_CHECKING:
    import numpy as np

JSON_LIMIT = 1 << 22  # bytes; parsed, JSON can take 30 times as much memory
TOML_LIMIT = 1 << 17  # tomllib takes quadratic time for some files
LINE_LIMIT = 1 << 22  # bytes of one line of a file of lines
ARRAYS_LIMIT = 1 << 27  # bytes of a file of arrays, packed and unpacked


@contextlib.contextmanager
def opened(path: Path, *, limit: int | None = None) -> Iterator[IO[bytes]]:
    """A plain file, open for reading; refused where it is of another kind (a pipe would block) or too large."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise unreadable(path, "it is not a plain file")
    with open(descriptor, "rb") as file:
        if limit is not None and found.st_size > limit:
            raise unreadable(path, f"it has {found.st_size} bytes, and at most {limit} are expected")
        try:
            yield file
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from None


def read_bytes(path: Path, *, limit: int) -> bytes:
    """At most ``limit`` bytes: the whole file."""
    with opened(path, limit=limit) as file:
        data = file.read(limit + 1)
    if len(data) > limit:  # it has grown meanwhile
        raise unreadable(path, f"it has more than {limit} bytes")
    return data


def read_json(path: Path, *, limit: int = JSON_LIMIT) -> Any:
    """What a JSON file holds. NaN and infinities are let through, as Python writes them."""
    try:
        return json.loads(read_bytes(path, limit=limit).decode())
    except (ValueError, RecursionError) as error:
        raise unreadable(path, _reason(error)) from None


def read_object(path: Path, *, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """What a JSON file holds that is to hold one object."""
    found = read_json(path, limit=limit)
    if not isinstance(found, dict):
        raise unreadable(path, f"it holds {_kind(found)} where an object is expected")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, as they are."""
    try:
        found = tomllib.loads(read_bytes(path, limit=TOML_LIMIT).decode())
        _check_whole_numbers(found)
        return found
    except (ValueError, RecursionError) as error:
        raise unreadable(path, f"it is not a TOML file: {_reason(error)}") from None


def _check_whole_numbers(value: object) -> None:
    """TOML's have 64 bits; Python reads longer ones, which it cannot always print."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_whole_numbers(part)
    elif isinstance(value, int) and value.bit_length() > 63:
        raise ValueError("a whole number in it has more than 64 bits")


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file one by one, each with its newline; the last may have none."""
    with opened(path) as file:
        while line := file.readline(LINE_LIMIT + 1):
            if len(line) > LINE_LIMIT:
                raise unreadable(path, f"it has a line of more than {LINE_LIMIT} bytes")
            yield line


def read_arrays(path: Path, *, beginning: str = "", limit: int = ARRAYS_LIMIT) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of an .npz file whose names begin so. Sizes are compared with the file's before memory is taken."""
    import numpy as np

    try:
        with opened(path, limit=limit) as file, zipfile.ZipFile(file) as whole:
            found: dict[str, np.ndarray[Any, Any]] = {}
            for member in whole.infolist():
                name = member.filename.removesuffix(".npy")
                if not name.startswith(beginning):
                    continue
                limit -= member.file_size
                if limit < 0 or member.file_size > 1100 * max(1, member.compress_size):
                    raise unreadable(path, "unpacked it is larger than expected")
                found[name] = np.load(io.BytesIO(_unpacked(whole, member)), allow_pickle=False)
            return found
    except DataError:
        raise
    except Exception as error:  # zipfile and numpy raise what they come across
        raise unreadable(path, f"it is not a file of arrays ({_reason(error)})") from None


def _unpacked(whole: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """The bytes of one array; its header must not announce more than there are."""
    from numpy.lib import format as npy

    with whole.open(member) as file:
        data = file.read(member.file_size + 1)
    header = io.BytesIO(data)
    version = npy.read_magic(header)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(header)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data) - header.tell():
        raise ValueError("an array has another size than its header says")
    return data


def number_or_none(value: object) -> float | None:
    """Of JSON, where infinity may be "inf"; None where it is no number.

    >>> number_or_none(3), number_or_none("inf"), number_or_none(True), number_or_none(float("nan"))
    (3.0, inf, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(found) else found


def unreadable(path: Path, why: str) -> DataError:
    return DataError(f"{path} cannot be read: {why}.")


def explained(error: OSError, path: Path | str, what: str, then: str) -> OSError:
    """An error of the operating system: its file, what was being written, and ``then``: what is safe, what to do."""
    reason = error.strerror or str(error)
    mend = _MENDS.get(error.errno or 0, "mend what is wrong with the disk")
    return OSError(error.errno or errno.EIO, f"{reason}, while {what}. {then.format(mend=mend)}", str(path))


_MENDS = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space or raise the quota",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EACCES: "give yourself the right to write there",
    errno.EPERM: "give yourself the right to write there",
    errno.EROFS: "make the file system writable",
}


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)[:200]


_SAFE = "Nothing else was changed: {mend} and try again."


def write_whole(path: Path, data: bytes, mode: int = 0o644, *, what: str = "", then: str = _SAFE) -> None:
    """Write a file so that it is there whole, and on disk, or not at all.

    Where the operating system refuses, the error says ``what`` was being written, and ``then``: what is safe, and how
    to go on.
    """
    try:
        _write_whole(path, data, mode)
    except OSError as error:
        raise explained(error, path, f"writing {what or path.name}", then) from None


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
