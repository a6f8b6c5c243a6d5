"""What a run has spent, as a dictionary that travels in a checkpoint and is charged to the run that goes on from it.

Releases are stored as columns, one per field of :class:`~gradveil.mechanism.records.Release`. A column is
run-length encoded where values repeat, refers to another where both are equal, and is a plain list where each value
differs (a decaying schedule). 10 000 steps with constant settings take about 1 kB, with decaying clip and sigma about
600 kB of JSON.

Left out are ``nonce`` and ``chosen_from``: they say of which noise, and from what chosen, a release is. The origin's
ledger records both, and nothing is charged by them. All else comes back bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from gradveil.accounting._checks import trusted
from gradveil.accounting._ledger_shapes import header_of, release_of
from gradveil.errors import LedgerError
from gradveil.mechanism.records import Release, RunHeader

FORMAT = "gradveil-spent-1"
MOST_RELEASES = 10_000_000
_FACTS = ("strategy", "guarantee", "population", "sampling", "sample_rate", "delta", "steps", "plan", "stopping")
_MUST_AGREE = ("population", "sampling", "sample_rate", "groups", "delta", "guarantee")
_FIELDS = (
    "sampler",
    "sample_rate",
    "expected_batch_size",
    "clip",
    "sensitivity_rule",
    "sensitivity",
    "sigma",
    "noise_std",
    "scale_is_public",
    "side",
    "digest",
    "recovered",
)
_PER_GROUP = frozenset({"clip", "sensitivity", "noise_std"})


def export(header: RunHeader, releases: Sequence[Release], *, length: int, head: str) -> dict[str, Any]:
    """The dictionary; plain JSON types only, with a checksum of itself."""
    rows, groups = [release.to_dict() for release in releases], len(header.groups)
    columns: dict[str, Any] = {"step": _ranges([row["step"] for row in rows])}
    for field in _FIELDS:
        packed = field in _PER_GROUP
        columns[field] = _column([_packed(row[field], groups) if packed else row.get(field) for row in rows])
    if columns["sensitivity"] == columns["clip"]:
        columns["sensitivity"] = {"as": "clip"}
    spent = {
        "format": FORMAT,
        "header": _facts(header),
        "ledger_length": length,
        "ledger_head": head,
        "releases": len(releases),
        "columns": columns,
    }
    plain: dict[str, Any] = json.loads(json.dumps(spent, allow_nan=False))
    return plain | {"sha256": _checksum(plain)}


def origin(spent: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the note that precedes the imported releases."""
    return {key: spent[key] for key in ("ledger_head", "ledger_length", "releases", "header")}


def check(spent: Mapping[str, Any], header: RunHeader) -> list[Release]:
    """The releases to charge; :class:`LedgerError` if the dictionary is damaged or its run does not fit ``header``.

    A run that may have stopped on released values is charged for all steps it declared, and stays so wherever its
    checkpoint goes: ``header`` must declare as much.
    """
    try:
        whole = spent["format"] == FORMAT and spent["sha256"] == _checksum(spent)
    except (KeyError, TypeError, ValueError, RecursionError):
        whole = False
    if not whole:
        raise _damaged("its checksum or its format does not fit")
    if wrong := _wrong_shape(spent):
        raise _damaged(f"its {wrong} is not what a run writes")
    mine = _facts(header)
    for fact in _MUST_AGREE:
        if spent["header"].get(fact) != mine[fact]:
            raise LedgerError(
                f"the checkpoint's run had {fact} = {spent['header'].get(fact)!r}, and this run has {mine[fact]!r}: "
                "what that run spent cannot be added to what this one spends. Go on with the same data, sampling, "
                "groups and delta, or resume that run in its own run directory."
            )
    try:
        releases = _releases(spent, len(header.groups))
        theirs = _theirs(spent["header"], header)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise _damaged(f"its releases cannot be read ({error})") from None
    trusted(lambda: _check_declared(theirs, header, releases))
    return releases


def _wrong_shape(spent: Mapping[str, Any]) -> str:
    """The first part that is of another kind than :func:`export` writes."""
    shapes: dict[str, tuple[type, ...]] = {"header": (dict,), "columns": (dict,), "ledger_head": (str,)}
    shapes |= {"ledger_length": (int,), "releases": (int,)}
    for name, kinds in shapes.items():
        value = spent.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return name
    return "" if 0 <= spent["releases"] <= MOST_RELEASES else "releases"


def _theirs(facts: Mapping[str, Any], header: RunHeader) -> RunHeader:
    """The header of the run that the checkpoint comes from."""
    stopping = facts.get("stopping", "none")  # an older checkpoint does not say
    own = {name: facts[name] for name in ("strategy", "steps", "plan")} | {"stopping": stopping}
    return header_of(header.to_dict() | own)


def _check_declared(theirs: RunHeader, header: RunHeader, releases: Sequence[Release]) -> None:
    from gradveil.accounting._events import covers

    if not covers(header, theirs, releases):
        raise LedgerError(
            f"the checkpoint's run declared {_declared(theirs)} and released {len(releases)} of its steps. It may have "
            "stopped because of what it released, so all the steps that it could have taken are charged, at the noise "
            f"that it declared. This run declares {_declared(header)}, and would charge less. Declare at least as many "
            "steps as that run, with the same sigma, clip, schedules, stopping and budget. For another plan, load only "
            "the weights into a new run: what both runs spend then adds up."
        )


def _declared(header: RunHeader) -> str:
    told = [f"{header.steps} steps", f"sigma {_told(header.plan.get('sigma'))}", f"stopping={header.stopping!r}"]
    budget = header.plan.get("budget")
    return ", ".join(told if budget is None else [*told, f"budget={budget:g}"])


def _told(schedule: Any) -> str:
    if not isinstance(schedule, Mapping):
        return repr(schedule)
    shape = "" if schedule.get("kind") == "constant" else f" ({schedule.get('kind')})"
    return f"{schedule.get('start')}{shape}"


def _damaged(why: str) -> LedgerError:
    return LedgerError(
        f"the record of spent releases in this checkpoint is damaged: {why}, so what its weights cost is not known. "
        "Load another checkpoint, or resume the run in its own run directory."
    )


def _facts(header: RunHeader) -> dict[str, Any]:
    everything = header.to_dict()
    return {fact: everything[fact] for fact in _FACTS} | {"groups": len(header.groups)}


def _checksum(spent: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in spent.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _releases(spent: Mapping[str, Any], groups: int) -> list[Release]:
    count, columns = spent["releases"], spent["columns"]
    _check_lengths([length for _, length in columns["step"]], count)
    table: dict[str, list[Any]] = {"step": [first + i for first, length in columns["step"] for i in range(length)]}
    for field in _FIELDS:
        column = columns[field]
        if "as" in column:
            table[field] = table[column["as"]]
            continue
        if "each" not in column:
            _check_lengths([times for _, times in column["runs"]], count)
        values = column["each"] if "each" in column else [v for v, times in column["runs"] for _ in range(times)]
        table[field] = [_unpacked(v, groups) for v in values] if field in _PER_GROUP else values
    if any(len(values) != count for values in table.values()):
        raise ValueError("columns of different lengths")
    rows = zip(*table.values(), strict=True)
    return [release_of(dict(zip(table, row, strict=True))) for row in rows]


def _check_lengths(lengths: Sequence[Any], count: int) -> None:
    """Before anything is made of them: a damaged length could ask for all memory."""
    if not all(type(length) is int and length > 0 for length in lengths) or sum(lengths) != count:
        raise ValueError("a column has another length than there are releases")


def _ranges(steps: Sequence[int]) -> list[list[int]]:
    """[first, length] of each stretch of consecutive numbers."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([step, 1])
    return found


def _column(values: list[Any]) -> dict[str, Any]:
    runs = [[value, len(list(same))] for value, same in groupby(values)]
    return {"runs": runs} if 2 * len(runs) <= len(values) else {"each": values}


def _packed(values: Sequence[float], groups: int) -> Any:
    """One number where all groups have the same."""
    return values[0] if len(values) == groups and len(set(values)) == 1 else list(values)


def _unpacked(value: Any, groups: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * groups
