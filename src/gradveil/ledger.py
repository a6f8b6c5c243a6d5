"""The ledger: an append-only, hash-chained record of every release, on disk before its results are.

One JSON object per line: ``{"n": 3, "kind": "release", "body": {...}, "prev": "<hash>", "hash": "<hash>"}``,
hash = SHA-256 over (n, kind, body, prev). Line 1 is the header. Lines are buffered and written in groups
by :meth:`Ledger.commit`, which returns after fsync; it is called before anything computed from a release
leaves the process (a checkpoint, a metric, a state_dict). A release that was never committed was
never seen outside, so a killed process has spent what its ledger says.

A crash in the middle of a write leaves a last line without its newline. That is recognised as such: it
is cut off on resume and replaced by a release marked ``recovered``, which counts as spent.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradveil.errors import LedgerError, RunDirectoryError
from gradveil.records import FORMAT_VERSION, Release, RunHeader, SideRelease

FILE_NAME = "ledger.jsonl"
_GENESIS = "0" * 64
_WRITE_EVERY = 512  # lines held in memory at most
_WRITE_AFTER = 1.0  # seconds


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _body_text(body: dict[str, Any]) -> str:
    return _ENCODER.encode(body)


def _line_hash(number: int, kind: str, body: str, previous: str) -> str:
    return hashlib.sha256(f"{number}|{kind}|{previous}|{body}".encode()).hexdigest()


def _line(number: int, kind: str, body: str, previous: str) -> tuple[str, str]:
    digest = _line_hash(number, kind, body, previous)
    return f'{{"n":{number},"kind":"{kind}","body":{body},"prev":"{previous}","hash":"{digest}"}}\n', digest


@dataclass(frozen=True)
class Contents:
    """A ledger that was read and verified. ``torn`` says that a crash left a half-written last line."""

    header: RunHeader
    releases: tuple[Release, ...]
    length: int  # whole lines
    head: str
    torn: bool
    ended: str | None = None  # why the run ended, if it did
    hashes: tuple[str, ...] = ()

    def charged(self) -> tuple[Release, ...]:
        """All that must be counted as spent: the releases, and one more for a half-written line."""
        if not self.torn:
            return self.releases
        return (*self.releases, recovered_release(self.header, self.releases))


def recovered_release(header: RunHeader, releases: Sequence[Release]) -> Release:
    """The release to charge for a line that cannot be read: that of the next step, as planned.

    Its multiplier is the smaller of the plan's and the last one's, so it never counts for less.
    """
    from gradveil.schedules import from_dict

    groups = len(header.groups)
    step = releases[-1].step + 1 if releases else 0
    planned = min(step, header.steps - 1)  # the line may have been one after the last release
    clip = from_dict(header.plan["clip"])(planned)
    sigma = from_dict(header.plan["sigma"])(planned)
    if releases:
        last = releases[-1]
        smaller = min(1.0, sigma / last.sigma)
        return replace(
            last,
            step=step,
            sigma=last.sigma * smaller,
            noise_std=tuple(s * smaller for s in last.noise_std),
            digest=None,
            recovered=True,
        )
    beside = float(header.plan.get("side_inverse_square", 0.0))
    side = SideRelease(name="unreadable", values=(), sensitivity=math.sqrt(beside), noise_std=1.0)
    return Release(
        step=step,
        sampler=header.sampling,
        sample_rate=header.sample_rate,
        expected_batch_size=header.expected_batch_size,
        clip=(clip,) * groups,
        sensitivity_rule=header.plan["sensitivity_rule"],
        sensitivity=(clip,) * groups,
        sigma=sigma,
        noise_std=(sigma * clip,) * groups,
        scale_is_public=header.guarantee == "proved",
        side=(side,) if beside else (),
        recovered=True,
    )


def read(path: Path) -> Contents:
    """Read and verify a ledger; :class:`LedgerError` names the first line that does not hold."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise LedgerError(f"there is no ledger at {path}: nothing can be said about this run's privacy.") from None
    *lines, rest = data.split(b"\n")
    previous, header, ended = _GENESIS, None, None
    releases: list[Release] = []
    hashes: list[str] = []
    for number, raw in enumerate(lines, start=1):
        kind, body, previous = _verified(raw, number, previous)
        hashes.append(previous)
        if number == 1:
            header = _header(kind, body)
        elif kind == "release":
            try:
                releases.append(Release.from_dict(body))
            except (TypeError, AttributeError) as error:
                raise LedgerError(f"ledger line {number}: not a release ({error}).", line=number) from None
        elif kind == "end":
            ended = str(body.get("reason", ""))
        elif kind != "resume":
            raise LedgerError(f"ledger line {number}: unknown kind {kind!r}.", line=number)
        if kind == "resume":
            ended = None
    if header is None:
        raise LedgerError("ledger line 1: the file has no whole line, so not even its header.", line=1)
    return Contents(
        header=header,
        releases=tuple(releases),
        length=len(lines),
        head=previous,
        torn=bool(rest),
        ended=ended,
        hashes=tuple(hashes),
    )


def _verified(raw: bytes, number: int, previous: str) -> tuple[str, dict[str, Any], str]:
    try:
        entry = json.loads(raw)
        kind, body = str(entry["kind"]), dict(entry["body"])
        chain = (entry["n"], entry["prev"], entry["hash"])
        text = _body_text(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LedgerError(
            f"ledger line {number} is not a ledger entry: the file was changed or is of another kind.",
            line=number,
        ) from None
    if chain[0] != number or chain[1] != previous:
        raise LedgerError(
            f"ledger line {number} does not follow the line before it (it calls itself line {chain[0]}): a line is "
            "missing, doubled or moved.",
            line=number,
        )
    line, digest = _line(number, kind, text, previous)
    if chain[2] != digest or line.encode() != raw + b"\n":
        raise LedgerError(f"ledger line {number} was changed after it was written: its hash does not fit.", line=number)
    return kind, body, digest


def _header(kind: str, body: dict[str, Any]) -> RunHeader:
    if kind != "header" or body.get("format_version") != FORMAT_VERSION:
        raise LedgerError(
            f"ledger line 1 is not a header of format {FORMAT_VERSION} (kind {kind!r}, format "
            f"{body.get('format_version')!r}): another program or version wrote it.",
            line=1,
        )
    try:
        return RunHeader.from_dict(body)
    except (TypeError, KeyError) as error:
        raise LedgerError(f"ledger line 1: the header does not fit ({error}).", line=1) from None


class Ledger:
    """The ledger of a running engine: in memory, and on disk where a path is given.

    No file is held open between commits; a commit that finds the file longer or shorter than this process
    left it refuses to write: another process is at work on the same run.
    """

    def __init__(self, header: RunHeader, path: Path | None = None) -> None:
        if path is not None:
            path.touch(exist_ok=False)  # a ledger is never overwritten
        self._set(header, path, (), length=0, head=_GENESIS, size=0)
        self._add("header", header.to_dict())
        self.commit()

    def _set(
        self, header: RunHeader, path: Path | None, releases: Sequence[Release], *, length: int, head: str, size: int
    ) -> None:
        self.header, self.path = header, path
        self.releases: list[Release] = list(releases)
        self._length, self._head, self._size = length, head, size
        self._noted: list[tuple[str, dict[str, Any] | Release]] = []  # not yet put into words
        self._pending: list[str] = []
        self._unsynced = False
        self._last_commit = time.monotonic()
        self.is_open = True

    @classmethod
    def resume(cls, path: Path, header: RunHeader) -> Ledger:
        """Open an existing ledger to go on; a half-written last line is cut off and counted as spent."""
        contents = read(path)
        for field in ("strategy", "groups", "population", "sampling", "sample_rate", "steps", "delta", "plan"):
            mine, theirs = header.to_dict()[field], contents.header.to_dict()[field]
            if mine != theirs:
                raise RunDirectoryError(
                    f"the run was begun with {field} = {theirs!r}, and is to go on with {mine!r}. A run keeps its "
                    "model and privacy settings; start a new run for others."
                )
        whole = path.read_bytes().rfind(b"\n") + 1
        self = cls.__new__(cls)
        self._set(contents.header, path, contents.releases, length=contents.length, head=contents.head, size=whole)
        self._add("resume", {"after": contents.length, "repaired": contents.torn})
        if contents.torn:
            self.append(recovered_release(contents.header, contents.releases))
            self._write_over_torn_line()
        self.commit()
        return self

    @classmethod
    def beside(cls, header: RunHeader, releases: Sequence[Release]) -> Ledger:
        """In the memory of another process of the same run; on disk is the first one's."""
        self = cls.__new__(cls)
        self._set(header, None, releases, length=len(releases) + 1, head=_GENESIS, size=0)
        return self

    def _write_over_torn_line(self) -> None:
        """Put the charge where the half-written line is, and only then cut off what is left of it."""
        assert self.path is not None
        data = self._lines().encode()
        with open(self.path, "r+b") as file:
            file.seek(self._size)
            file.write(data)
            file.flush()
            file.truncate()
            os.fsync(file.fileno())
        self._size += len(data)
        self._pending.clear()

    def append(self, release: Release) -> None:
        """Note a release; it is on disk after the next :meth:`commit`."""
        numbers = (release.sigma, *release.clip, *release.sensitivity, *release.noise_std)
        if not all(map(math.isfinite, numbers)):
            raise LedgerError(
                f"step {release.step} has a bound or a noise that is not a finite number ({numbers}): not released."
            )
        self._add("release", release)
        self.releases.append(release)
        if self.path is None:
            return
        if len(self._noted) >= _WRITE_EVERY or time.monotonic() - self._last_commit > _WRITE_AFTER:
            self.commit()

    def end(self, reason: str) -> None:
        """Note that the run ended, and why. Nothing can be added after it."""
        self._add("end", {"reason": reason, "releases": len(self.releases)})
        self.commit()
        self.is_open = False

    def _add(self, kind: str, body: dict[str, Any] | Release) -> None:
        if not self.is_open:
            raise LedgerError("the run has ended: its ledger takes no further releases. Start a new run.")
        self._noted.append((kind, body))

    def _put_into_words(self) -> None:
        """Lines are written when they are needed: not in a training step, which has better things to do."""
        lines, head = [], self._head
        for number, (kind, body) in enumerate(self._noted, start=self._length + 1):
            text = _body_text(body.to_dict() if isinstance(body, Release) else body)
            line, head = _line(number, kind, text, head)
            lines.append(line)
        if self.path is not None:
            self._pending += lines
        self._length, self._head = self.length, head
        self._noted.clear()

    def _lines(self) -> str:
        self._put_into_words()
        return "".join(self._pending)

    @property
    def length(self) -> int:
        """How many lines there are."""
        return self._length + len(self._noted)

    @property
    def head(self) -> str:
        """The hash of the last line."""
        self._put_into_words()
        return self._head

    def commit(self) -> None:
        """Write and fsync everything noted so far."""
        self._last_commit = time.monotonic()
        if self.path is None:
            return
        data = self._lines().encode()
        if not (data or self._unsynced):
            return
        with open(self.path, "ab") as file:
            if file.tell() != self._size:
                raise LedgerError(
                    f"the ledger {self.path} has {file.tell()} bytes where this process left {self._size}: another "
                    "process is writing to the same run, or the file was changed. Nothing was written to it."
                )
            self._unsynced = True  # an interrupt from here on leaves lines to be synced, not rewritten
            file.write(data)
            self._size += len(data)
            self._pending.clear()
            file.flush()
            os.fsync(file.fileno())
        self._unsynced = False
