"""What the body of a ledger line must look like before anything is computed from it; ``ValueError`` says what does not.

A chain of hashes shows that lines were not changed since they were written, not that what was written makes sense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradveil.mechanism.records import Release, RunHeader

_LONGEST = 4096  # letters of a word


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _is_word(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _is_optional_word(value: object) -> bool:
    return value is None or _is_word(value)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_number, value))


def _are_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_word, value))


_SIDE: Mapping[str, Callable[[object], bool]] = {
    "name": _is_word,
    "values": _are_numbers,
    "sensitivity": _is_number,
    "noise_std": _is_number,
}


def _are_sides(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(side, dict) and side.keys() == _SIDE.keys() and all(_SIDE[k](v) for k, v in side.items())
        for side in value
    )


_RELEASE: Mapping[str, Callable[[object], bool]] = {
    "step": _is_count,
    "sampler": _is_word,
    "sample_rate": _is_number,
    "expected_batch_size": _is_number,
    "clip": _are_numbers,
    "sensitivity_rule": _is_word,
    "sensitivity": _are_numbers,
    "sigma": _is_number,
    "noise_std": _are_numbers,
    "scale_is_public": _is_truth,
    "side": _are_sides,
    "digest": _is_optional_word,
    "recovered": _is_truth,
    "chosen_from": lambda value: value is None or isinstance(value, dict),
    "nonce": _is_optional_word,
}
_HEADER: Mapping[str, Callable[[object], bool]] = {
    "strategy": _is_word,
    "guarantee": _is_word,
    "groups": _are_words,
    "population": _is_count,
    "sampling": _is_word,
    "sample_rate": _is_number,
    "expected_batch_size": _is_number,
    "steps": _is_count,
    "delta": _is_number,
    "seeded": _is_truth,
    "plan": lambda value: isinstance(value, dict),
    "stopping": _is_word,
    "salt": _is_word,
    "gradveil_version": _is_word,
}


def _check(body: Mapping[str, Any], shapes: Mapping[str, Callable[[object], bool]]) -> None:
    for name, value in body.items():
        shape = shapes.get(name)
        if shape is not None and not shape(value):
            raise ValueError(f"{name} is {repr(value)[:60]}")


def release_of(body: Mapping[str, Any]) -> Release:
    """The release that a line of kind "release" records."""
    _check(body, _RELEASE)
    try:
        return Release.from_dict(body)
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def header_of(body: Mapping[str, Any]) -> RunHeader:
    """The header that line 1 records."""
    _check(body, _HEADER)
    try:
        return RunHeader.from_dict(body)
    except (TypeError, KeyError) as error:
        raise ValueError(str(error)) from None


def check_stated(body: Mapping[str, Any]) -> None:
    """What a line of kind "next" states: fields of a release, one number where all groups have the same."""
    for name, value in body.items():
        if name not in _RELEASE:
            raise ValueError(f"{name!r} is no field of a release")
        per_group = name in ("clip", "sensitivity", "noise_std") and _is_number(value)
        if not per_group and not _RELEASE[name](value):
            raise ValueError(f"{name} is {repr(value)[:60]}")
