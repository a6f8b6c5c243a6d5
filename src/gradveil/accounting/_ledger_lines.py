"""The lines of a ledger: how each is chained to the one before it, and what a whole file of them says.

One JSON object per line: ``{"n": 3, "kind": "release", "body": {...}, "prev": "<hash>", "hash": "<hash>"}``,
hash = SHA-256 over (n, kind, prev, body), in hexadecimal digits. Most lines of a run are releases much like the one
before, and are shorter: ``[4,{...},"<hash>"]`` is of kind "next", its hash the same in base64. Line 1 is the header.
The kinds:

    header    what the run declared before its first step
    release   one step's release
    next      one step's release, as what it does not share with the release before (_next_release.py)
    digest    the digest of a release that was written before a GPU had computed it: {"step", "digest"}
    check     evidence that the model's examples are independent of each other
    public    a pass over data that was declared public
    spent     what a checkpoint of another run brought along; its releases follow
    environment   what the run goes on under other than before (threads, kernels, versions, device)
    settings  those of the run that are not in the header (manifest.py)
    file      the name and the hash of a file in the run directory (manifest.py); also after the end
    resume    another process goes on with the run
    end       the run ended, and why
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, overload

from gradveil.accounting import files
from gradveil.accounting._ledger_shapes import header_of, release_of
from gradveil.accounting._next_release import stated
from gradveil.accounting._release_table import ReleaseTable
from gradveil.errors import DataError, LedgerError
from gradveil.mechanism.records import FORMAT_VERSION, AuxiliaryRelease, Release, RunHeader

GENESIS = "0" * 64
SHORT_SINCE = 2  # the format in which releases were first written as "next"
NOTES = ("check", "public", "spent", "file", "settings", "environment")

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_HASH_AT = -len(',"') - 43 - len('"]')  # in a line of kind "next", from its end


def _not_a_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_not_a_number)


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
    if kind == "next":
        short = base64.urlsafe_b64encode(bytes.fromhex(digest))[:43].decode()
        return f'[{number},{body},"{short}"]\n', digest
    return f'{{"n":{number},"kind":"{kind}","body":{body},"prev":"{previous}","hash":"{digest}"}}\n', digest


class Wording:
    """Puts entries into lines, one after the other: each is chained to the one before."""

    def __init__(self, header: RunHeader, *, length: int, head: str, last: Release | None) -> None:
        """After ``length`` lines with this ``head``; ``last`` is the release before."""
        self.head, self._length, self._last = head, length, last
        self._short = header.format_version >= SHORT_SINCE

    def line(self, kind: str, body: dict[str, Any] | Release) -> str:
        """The next line."""
        if isinstance(body, Release):
            if self._short and self._last is not None:
                kind, told = "next", _ENCODER.encode(stated(self._last, body))
            else:
                told = body_text(body)
            self._last = body
        else:
            told = _ENCODER.encode(body)
        self._length += 1
        text, self.head = line(self._length, kind, told, self.head)
        return text


class Hashes(Sequence[str]):
    """The hash of each line, in little memory."""

    def __init__(self) -> None:
        self._all = bytearray()

    def append(self, digest: str) -> None:
        self._all += bytes.fromhex(digest)

    def __len__(self) -> int:
        return len(self._all) // 32

    def __eq__(self, other: object) -> bool:
        return self._all == other._all if isinstance(other, Hashes) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...
    def __getitem__(self, place: int | slice) -> str | tuple[str, ...]:
        if isinstance(place, slice):
            return tuple(self[i] for i in range(len(self))[place])
        place = range(len(self))[place]
        return self._all[32 * place : 32 * place + 32].hex()


@dataclass(frozen=True)
class Contents:
    """A ledger that was read and verified. ``torn`` says that a crash left a half-written last line."""

    header: RunHeader
    releases: ReleaseTable
    length: int  # whole lines
    size: int  # bytes of them
    head: str
    torn: bool
    ended: str | None = None  # why the run ended, if it did
    hashes: Sequence[str] = ()
    notes: tuple[tuple[str, dict[str, Any]], ...] = ()

    def charged(self) -> ReleaseTable:
        """All that must be counted as spent: the releases, and one more for a half-written line."""
        if not self.torn:
            return self.releases
        return self.releases.plus(recovered_release(self.header, self.releases))


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
    if not path.exists():
        raise LedgerError(f"there is no ledger at {path}: nothing can be said about this run's privacy.")
    previous, header, found, hashes = GENESIS, None, _Found(), Hashes()
    number, size, torn = 0, 0, False
    try:
        for raw in files.read_lines(path):
            if not raw.endswith(b"\n"):
                torn = True
                break
            number, size = number + 1, size + len(raw)
            if raw.startswith(b"["):
                body, previous = _verified_next(raw[:-1], number, previous)
                found.next(number, body, header)
            else:
                kind, body, previous = _verified(raw[:-1], number, previous)
                if number == 1:
                    header = _header(kind, body)
                else:
                    found.take(number, kind, body)
            hashes.append(previous)
    except DataError as error:
        raise LedgerError(f"ledger line {number + 1}: {error}", line=number + 1) from None
    if header is None:
        raise LedgerError("ledger line 1: the file has no whole line, so not even its header.", line=1)
    return Contents(
        header=header,
        releases=found.releases,
        length=number,
        size=size,
        head=previous,
        torn=torn,
        ended=found.ended,
        hashes=hashes,
        notes=tuple(found.notes),
    )


class _Found:
    """What the lines after the header say, one by one."""

    def __init__(self) -> None:
        self.releases = ReleaseTable()
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.ended: str | None = None
        self._places: dict[int, int] | None = None  # of each step's last release; only where digests ask for it

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

    def next(self, number: int, body: dict[str, Any], header: RunHeader | None) -> None:
        if header is None or header.format_version < SHORT_SINCE:
            raise LedgerError(f"ledger line {number} is not of the format that the header names.", line=number)
        try:
            self.releases.follow(body)
        except (ValueError, TypeError, OverflowError) as error:
            raise LedgerError(f"ledger line {number}: not a release ({error}).", line=number) from None
        self._note_place()

    def _release(self, number: int, body: dict[str, Any]) -> None:
        try:
            self.releases.append(release_of(body))
        except (ValueError, TypeError, OverflowError) as error:
            raise LedgerError(f"ledger line {number}: not a release ({error}).", line=number) from None
        self._note_place()

    def _note_place(self) -> None:
        if self._places is not None:
            self._places[self.releases[-1].step] = len(self.releases) - 1

    def _digest(self, number: int, body: dict[str, Any]) -> None:
        if self._places is None:
            self._places = {step: place for place, step in enumerate(self.releases.steps())}
        step, digest = body.get("step"), body.get("digest")
        place = self._places.get(step) if isinstance(step, int) else None
        if place is None or not isinstance(digest, str):
            raise LedgerError(f"ledger line {number}: a digest of step {step!r}, which has no release.", line=number)
        if self.releases[place].digest not in (None, digest):
            raise LedgerError(f"ledger line {number}: a second, different digest of step {step}.", line=number)
        self.releases.add_digest(place, digest)


def _no_entry(number: int) -> LedgerError:
    return LedgerError(
        f"ledger line {number} is not a ledger entry: the file was changed or is of another kind.", line=number
    )


def _out_of_place(number: int, own: object) -> LedgerError:
    return LedgerError(
        f"ledger line {number} does not follow the line before it (it calls itself line {str(own)[:20]}): a line is "
        "missing, doubled or moved.",
        line=number,
    )


def _changed(number: int) -> LedgerError:
    return LedgerError(f"ledger line {number} was changed after it was written: its hash does not fit.", line=number)


def _verified_next(raw: bytes, number: int, previous: str) -> tuple[dict[str, Any], str]:
    """The body of a line of kind "next", and its hash. The hash is of the bytes as they are."""
    begins = b"[%d," % number
    if not raw.startswith(begins) or raw[_HASH_AT:][:2] != b',"' or raw[-2:] != b'"]':
        own = raw[1:].partition(b",")[0]
        raise (
            _out_of_place(number, own.decode("latin-1")) if own.isdigit() and own != begins[1:-1] else _no_entry(number)
        )
    body = raw[len(begins) : _HASH_AT]
    digest = hashlib.sha256(b"%d|next|%b|%b" % (number, previous.encode(), body)).digest()
    if base64.urlsafe_b64encode(digest)[:43] != raw[-45:-2]:
        raise _changed(number)
    try:
        told = _DECODER.decode(body.decode())
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise _no_entry(number)
    return told, digest.hex()


def _verified(raw: bytes, number: int, previous: str) -> tuple[str, dict[str, Any], str]:
    try:
        entry = _DECODER.decode(raw.decode())
        kind, body = entry["kind"], entry["body"]
        chain = (entry["n"], entry["prev"], entry["hash"])
        if not isinstance(kind, str) or not isinstance(body, dict):
            raise TypeError
        text = _ENCODER.encode(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _no_entry(number) from None
    if chain[0] != number or chain[1] != previous:
        raise _out_of_place(number, chain[0])
    written, digest = line(number, kind, text, previous)
    if chain[2] != digest or written.encode() != raw + b"\n":
        raise _changed(number)
    return kind, body, digest


def _header(kind: str, body: dict[str, Any]) -> RunHeader:
    if kind != "header" or body.get("format_version") not in range(1, FORMAT_VERSION + 1):
        raise LedgerError(
            f"ledger line 1 is not a header of format {FORMAT_VERSION} or older (kind {kind!r}, format "
            f"{str(body.get('format_version'))[:20]}): another program or version wrote it.",
            line=1,
        )
    try:
        return header_of(body)
    except (ValueError, OverflowError) as error:
        raise LedgerError(f"ledger line 1: the header does not fit ({error}).", line=1) from None
