"""Very many releases in little memory: columns, with what they share kept once.

A release of the table is made when it is asked for; a million of them take some 60 MB instead of more than a gigabyte.
"""

from __future__ import annotations

import copy
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, overload

import numpy as np

from gradveil.accounting._next_release import following, is_derived, mark_of
from gradveil.mechanism.records import Release, RunHeader

_NONE, _NONCE, _DIGEST, _OTHER = range(4)  # what of a release's nonce and digest there is, and where it is kept
_KEPT_APART = ("step", "sigma", "clip", "nonce", "digest")
_SHARED = tuple(field.name for field in fields(Release) if field.name not in _KEPT_APART)


class ReleaseTable(Sequence[Release]):
    """Releases in the order of their lines. Grows at its end; equal to any sequence of the same releases."""

    def __init__(self, releases: Iterable[Release] = ()) -> None:
        self._steps, self._sigmas, self._clips, self._kinds = array("q"), array("d"), array("d"), array("L")
        self._marks, self._mark_kinds = bytearray(), bytearray()  # 16 bytes, and one, for each
        self._others: dict[int, tuple[str | None, str | None]] = {}  # nonce and digest that are not 16 bytes
        self._shared: list[dict[str, Any]] = []  # by kind: all other fields; "clip" where groups differ
        self._kind_of: dict[tuple[Any, ...], int] = {}
        self._derived: list[bool] = []  # by kind: the noise is sigma S, and S follows from the clip bounds
        self._made: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # the fields of the release made last
        self._charges: tuple[RunHeader | None, int, list[Any]] = (None, 0, [])
        for release in releases:
            self.append(release)

    # ---- growing

    def append(self, release: Release) -> None:
        clip, sigma = release.clip, release.sigma
        first = clip[0] if clip else None
        same = type(first) is float and clip.count(first) == len(clip)
        follows = release.sensitivity == clip
        derived = is_derived(release) and type(sigma) is float
        told = {name: getattr(release, name) for name in _SHARED}
        told["sensitivity"] = None if follows else release.sensitivity
        told["noise_std"] = None if derived else release.noise_std
        told["clip"] = len(clip) if same else clip
        if type(sigma) is not float:
            told["sigma"] = sigma  # a whole number stays one
        key: tuple[Any, ...] = tuple(
            (name, type(value), repr(value) if isinstance(value, Mapping) else value) for name, value in told.items()
        )
        kind = self._kind_of.get(key)
        if kind is None:
            kind = self._kind_of[key] = len(self._shared)
            self._shared.append(told)
            self._derived.append(derived)
        self._add(release.step, float(sigma), first if same and first is not None else 0.0, kind)
        self._mark(len(self) - 1, release.nonce, release.digest)

    def follow(self, told: Mapping[str, Any]) -> None:
        """Append the release that follows the last one as a line of kind "next" states."""
        place = len(self) - 1
        if place < 0:
            raise ValueError("no release is before it")
        kind, sigma, mark_kind = self._kinds[place], self._sigmas[place], _NONE
        count, mark = len(told), bytes(16)
        if "nonce64" in told:
            count, mark_kind, mark = count - 1, _NONCE, mark_of(told["nonce64"])
        elif "digest64" in told and self._mark_kinds[place] != _OTHER:
            count, mark_kind, mark = count - 1, _DIGEST, mark_of(told["digest64"])
        if count and "sigma" in told and self._derived[kind] and type(told["sigma"]) is float:
            count, sigma = count - 1, told["sigma"]
        counts_on = mark_kind == _NONE and self._mark_kinds[place] == _OTHER
        if count or counts_on or self._steps[place] >= (1 << 53) - 1:
            self.append(following(self[place], told))
            return
        self._add(self._steps[place] + 1, sigma, self._clips[place], kind)
        self._marks += mark
        self._mark_kinds.append(mark_kind)

    def _add(self, step: int, sigma: float, clip: float, kind: int) -> None:
        self._steps.append(step)
        self._sigmas.append(sigma)
        self._clips.append(clip)
        self._kinds.append(kind)

    def _mark(self, place: int, nonce: str | None, digest: str | None) -> None:
        kind, mark = _NONE, None
        if nonce is not None or digest is not None:
            kind, mark = _OTHER, nonce if digest is None else digest if nonce is None else None
        whole = bytes(16)
        if mark is not None and len(mark) == 32:
            try:
                whole = bytes.fromhex(mark)
                kind = (_NONCE if digest is None else _DIGEST) if whole.hex() == mark else _OTHER
            except ValueError:
                kind = _OTHER
        self._others.pop(place, None)
        if kind == _OTHER:
            self._others[place] = (nonce, digest)
        self._marks[16 * place : 16 * place + 16] = whole[:16].ljust(16, b"\0")
        self._mark_kinds[place : place + 1] = bytes([kind])

    def add_digest(self, place: int, digest: str) -> None:
        """The digest of a release that was written without one."""
        self._mark(place, self[place].nonce, digest)

    def plus(self, release: Release) -> ReleaseTable:
        """Another table, with one more."""
        other = ReleaseTable()
        for name, value in vars(self).items():
            setattr(other, name, copy.copy(value))
        other.append(release)
        return other

    # ---- what was computed of them

    def charges_under(self, header: RunHeader) -> list[Any] | None:
        """What :meth:`keep_charges` was given for this header, if nothing was added since."""
        kept, count, charges = self._charges
        return charges if kept is header and count == len(self) else None

    def keep_charges(self, header: RunHeader, charges: list[Any]) -> None:
        self._charges = (header, len(self), charges)

    # ---- looking

    def _fields(self, kind: int, sigma: float, clip: float) -> dict[str, Any]:
        """All but step, nonce and digest; the multiplier too, which is computed once."""
        key = (kind, sigma, clip)
        if self._made[0] != key:
            shared = self._shared[kind]
            own = shared["clip"]
            told = {**shared, "sigma": shared.get("sigma", sigma), "clip": (clip,) * own if type(own) is int else own}
            if told["sensitivity"] is None:
                told["sensitivity"] = told["clip"]
            if told["noise_std"] is None:
                told["noise_std"] = tuple(told["sigma"] * s for s in told["sensitivity"])
            release = Release(step=0, **told)
            self._made = (key, told | {"nonce": None, "digest": None, "multiplier": release.multiplier})
        return self._made[1]

    def _release(self, place: int, step: int, told: dict[str, Any], mark_kind: int) -> Release:
        made = object.__new__(Release)
        found = vars(made)
        found.update(told)
        found["step"] = step
        if mark_kind == _NONCE:
            found["nonce"] = self._marks[16 * place : 16 * place + 16].hex()
        elif mark_kind == _DIGEST:
            found["digest"] = self._marks[16 * place : 16 * place + 16].hex()
        elif mark_kind == _OTHER:
            found["nonce"], found["digest"] = self._others[place]
        return made

    @overload
    def __getitem__(self, place: int) -> Release: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Release, ...]: ...
    def __getitem__(self, place: int | slice) -> Release | tuple[Release, ...]:
        if isinstance(place, slice):
            return tuple(self[i] for i in range(len(self))[place])
        place = range(len(self))[place]
        told = self._fields(self._kinds[place], self._sigmas[place], self._clips[place])
        return self._release(place, self._steps[place], told, self._mark_kinds[place])

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Release]:
        columns = zip(self._steps, self._kinds, self._sigmas, self._clips, self._mark_kinds, strict=True)
        for place, (step, kind, sigma, clip, mark_kind) in enumerate(columns):
            yield self._release(place, step, self._fields(kind, sigma, clip), mark_kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def stretches(self) -> Iterator[tuple[Release, np.ndarray[Any, Any]]]:
        """Releases in a row that differ in step, nonce, digest and sigma alone, with the noise that follows from it.

        The first of them, and the sigma of each.
        """
        if not len(self):
            return
        kinds, clips = (np.frombuffer(c, dtype=c.typecode) for c in (self._kinds, self._clips))
        ends = np.flatnonzero((kinds[1:] != kinds[:-1]) | (clips[1:] != clips[:-1])) + 1
        sigmas = np.array(self._sigmas)
        for first, end in itertools.pairwise([0, *ends.tolist(), len(self)]):
            yield self[first], sigmas[first:end]

    def steps(self) -> Sequence[int]:
        """The step of each, without making the releases."""
        return memoryview(self._steps)

    def sigmas(self) -> Sequence[float]:
        """The sigma of each."""
        return memoryview(self._sigmas)


def kinds(releases: Iterable[Release]) -> Iterable[tuple[Release, int]]:
    """A release, and how many in a row are like it but for step, nonce, digest, sigma, and noise that follows that.

    Of releases that are not in a table, one by one.
    """
    if isinstance(releases, ReleaseTable):
        return ((release, len(sigmas)) for release, sigmas in releases.stretches())
    return ((release, 1) for release in releases)


def steps_of(releases: Iterable[Release]) -> Sequence[int]:
    return releases.steps() if isinstance(releases, ReleaseTable) else [release.step for release in releases]


def sigmas_of(releases: Iterable[Release]) -> Sequence[float]:
    return releases.sigmas() if isinstance(releases, ReleaseTable) else [release.sigma for release in releases]
