"""The tables of speed, memory and scaling: docs/performance.md, and a line of README.md."""

from __future__ import annotations

from typing import Any

from tables import ABSENT, load, table

OURS = {  # mode -> heading
    "gradveil per-layer": "per layer",
    "gradveil flat": "flat",
    "gradveil per-layer, pure PyTorch": "per layer, no compiled kernels",
}
PEERS = {
    "opacus hooks": "Opacus hooks",
    "opacus functorch": "Opacus functorch",
    "opacus ew": "Opacus expanded weights",
    "opacus ghost": "Opacus ghost",
    "jax sgd": "JAX, plain SGD",
    "jax-privacy": "JAX-Privacy",
}
CAPTURED = {"gradveil per-layer, captured": "per layer", "gradveil flat, captured": "flat"}
LAST = {"sgd, channels_last": "plain SGD", "gradveil per-layer, channels_last": "per layer"}


def _present(data: dict[str, Any], modes: dict[str, str]) -> dict[str, str]:
    return {m: label for m, label in modes.items() if any(m in w["rows"] for w in data["workloads"].values())}


def _workload(name: str, workload: dict[str, Any]) -> str:
    return f"{name}, {workload['what']}, batch {workload['batch']}"


def steps_beside() -> str:
    """What a private step costs on the CPU, here and elsewhere: from the cheapest workload to the dearest."""
    data = load("speed_cpu")
    if data is None:
        return ABSENT
    all_rows = [workload["rows"] for workload in data["workloads"].values()]
    ours = [rows["gradveil per-layer"]["ratio"] for rows in all_rows]
    theirs = [[row["ratio"] for mode, row in rows.items() if mode.startswith("opacus")] for rows in all_rows]
    jax = [rows["jax-privacy"]["ratio"] / rows["jax sgd"]["ratio"] for rows in all_rows if "jax-privacy" in rows]
    said = [f"A private step on the CPU takes {min(ours):.1f} to {max(ours):.1f} plain ones"]
    if best := [min(ratios) for ratios in theirs if ratios]:
        said.append(f"the best of Opacus's modes {min(best):.1f} to {max(best):.1f}")
    if jax:
        said.append(f"JAX-Privacy {min(jax):.1f} to {max(jax):.1f} of JAX's own")
    return ", ".join(said) + f" ({len(all_rows)} workloads)."


def machine(name: str) -> str:
    """Where the figures of a results file come from."""
    data = load(name)
    if data is None:
        return ABSENT
    versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
    return f"{data['machine']}. {versions}. {data['clipping']}. `{data['command']}`"


def speed(name: str, modes: dict[str, str]) -> str:
    """Ratios to a plain step, with the quartiles of the private one; and what did not run."""
    data = load(name)
    if data is None:
        return ABSENT
    shown = _present(data, modes)
    rows = []
    for key, workload in data["workloads"].items():
        base = workload["rows"]["sgd"]["median_ms"]
        cells = [_workload(key, workload), f"{base:.2f}"]
        rows.append(cells + [_ratio(workload["rows"].get(mode), base) for mode in shown])
    return table(["", "plain SGD, ms", *shown.values()], rows) + _not_run(data, modes)


def _ratio(row: dict[str, Any] | None, base: float) -> str:
    if row is None:
        return "-"
    low, high = (q / base for q in row["quartiles_ms"])
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _to_base(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"ratio": row["ratio_to_base"]}


def _not_run(data: dict[str, Any], modes: dict[str, str]) -> str:
    """One line for each reason, in the peer's own words."""
    reasons: dict[str, list[str]] = {}
    for key, workload in data["workloads"].items():
        for mode, reason in workload["failed"].items():
            if mode in modes:
                reasons.setdefault(reason.removeprefix("left out: "), []).append(f"{key} {modes[mode]}")
    lines = [f"- {', '.join(who)}: {reason}" for reason, who in reasons.items()]
    return "\n\nNot run:\n\n" + "\n".join(lines) if lines else ""


def channels_last(name: str) -> str:
    """Both plain baselines, and the private step beside each."""
    data = load(name)
    if data is None:
        return ABSENT
    plain, private = LAST
    rows = []
    for key, workload in data["workloads"].items():
        found = workload["rows"]
        if plain in found and private in found:
            base, last, mine = found["sgd"]["median_ms"], found[plain]["median_ms"], found[private]["median_ms"]
            cells = [f"{base:.2f}", f"{last:.2f}", f"{mine:.2f}", f"{mine / last:.2f}", f"{mine / base:.2f}"]
            rows.append([_workload(key, workload), *cells])
    head = ["", "plain SGD, ms", "plain SGD in channels_last, ms", "private in channels_last, ms"]
    return table([*head, "private / plain in channels_last", "private / plain"], rows) if rows else ABSENT


def captured(name: str) -> str:
    """Graph beside graph, and the captured private step beside an eager plain one and the best of Opacus."""
    data = load(name)
    if data is None:
        return ABSENT
    shown = _present(data, CAPTURED)
    if not shown:
        return ABSENT
    rows = []
    for key, workload in data["workloads"].items():
        found = workload["rows"]
        if "sgd, captured" not in found:
            continue
        base = found["sgd, captured"]["median_ms"]
        cells = [_workload(key, workload), f"{base:.3f}"]
        cells += [_ratio(_to_base(found[mode]) if mode in found else None, base) for mode in shown]
        mine = found["gradveil per-layer, captured"]["median_ms"]
        peers = [row["median_ms"] for mode, row in found.items() if mode.startswith("opacus")]
        cells += [f"{found['sgd']['median_ms'] / mine:.1f}", f"{min(peers) / mine:.1f}" if peers else "-"]
        rows.append(cells)
    head = ["", "plain SGD captured, ms", *(f"{label}, captured / captured" for label in shown.values())]
    return table([*head, "times faster than eager plain SGD", "times faster than the best of Opacus"], rows)


def memory(name: str) -> str:
    data = load(name)
    if data is None:
        return ABSENT
    shown = _present(data, OURS | PEERS)
    measured = {m for w in data["workloads"].values() for m, r in w["rows"].items() if r["peak_bytes"] is not None}
    shown = {m: label for m, label in shown.items() if m in measured}
    if "sgd" not in measured:
        return str(data.get("memory", ABSENT))
    rows = []
    for key, workload in data["workloads"].items():
        base = workload["rows"]["sgd"]["peak_bytes"]
        peaks = [workload["rows"].get(m, {}).get("peak_bytes") for m in shown]
        cells = [_workload(key, workload), f"{base / 1e6:.1f}"]
        rows.append(cells + [f"{p / base:.2f}" if p is not None and base else "-" for p in peaks])
    what = data.get("memory")
    told = f"\n\nMemory here is the {what}." if what else ""
    return table(["", "plain SGD, MB", *shown.values()], rows) + told


def scaling(name: str) -> str:
    data = load(name)
    if data is None:
        return ABSENT
    rows = []
    for series in data["series"].values():
        first, last = series["points"][0], series["points"][-1]
        ratios = [
            last["modes"][m]["median_ms"] / last["modes"]["sgd"]["median_ms"]
            for m in ("gradveil per-layer", "gradveil flat")
        ]
        sizes = f"{first['at']} to {last['at']} {'examples' if series['axis'] == 'batch' else 'layers'}"
        slopes = ["-" if s is None else f"{s:.2f}" for s in series["slopes"].values()]
        rows.append([series["what"], sizes, *slopes, *(f"{r:.2f}" for r in ratios)])
    head = ["", "sizes", "slope, plain SGD", "slope, per layer", "slope, flat"]
    return table([*head, "per layer / plain at the largest", "flat / plain at the largest"], rows)
