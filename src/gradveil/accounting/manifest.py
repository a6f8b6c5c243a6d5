"""Which files of a run directory its ledger binds: each is named in a line with its SHA-256, so that the ledger's head
stands for the whole directory.

A ``file`` line is ``{"path", "bytes", "sha256"}``, the path relative to the run directory. The line is written before
the file is put in its place, so a process that is killed in between leaves an old file with an old line, and never a
new one without. ``metrics.jsonl`` only grows: its newest line binds its first ``bytes`` bytes.

Files that show training examples are bound by a salted hash, with the salt in ``secret.json`` beside them: a plain hash
of private data in a ledger that is published would let anyone check a guess. The seed in a run's own ``secret.json`` is
not bound at all; nothing is proved by it.

A ``settings`` line holds the settings of the run that are not in the header, such as its data set and its network.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from gradveil.accounting._ledger_file import LedgerFile
from gradveil.accounting._ledger_lines import Contents, body_text, line, read
from gradveil.accounting._run_lock import Hold, writer
from gradveil.accounting.files import read_object
from gradveil.accounting.ledger import FILE_NAME, Ledger
from gradveil.errors import DataError, LedgerError

State = Literal["bound", "changed", "missing", "left out", "not bound", "never bound"]
BAD: tuple[State, ...] = ("changed", "missing")
SECRET, CHECKPOINTS, GROWS, SIGNATURES = "secret.json", "checkpoints", "metrics.jsonl", "signatures"
_NEVER = {
    SECRET: "holds a seed, which a hash would help to guess",
    "report.html": "is made from the other files",
}
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class BoundFile:
    """What a ledger says of one file: the newest line, and the hashes of earlier ones."""

    path: str
    size: int
    sha256: str
    salted: bool
    earlier: tuple[str, ...]


@dataclass(frozen=True)
class FileState:
    """One file of a run directory, and how it stands to the ledger. ``why`` is empty where there is nothing to say."""

    path: str
    state: State
    why: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.state}{self.why and f' ({self.why})'}"


# ---- writing


def entry(path: str, data: bytes, *, salt: str | None = None) -> dict[str, Any]:
    """The body of the line that binds ``data`` as the file at ``path``, relative to the run directory."""
    found = {"path": path, "bytes": len(data), "sha256": _digest(data, salt)}
    return found if salt is None else {**found, "salted": True}


def bind(ledger: Ledger, path: str, data: bytes) -> None:
    """Name a file that is about to be written in the ledger of a run that goes on; once for the same content."""
    body = entry(path, data)
    if ledger.path is not None and next((b for k, b in reversed(ledger.notes) if _names(k, b, path)), None) != body:
        ledger.note("file", body)


def _names(kind: str, body: Mapping[str, Any], path: str) -> bool:
    return kind == "file" and body.get("path") == path


def bind_written(root: Path, files: Iterable[Path]) -> str | None:
    """Name files that were written beside a run, such as an attack on it; None, or why they could not be bound."""
    path = root / FILE_NAME
    if not path.is_file():
        return "the run has no ledger"
    if (who := writer(root)) is not None:
        return f"{who} is writing to the run"
    with Hold(root):
        contents = read(path)
        if contents.torn:
            return "the ledger ends in a half-written line; resume the run first"
        head, text = contents.head, ""
        for number, body in enumerate((_entry_of(root, file) for file in files), start=contents.length + 1):
            one, head = line(number, "file", body_text(body), head)
            text += one
        file = LedgerFile(path, create=False)
        try:
            file.check(contents.size)
            file.append(text.encode(), at=contents.size)
            file.sync()
        finally:
            file.close()
    return None


def _entry_of(root: Path, file: Path) -> dict[str, Any]:
    shown = file.stat().st_mode & 0o077  # to somebody other than the owner
    return entry(file.relative_to(root).as_posix(), file.read_bytes(), salt=None if shown else salt_beside(file))


def new_salt() -> str:
    return secrets.token_hex(16)


def salt_beside(file: Path) -> str | None:
    """What hashes of the private files in this folder are salted with."""
    try:
        found = read_object(file.parent / SECRET, limit=1 << 16).get("salt")
    except DataError:
        return None
    return found if isinstance(found, str) else None


# ---- reading


def settings_of(contents: Contents) -> dict[str, Any] | None:
    """The settings that the run wrote into its ledger; None in ledgers of before 0.3."""
    return next((dict(body) for kind, body in reversed(contents.notes) if kind == "settings"), None)


def bound_files(contents: Contents) -> dict[str, BoundFile]:
    """By path; a line that names no file of the run directory makes the ledger invalid."""
    found: dict[str, BoundFile] = {}
    for kind, body in contents.notes:
        if kind != "file":
            continue
        path, size, digest = body.get("path"), body.get("bytes"), body.get("sha256")
        if not (
            isinstance(path, str)
            and _is_inside(path)
            and isinstance(size, int)
            and size >= 0
            and isinstance(digest, str)
            and _SHA256.fullmatch(digest)
        ):
            raise LedgerError(f"the ledger names a file in a line that makes no sense: {body!r:.200}.")
        before = found.get(path)
        earlier = () if before is None else (*before.earlier, before.sha256)
        found[path] = BoundFile(path, size, digest, bool(body.get("salted")), earlier)
    return found


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path)
    return bool(path) and not parts.is_absolute() and ".." not in parts.parts and "\0" not in path


def file_states(root: Path, contents: Contents) -> list[FileState]:
    """Every file that the ledger names or that the run directory holds, by path."""
    bound = bound_files(contents)
    held = set(_files_in(root))
    newest = max((path for path in bound if path.startswith(f"{CHECKPOINTS}/")), default="")
    found = []
    for path in sorted(held | set(bound)):
        if path not in bound:
            found.append(_unbound(path))
        elif path not in held:
            found.append(_missing(bound[path], contents, newest))
        else:
            found.append(_compared(root / path, bound[path], contents))
    return found


def check_files(root: Path, contents: Contents) -> None:
    """Refuse a run directory whose bound files were changed or removed."""
    bad = [state for state in file_states(root, contents) if state.state in BAD]
    if bad:
        raise LedgerError(
            f"{root} is not as its ledger says: {'; '.join(map(str, bad))}. Its files were changed after they were "
            "written, or are those of another run. Put them back."
        )


def _files_in(root: Path) -> Iterable[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name).relative_to(root).as_posix()
            if not name.startswith(".") and path != FILE_NAME and not path.startswith(f"{SIGNATURES}/"):
                yield path


def _unbound(path: str) -> FileState:
    name = PurePosixPath(path).name
    if name in _NEVER:
        return FileState(path, "never bound", _NEVER[name])
    return FileState(path, "not bound", "no line of the ledger names it")


def _missing(file: BoundFile, contents: Contents, newest: str) -> FileState:
    if file.salted:
        return FileState(file.path, "left out", "it shows training examples")
    is_checkpoint = file.path.startswith(f"{CHECKPOINTS}/")
    if is_checkpoint and PurePosixPath(file.path).stem != PurePosixPath(newest).stem:
        return FileState(file.path, "left out", "a later checkpoint took its place")
    if contents.ended is None:
        return FileState(file.path, "left out", "the run has not ended: it may be about to write it")
    return FileState(file.path, "missing", "the ledger names it, and it is not there")


def _compared(path: Path, file: BoundFile, contents: Contents) -> FileState:
    salt = salt_beside(path) if file.salted else None
    if file.salted and salt is None:
        return FileState(file.path, "not bound", f"its hash is salted, and {SECRET} is not beside it")
    try:
        if not path.is_file():
            return FileState(file.path, "changed", "it is no ordinary file")
        size = path.stat().st_size
        grows = file.path == GROWS and contents.ended is None
        digest = _digest_of(path, file.size if grows else None, salt)
    except OSError as error:
        return FileState(file.path, "changed", f"it cannot be read: {error.strerror}")
    if digest == file.sha256:
        more = f"its first {file.size} bytes; {size - file.size} follow" if grows and size > file.size else ""
        return FileState(file.path, "bound", more)
    if contents.ended is None and digest in file.earlier:
        return FileState(file.path, "bound", "as written before the run was interrupted")
    return FileState(file.path, "changed", "its SHA-256 is not the one that the ledger names")


def _digest(data: bytes, salt: str | None) -> str:
    return hashlib.sha256((salt or "").encode() + data).hexdigest()


def _digest_of(path: Path, first: int | None, salt: str | None) -> str:
    found = hashlib.sha256((salt or "").encode())
    left = path.stat().st_size if first is None else first
    with open(path, "rb") as file:
        while left > 0 and (part := file.read(min(left, 1 << 20))):
            found.update(part)
            left -= len(part)
    return found.hexdigest()
