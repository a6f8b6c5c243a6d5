"""Draw the README's picture from a demo: digits, and what attacks make of each way of training.

gradveil demo --seed 3 --run-dir DEMO && python benchmarks/readme_picture.py DEMO docs/figures/demo_digits.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gradveil.attacks.scoring.pictures import draw_grid
from gradveil.reports.facts import read_run

SHOWN = (  # run, attack, title
    ("non-private", "cpl", "plain SGD"),
    ("baseline", "map", "baseline"),
    ("dyn-s-decay", "map", "dyn-s-decay"),
    ("dyn-s-sigma-example", "map", "dyn-s-sigma\nexample reading"),
    ("dyn-s-sigma-batch", "map", "dyn-s-sigma\nbatch reading"),
)


def main() -> None:
    demo, out = Path(sys.argv[1]), Path(sys.argv[2])
    rows: list[list[tuple[str, torch.Tensor]]] = [[], [], []]
    for run, attack, title in SHOWN:
        (facts,) = (a for a in read_run(demo / run).attacks if a.name == attack)
        pictures = facts.pictures()
        for victim, row in enumerate(rows):
            if not row:
                row.append(("original" if victim == 0 else "", torch.from_numpy(pictures["original"][victim])))
            told = f"{title}\n{facts.psnr:.0f} dB" if victim == 0 else ""
            row.append((told, torch.from_numpy(pictures["found"][victim])))
    draw_grid([("", row) for row in rows], out)


if __name__ == "__main__":
    main()
