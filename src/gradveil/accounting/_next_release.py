"""A release written as what it does not share with the one before it: a dozen bytes where settings stay the same.

    {}                      the next step, everything as before
    {"nonce64": "..."}      the next step under its own nonce (or digest64: with its digest): an ordinary step
    {"sigma": 5.1, ...}     and another sigma; noise_std follows as sigma S where it did before

What is left out follows from the release before, by this rule and nothing else:

    step          one more
    clip          the same
    sensitivity   the new clip, if it was the clip before; else the same
    sigma         the same
    noise_std     sigma S in each group, if it was exactly that before; else the same
    nonce         "<series>-<k>" (several ranks) counts on; else none
    digest        none
    all else      the same

Products of two floats are the same on every machine, so what is derived comes back bit for bit. A nonce or a digest of
16 bytes is written in base64, as nonce64 or digest64.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from gradveil.accounting._ledger_shapes import check_stated
from gradveil.mechanism.records import AuxiliaryRelease, Release

_OWN_RULE = ("step", "clip", "sensitivity", "sigma", "noise_std", "nonce", "digest")
_SAME = tuple(field.name for field in fields(Release) if field.name not in _OWN_RULE)


def is_derived(release: Release) -> bool:
    """Whether the noise is sigma S in each group, to the last bit."""
    return release.noise_std == tuple(release.sigma * s for s in release.sensitivity)


def next_nonce(nonce: str | None) -> str | None:
    """
    >>> next_nonce("ab12-9"), next_nonce("ab12")
    ('ab12-10', None)
    """
    series, dash, count = (nonce or "").rpartition("-")
    return f"{series}-{int(count) + 1}" if dash and count.isascii() and count.isdecimal() and len(count) < 16 else None


def stated(before: Release, release: Release) -> dict[str, Any]:
    """What a line must state of ``release`` where ``before`` is known."""
    found: dict[str, Any] = {}
    if release.step != before.step + 1:
        found["step"] = release.step
    if release.clip != before.clip:
        found["clip"] = _packed(release.clip, len(before.clip))
    if release.sensitivity != (release.clip if before.sensitivity == before.clip else before.sensitivity):
        found["sensitivity"] = _packed(release.sensitivity, len(before.clip))
    if release.sigma != before.sigma:
        found["sigma"] = release.sigma
    if release.sigma == before.sigma and release.sensitivity == before.sensitivity:
        noise = before.noise_std  # whether derived or not
    else:
        noise = tuple(release.sigma * s for s in release.sensitivity) if is_derived(before) else before.noise_std
    if release.noise_std != noise:
        found["noise_std"] = _packed(release.noise_std, len(before.clip))
    for name in _SAME:
        value = getattr(release, name)
        if value != getattr(before, name):
            found[name] = [dict(vars(side)) for side in value] if name == "side" else value
    if release.nonce != next_nonce(before.nonce):
        _put_mark(found, "nonce", release.nonce)
    if release.digest is not None:
        _put_mark(found, "digest", release.digest)
    return found


def following(before: Release, told: Mapping[str, Any]) -> Release:
    """The release that :func:`stated` was made of; ``ValueError`` where it does not state one."""
    told = dict(_marks_put_back(told))
    check_stated(told)
    groups = len(before.clip)
    clip = _unpacked(told["clip"], groups) if "clip" in told else before.clip
    if "sensitivity" in told:
        sensitivity = _unpacked(told["sensitivity"], groups)
    else:
        sensitivity = clip if before.sensitivity == before.clip else before.sensitivity
    sigma = told.get("sigma", before.sigma)
    if "noise_std" in told:
        noise = _unpacked(told["noise_std"], groups)
    elif is_derived(before):
        noise = tuple(sigma * s for s in sensitivity)
    else:
        noise = before.noise_std
    rest = {name: told[name] for name in _SAME if name in told}
    if "side" in rest:
        rest["side"] = tuple(AuxiliaryRelease(**{**s, "values": tuple(s["values"])}) for s in rest["side"])
    return replace(
        before,
        step=told.get("step", before.step + 1),
        clip=clip,
        sensitivity=sensitivity,
        sigma=sigma,
        noise_std=noise,
        nonce=told.get("nonce", next_nonce(before.nonce)),
        digest=told.get("digest"),
        **rest,
    )


_HEX = re.compile("[0-9a-f]{32}")


def _put_mark(found: dict[str, Any], name: str, mark: str | None) -> None:
    if mark is not None and _HEX.fullmatch(mark):
        found[f"{name}64"] = base64.urlsafe_b64encode(bytes.fromhex(mark))[:22].decode()
    else:
        found[name] = mark


def mark_of(text: object) -> bytes:
    """The 16 bytes of a nonce64 or a digest64; ``ValueError`` if it is none."""
    if not isinstance(text, str) or len(text) != 22:
        raise ValueError(f"{repr(text)[:60]} is no nonce and no digest")
    mark = base64.urlsafe_b64decode(f"{text}==")
    if base64.urlsafe_b64encode(mark)[:22].decode() != text:
        raise ValueError(f"{text!r} is no nonce and no digest")
    return mark


def _marks_put_back(told: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in told.items():
        if name in ("nonce64", "digest64"):
            if name[:-2] in told:
                raise ValueError(f"{name[:-2]} is stated twice")
            yield name[:-2], mark_of(value).hex()
        else:
            yield name, value


def _packed(values: Sequence[float], groups: int) -> Any:
    """One number where all groups have the same."""
    first = values[0] if values else None
    same = type(first) is float and len(values) == groups and values.count(first) == groups
    return first if same else list(values)


def _unpacked(value: Any, groups: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * groups
