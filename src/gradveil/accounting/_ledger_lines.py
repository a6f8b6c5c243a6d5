"""The lines of a ledger: how each is chained to the one before it, and what a whole file of them says.

One JSON object per line: ``{"n": 3, "kind": "release", "body": {...}, "prev": "<hash>", "hash": "<hash>"}``,
hash = SHA-256 over (n, kind, prev, body). Line 1 is the header. The kinds:

    header    what the run declared before its first step
    release   one step's release
    digest    the digest of a release that was written before a GPU had computed it: {"step", "digest"}
    check     evidence that the model's examples are independent of each other
    public    a pass over data that was declared public
    spent     what a checkpoint of another run brought along; its releases follow
    settings  those of the run that are not in the header (manifest.py)
    file      the name and the hash of a file in the run directory (manifest.py); also after the end
    resume    another process goes on with the run
    end       the run ended, and why
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradveil.errors import LedgerError
from gradveil.mechanism.records import FORMAT_VERSION, AuxiliaryRelease, Release, RunHeader

GENESIS = "0" * 64
NOTES = ("check", "public", "spent", "file", "settings")

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def body_text(body: dict[str, Any] | Release) -> str:
    """The body of a line as JSON. A key's place says nothing: a line is verified in the order it was written in."""
    if not isinstance(body, Release):
        return _ENCODER.encode(body)
    rest = body.to_dict()
    numbers = [f',"{field}":{_numbers(rest.pop(field))}' for field in ("clip", "sensitivity", "noise_std")]
    return f"{_ENCODER.encode(rest)[:-1]}{''.join(numbers)}}}"


def _numbers(values: tuple[float, ...]) -> str:
    """One number per group. All the same, as mostly, they are written out once: half the cost of a line is digits."""
    first = values[0] if values else None
    if type(first) is not float or values.count(first) != len(values):
        return _ENCODER.encode(values)
    return f"[{','.join([repr(first)] * len(values))}]"


def _hash(number: int, kind: str, body: str, previous: str) -> str:
    return hashlib.sha256(f"{number}|{kind}|{previous}|{body}".encode()).hexdigest()


def line(number: int, kind: str, body: str, previous: str) -> tuple[str, str]:
    digest = _hash(number, kind, body, previous)
    return f'{{"n":{number},"kind":"{kind}","body":{body},"prev":"{previous}","hash":"{digest}"}}\n', digest


@dataclass(frozen=True)
class Contents:
    """A ledger that was read and verified. ``torn`` says that a crash left a half-written last line."""

    header: RunHeader
    releases: tuple[Release, ...]
    length: int  # whole lines
    size: int  # bytes of them
    head: str
    torn: bool
    ended: str | None = None  # why the run ended, if it did
    hashes: tuple[str, ...] = ()
    notes: tuple[tuple[str, dict[str, Any]], ...] = ()

    def charged(self) -> tuple[Release, ...]:
        """All that must be counted as spent: the releases, and one more for a half-written line."""
        if not self.torn:
            return self.releases
        return (*self.releases, recovered_release(self.header, self.releases))


def recovered_release(header: RunHeader, releases: Sequence[Release]) -> Release:
    """The release to charge for a line that cannot be read: that of the next step, as planned.

    Its multiplier is the smaller of the plan's and the last one's, so it never counts for less.
    """
    from gradveil.mechanism.schedules import from_dict

    groups = len(header.groups)
    step = releases[-1].step + 1 if releases else 0
    planned = min(step, header.steps - 1)  # the line may have been one after the last release
    clip = from_dict(header.plan["clip"])(planned)
    sigma = min(from_dict(header.plan["sigma"])(planned), header.plan.get("sigma_least", math.inf))
    if releases:
        last = releases[-1]
        smaller = min(1.0, sigma / last.sigma)
        return replace(
            last,
            step=step,
            sigma=last.sigma * smaller,
            noise_std=tuple(s * smaller for s in last.noise_std),
            digest=None,
            nonce=None,
            chosen_from=None,
            recovered=True,
        )
    beside = float(header.plan.get("side_inverse_square", 0.0))
    side = AuxiliaryRelease(name="unreadable", values=(), sensitivity=math.sqrt(beside), noise_std=1.0)
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
    """Read and verify a ledger; :class:`LedgerError` names the first line that failed."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise LedgerError(f"there is no ledger at {path}: nothing can be said about this run's privacy.") from None
    *lines, rest = data.split(b"\n")
    previous, header, found = GENESIS, None, _Found()
    hashes: list[str] = []
    for number, raw in enumerate(lines, start=1):
        kind, body, previous = _verified(raw, number, previous)
        hashes.append(previous)
        if number == 1:
            header = _header(kind, body)
        else:
            found.take(number, kind, body)
    if header is None:
        raise LedgerError("ledger line 1: the file has no whole line, so not even its header.", line=1)
    return Contents(
        header=header,
        releases=tuple(found.releases),
        length=len(lines),
        size=len(data) - len(rest),
        head=previous,
        torn=bool(rest),
        ended=found.ended,
        hashes=tuple(hashes),
        notes=tuple(found.notes),
    )


class _Found:
    """What the lines after the header say, one by one."""

    def __init__(self) -> None:
        self.releases: list[Release] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.ended: str | None = None
        self._places: dict[int, int] = {}  # of each step's last release

    def take(self, number: int, kind: str, body: dict[str, Any]) -> None:
        if kind == "release":
            self._release(number, body)
        elif kind == "digest":
            self._digest(number, body)
        elif kind == "end":
            self.ended = str(body.get("reason", ""))
        elif kind == "resume":
            self.ended = None
        elif kind in NOTES:
            self.notes.append((kind, body))
        else:
            raise LedgerError(
                f"ledger line {number}: unknown kind {kind!r}, so it is not known what it costs. Another version of "
                "gradveil wrote it: read the ledger with that one.",
                line=number,
            )

    def _release(self, number: int, body: dict[str, Any]) -> None:
        try:
            release = Release.from_dict(body)
            self._places[release.step] = len(self.releases)
        except (TypeError, AttributeError) as error:
            raise LedgerError(f"ledger line {number}: not a release ({error}).", line=number) from None
        self.releases.append(release)

    def _digest(self, number: int, body: dict[str, Any]) -> None:
        step, digest = body.get("step"), body.get("digest")
        place = self._places.get(step) if isinstance(step, int) else None
        if place is None or not isinstance(digest, str):
            raise LedgerError(f"ledger line {number}: a digest of step {step!r}, which has no release.", line=number)
        if self.releases[place].digest not in (None, digest):
            raise LedgerError(f"ledger line {number}: a second, different digest of step {step}.", line=number)
        self.releases[place] = replace(self.releases[place], digest=digest)


def _verified(raw: bytes, number: int, previous: str) -> tuple[str, dict[str, Any], str]:
    try:
        entry = json.loads(raw)
        kind, body = str(entry["kind"]), dict(entry["body"])
        chain = (entry["n"], entry["prev"], entry["hash"])
        text = body_text(body)
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
    written, digest = line(number, kind, text, previous)
    if chain[2] != digest or written.encode() != raw + b"\n":
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
