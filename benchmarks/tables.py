"""What the tables of the documents are made with: results files, and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ABSENT = "not measured yet"


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def attack_strength() -> str:
    """Of benchmarks/attack_strength.py: the cells that were run."""
    data = load("attack_strength")
    if data is None:
        return ABSENT
    head = ["cell", "examples", "PSNR, median dB", "least", "guess", "found again", "success at least", "labels", "s"]
    rows = []
    for name, cell in data["cells"].items():
        least = cell.get("least_psnr")
        rows.append(
            [
                name,
                str(cell["examples"]),
                f"{cell['psnr_median']:.1f}",
                "-" if least is None else f"{least:.1f}",
                f"{cell['guess_psnr_median']:.1f}",
                f"{cell['retrieved_first']:.0%}",
                f"{cell['success_rate']:.0%}",
                f"{cell['labels_right']:.0%}",
                f"{cell['seconds']:.0f}",
            ]
        )
    return table(head, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
