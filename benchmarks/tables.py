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


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
