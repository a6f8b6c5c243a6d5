"""The tables of docs/networks.md, from the results files of zoo.py and any_network.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tables import ABSENT, load, table

STATUSES = ("right", "refused", "wrong", "crashed")


def zoo_counts() -> str:
    found = load("zoo")
    if found is None:
        return ABSENT
    libraries: dict[str, Counter[str]] = {}
    for name, one in found["networks"].items():
        libraries.setdefault(name.split("/")[0], Counter())[_status(one)] += 1
    versions = found["versions"]
    rows = []
    for library, counts in libraries.items():
        label = f"{library} {versions.get(library, '')}".strip()
        rows.append([label, str(sum(counts[s] for s in STATUSES)), *(str(counts[s]) for s in STATUSES)])
    rows.append(
        ["all", *(str(sum(int(row[i]) for row in rows)) for i in range(1, 2 + len(STATUSES)))],
    )
    mixing = [name for name, one in found["networks"].items() if _status(one) == "mixes"]
    skipped = sum(_status(one) == "not runnable" for one in found["networks"].values())
    note = (
        f"\n\nNot counted: {skipped} configurations that do not run at these sizes without gradveil, and "
        f"{len(mixing)} that mix examples and are refused for it: {', '.join(f'`{name}`' for name in mixing)}."
    )
    if "note" in found:
        note += f" The results were {found['note']}."
    return table(["library", "networks", *STATUSES], rows) + note


def zoo_exceptions() -> str:
    found = load("zoo")
    if found is None:
        return ABSENT
    rows = [
        [f"`{name}`", _status(one), one.get("message", "").replace("|", "/").split(". ")[0][:260]]
        for name, one in found["networks"].items()
        if _status(one) in ("refused", "wrong", "crashed")
    ]
    return table(["network", "result", "message"], rows) if rows else "None."


def _status(one: dict[str, Any]) -> str:
    if one["status"] in ("refused", "wrong") and (one.get("mixes") or "mixes examples" in one.get("message", "")):
        return "mixes" if one["status"] == "refused" else "wrong"
    return "not runnable" if one["status"] == "not installed" else str(one["status"])


def any_network() -> str:
    found = load("any_network_cpu")
    if found is None:
        return ABSENT
    rows = [
        [
            name,
            str(one["batch"]),
            f"{one['rows']['plain']['median_ms']:.1f}",
            f"{one['rows']['per-layer']['ratio']:.2f}",
            f"{one['rows']['flat']['ratio']:.2f}",
            str(one["rows"]["plain"]["n"]),
        ]
        for name, one in found["networks"].items()
    ]
    return table(["network", "batch", "plain step, ms", "per layer", "flat", "steps"], rows)
