"""The ledger: an append-only, hash-chained record of every release, written before the release is used.

:meth:`Ledger.append` returns after the release's line was handed to the operating system with one ``write``; only then
does the engine hand out the noised gradient. So a process that is killed at any moment, by SIGKILL too, has spent no
more than its ledger says. A power cut can take what was written since the last fsync, which is called at
:meth:`Ledger.commit`, at the end, at an append if the last one is more than a second ago, and with
``durability="fsync"`` at every append.

A crash in the middle of a write leaves a last line without its newline. That is recognised as such: on resume it is
replaced by a release marked ``recovered``, which counts as spent.

The lines themselves are described in ``_ledger_lines.py``, the file in ``_ledger_file.py``.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from gradveil.accounting import _spent
from gradveil.accounting._ledger_file import LedgerFile
from gradveil.accounting._ledger_lines import GENESIS, NOTES, Contents, Wording, body_text, read, recovered_release
from gradveil.accounting._run_lock import Hold
from gradveil.errors import LedgerError, PrivacyViolation, RunDirectoryError, UnknownNameError
from gradveil.mechanism.records import Release, RunHeader

__all__ = ["FILE_NAME", "Contents", "Durability", "Ledger", "read", "recovered_release"]

FILE_NAME = "ledger.jsonl"
Durability = Literal["write", "fsync"]
_SYNC_AFTER = 1.0  # seconds

_Entry = tuple[str, "dict[str, Any] | Release"]  # kind and body
_Put = tuple[list[Any], int, Sequence[Any]]  # a list, a place in it, and what stands from there on


class _State(NamedTuple):
    """Of a ledger between two changes; replaced as a whole."""

    length: int
    head: str
    size: int
    is_open: bool = True


class _Change(NamedTuple):
    """Lines on their way to the file, and what becomes of the ledger once they are there.

    Carrying it out twice is the same as once, so whoever is interrupted on the way can do it again from the start.
    """

    data: bytes
    before: _State
    after: _State
    puts: Sequence[_Put]


class Ledger:
    """The ledger of a running engine: in memory, and on disk where a path is given.

    A change is complete (in the file and in memory) or is completed or undone before the next look at the ledger,
    wherever an exception or an interrupt struck: never a line twice, never a release in memory without its line. An
    append that raised may have written its line; the release is then charged, if perhaps never used.

    One process writes to a ledger: the run directory is locked until the ledger has ended or is collected. A file that
    another process changed all the same, that was deleted or moved, and a process that was forked from the one that
    opened the ledger are refused before anything is written.
    """

    _file: LedgerFile | None
    _hold: Hold | None

    def __init__(self, header: RunHeader, path: Path | None = None, *, durability: Durability = "write") -> None:
        self._set(header, path, (), _State(0, GENESIS, 0), durability=durability)
        if path is None:
            self._write([("header", header.to_dict())])
            return
        self._hold = Hold(path.parent)
        self._file = file = LedgerFile(path, create=True)
        try:
            self._write([("header", header.to_dict())])
            self.commit()
            file.sync_directory()
        except BaseException:
            file.discard()  # nothing was released, and the path can be used again
            self._hold.release()
            raise

    def _set(
        self,
        header: RunHeader,
        path: Path | None,
        releases: Sequence[Release],
        state: _State,
        *,
        notes: Sequence[tuple[str, dict[str, Any]]] = (),
        durability: Durability = "write",
    ) -> None:
        if durability not in get_args(Durability):
            raise UnknownNameError("durability", durability, get_args(Durability))
        self.header, self.path, self.durability = header, path, durability
        self._releases, self._notes = list(releases), list(notes)
        self._state = state
        self._change: _Change | None = None  # one that was begun
        self._file = self._hold = None
        self._synced, self._last_sync = state.size, time.monotonic()
        self._entries: list[_Entry] = []  # in memory only: put into words when the head is asked for
        last = self._releases[-1] if self._releases else None
        self._worded = (0, state.head, last)  # how many of them are; the head after those, and the last release
        promised = sum(body.get("releases", 0) for kind, body in notes if kind == "spent")
        self._owed = max(0, promised - len(releases))  # of an import that a kill cut short
        self._pid = os.getpid()
        self._lock = threading.RLock()

    @classmethod
    def resume(cls, path: Path, header: RunHeader, *, durability: Durability = "write") -> Ledger:
        """Open an existing ledger to go on; a half-written last line is cut off and counted as spent."""
        hold = Hold(path.parent) if path.parent.is_dir() else None
        contents = read(path)
        for field in ("strategy", "groups", "population", "sampling", "sample_rate", "steps", "delta", "plan"):
            mine, theirs = header.to_dict()[field], contents.header.to_dict()[field]
            if field == "plan" and "noise" not in theirs:  # begun in floating point: it goes on so
                mine.pop("noise", None)
            if mine != theirs:
                raise RunDirectoryError(
                    f"the run was begun with {field} = {theirs!r}, and is to go on with {mine!r}. A run keeps its "
                    "model and privacy settings; start a new run for others."
                )
        self = cls.__new__(cls)
        state = _State(contents.length, contents.head, contents.size)
        self._set(contents.header, path, contents.releases, state, notes=contents.notes, durability=durability)
        self._hold, self._file = hold, LedgerFile(path, create=False)
        resumed: _Entry = ("resume", {"after": contents.length, "repaired": contents.torn})
        if contents.torn:
            lost = recovered_release(contents.header, contents.releases)
            change = self._worded_change([resumed, ("release", lost)], (self._releases, len(self._releases), [lost]))
            self._file.replace_torn_line(change.data, at=contents.size)
            self._finish(change)
        else:
            self._write([resumed])
        self.commit()
        return self

    @classmethod
    def beside(
        cls, header: RunHeader, releases: Sequence[Release], notes: Sequence[tuple[str, dict[str, Any]]] = ()
    ) -> Ledger:
        """In the memory of another process of the same run; on disk is the first one's."""
        self = cls.__new__(cls)
        self._set(header, None, releases, _State(len(releases) + 1, GENESIS, 0), notes=notes)
        return self

    # ---- what is in it

    @property
    def releases(self) -> list[Release]:
        """All that counts as spent. Not to be changed by the caller."""
        self._settle()
        return self._releases

    @property
    def notes(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Kind and body of each note."""
        self._settle()
        return tuple(self._notes)

    @property
    def is_open(self) -> bool:
        """Whether the run has not ended."""
        self._settle()
        return self._state.is_open

    @property
    def length(self) -> int:
        """How many lines there are."""
        self._settle()
        return self._state.length

    @property
    def head(self) -> str:
        """The hash of the last line."""
        self._settle()
        if self.path is not None:
            return self._state.head
        done, head, last = self._worded
        length = self._state.length - len(self._entries) + done
        wording = Wording(self.header, length=length, head=head, last=last)
        for kind, body in self._entries[done:]:
            wording.line(kind, body)
            last = body if isinstance(body, Release) else last
        self._worded = (len(self._entries), wording.head, last)
        return wording.head

    def holds(self, length: int, head: str) -> bool:
        """Whether line ``length`` of this ledger has the hash ``head``: a checkpoint that pins it belongs to it."""
        if (length, head) == (self.length, self.head):
            return True
        if self.path is None or not 1 <= length <= self.length:
            return False
        return read(self.path).hashes[length - 1] == head

    def took_over(self, length: int, head: str) -> bool:
        """Whether :meth:`import_spent` has charged, in whole or in part, what a checkpoint with this pin brings."""
        return any(
            kind == "spent" and (body["ledger_length"], body["ledger_head"]) == (length, head)
            for kind, body in self.notes
        )

    # ---- what is added to it

    def append(self, release: Release) -> None:
        """Write a release; when this returns, its line is with the operating system and survives this process."""
        self._check_finite(release)
        with self._lock:
            if self._owed:
                raise LedgerError(
                    f"{self._owed} releases that a checkpoint brought along are not in this ledger yet: the process "
                    "that loaded it was killed. Load the checkpoint again before the next step."
                )
            self._write([("release", release)], (self._releases, len(self.releases), (release,)))

    def add_digest(self, step: int, digest: str) -> None:
        """The digest of the last release of ``step``, which was written without one."""
        with self._lock:
            releases = self.releases
            place = next((i for i in reversed(range(len(releases))) if releases[i].step == step), None)
            if place is None:
                raise LedgerError(f"step {step} has no release for a digest to belong to. Append the release first.")
            earlier = releases[place].digest
            if earlier == digest:
                return  # a second try, after an interrupt
            if earlier is not None:
                raise LedgerError(f"the release of step {step} has the digest {earlier}, which cannot become {digest}.")
            with_digest = (releases, place, (replace(releases[place], digest=digest),))
            self._write([("digest", {"step": step, "digest": digest})], with_digest)

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Write a note, as a release is written.

        Kinds: "check" (evidence of an independence check), "public" (a pass over data declared public), "environment"
        (what a run goes on under), "spent" (what a checkpoint brought along; written by :meth:`import_spent`),
        "settings" and "file" (manifest.py).
        """
        if kind not in NOTES:
            raise UnknownNameError("kind of note", kind, NOTES)
        entry = (kind, _plain(kind, body))
        with self._lock:
            self._write([entry], (self._notes, len(self.notes), (entry,)))

    def end(self, reason: str) -> None:
        """Write that the run ended, and why. Nothing can be added after it."""
        with self._lock:
            self._write([("end", {"reason": reason, "releases": len(self.releases)})], ends=True)
            self.commit()
            if self._file is not None:
                self._file.close()
            if self._hold is not None:
                self._hold.release()

    def export_spent(self) -> dict[str, Any]:
        """What another run needs to charge this one's releases: plain JSON types, to be kept in a checkpoint."""
        with self._lock:
            return _spent.export(self.header, self.releases, length=self.length, head=self.head)

    def import_spent(self, spent: Mapping[str, Any]) -> None:
        """Charge what :meth:`export_spent` gave, of the run that a checkpoint comes from, to this fresh one.

        Written are a "spent" note with the origin's head, and the releases as ordinary lines, all with one call.
        Importing the same again changes nothing; an import that a kill cut short is completed.
        """
        releases = _spent.check(spent, self.header)
        origin = _plain("spent", _spent.origin(spent))
        with self._lock:
            noted = [body for kind, body in self.notes if kind == "spent"]
            there = _imported(self.releases, releases) if noted == [origin] else 0
            if there is None or (noted and noted != [origin]) or (self._releases and not noted):
                raise LedgerError(
                    f"this run has {len(self._releases)} releases of its own or of another checkpoint, so those of "
                    f"the run with head {origin['ledger_head'][:16]} cannot be put before them. Load a checkpoint of "
                    "another run into a new engine with a new run directory, before its first step."
                )
            missing = releases[there:]
            for release in missing:
                self._check_finite(release)
            notes = [] if noted else [("spent", origin)]
            if notes or missing:
                self._write(
                    [*notes, *(("release", release) for release in missing)],
                    (self._notes, len(self._notes), notes),
                    (self._releases, len(self._releases), missing),
                )
                self.commit()
            self._owed = 0

    def commit(self) -> None:
        """Return when every line is on the disk itself (fsync), not only with the operating system."""
        with self._lock:
            self._settle()
            if self._file is None or self._synced == self._state.size:
                return
            if os.getpid() == self._pid:  # a forked process may still wait for what it has seen, whoever writes on
                self._file.check(self._state.size)
            self._sync()

    # ---- how

    def _write(self, entries: Sequence[_Entry], *puts: _Put, ends: bool = False) -> None:
        """Called with the lock held."""
        self._settle()
        self._check_usable()
        if self._file is None:
            state = self._state._replace(length=self._state.length + len(entries), is_open=not ends)
            noted: _Put = (self._entries, len(self._entries), entries)
            self._change = change = _Change(b"", self._state, state, (*puts, noted))
            self._finish(change)
            return
        change = self._worded_change(entries, *puts, ends=ends)
        self._file.check(change.before.size)
        self._change = change
        try:
            self._file.append(change.data, at=change.before.size)
        except OSError as error:
            self._settle()
            self._change = None
            fact = "The ledger's next line was not written, so nothing was released."
            raise self._file.explained(error, fact) from None
        self._finish(change)
        if self.durability == "fsync" or time.monotonic() - self._last_sync > _SYNC_AFTER:
            self._sync()

    def _worded_change(self, entries: Sequence[_Entry], *puts: _Put, ends: bool = False) -> _Change:
        before = self._state
        last = self._releases[-1] if self._releases else None
        wording = Wording(self.header, length=before.length, head=before.head, last=last)
        data = "".join([wording.line(kind, body) for kind, body in entries]).encode()
        after = _State(before.length + len(entries), wording.head, before.size + len(data), not ends)
        return _Change(data, before, after, puts)

    def _finish(self, change: _Change) -> None:
        """The lines are in the file: so are their contents here."""
        for into, place, values in change.puts:
            into[place : place + len(values)] = values
        self._state = change.after
        self._change = None

    def _settle(self) -> None:
        """Complete or undo a change that was interrupted; which of the two, the file says."""
        if self._change is not None:
            with self._lock:
                self._complete_or_undo(self._change)

    def _complete_or_undo(self, change: _Change | None) -> None:
        if change is None:  # another thread's, complete by now
            return
        self._check_process()
        if self._file is None or self._file.settle(change.data, at=change.before.size):
            self._finish(change)
        # Else it stays, until the next one: this may be a signal handler, and the write still to come.

    def _sync(self) -> None:
        assert self._file is not None
        size = self._state.size
        try:
            self._file.sync()
        except OSError as error:
            fact = "The ledger's last lines could not be brought to the disk, so nothing computed from them may leave."
            raise self._file.explained(error, fact) from None
        self._synced, self._last_sync = size, time.monotonic()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PrivacyViolation(
                f"process {os.getpid()} was forked from process {self._pid}, which opened this run's ledger: releases "
                "of two processes do not make one chain, and what one writes the other would not charge. Nothing was "
                "written. Train in the process that called make_private; for several processes see docs/scaling.md."
            )

    def _check_usable(self) -> None:
        self._check_process()
        if not self._state.is_open:
            raise LedgerError("the run has ended: its ledger takes no further releases. Start a new run.")

    @staticmethod
    def _check_finite(release: Release) -> None:
        numbers = [release.sigma, *release.clip, *release.sensitivity, *release.noise_std]
        for side in release.side:
            numbers += (side.sensitivity, side.noise_std, *side.values)
        if not all(map(math.isfinite, numbers)):
            raise LedgerError(
                f"step {release.step} has a bound or a noise that is not a finite number ({numbers}): not released."
            )


def _plain(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read back: a copy in JSON types, which nobody can change later."""
    try:
        plain: dict[str, Any] = json.loads(body_text(dict(body)))
    except (TypeError, ValueError) as error:
        raise LedgerError(f"a note of kind {kind!r} is not JSON ({error}): give numbers, strings and lists.") from None
    return plain


def _imported(there: Sequence[Release], wanted: Sequence[Release]) -> int | None:
    """How many of ``wanted`` an earlier import has written; None if others are in between.

    A line that a kill cut in half was replaced on resume by a recovered one, which is charged besides.
    """
    found = 0
    for release in there:
        if found < len(wanted) and release == wanted[found]:
            found += 1
        elif found < len(wanted) and not release.recovered:
            return None
    return found
