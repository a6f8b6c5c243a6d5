"""Write the tables of README.md from the results files: python benchmarks/render.py [--check]."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def mnist_full_length() -> str:
    data = json.loads((RESULTS / "mnist_full_length.json").read_text())
    rows = ["| run | accuracy | proved epsilon | MA, as published | seconds per step |", "|---|---|---|---|---|"]
    for name, summary in data["summary"].items():
        cell = next(c for c in data["cells"] if c["run"] == name)
        proved, published = cell["proved"]["epsilon"], cell["as_published"].get("MA")
        rows.append(
            f"| {name} | {summary['accuracy_mean']:.4f} "
            f"| {'infinite' if proved == 'inf' else f'{proved:.3f}'} "
            f"| {'-' if published is None else f'{published:.3f}'} "
            f"| {summary['seconds_per_step_median']:.4f} |"
        )
    return "\n".join(rows)


TABLES = {"mnist_full_length": mnist_full_length}


def rendered(text: str) -> str:
    for name, table in TABLES.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        text = re.sub(pattern, lambda m, t=table: f"{m.group(1)}{t()}\n{m.group(2)}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before = readme.read_text()
    if "--check" in sys.argv:
        sys.exit(0 if rendered(before) == before else "README.md is not what the results files say: run this script")
    readme.write_text(rendered(before))
