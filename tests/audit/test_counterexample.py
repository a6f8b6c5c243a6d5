"""The l2-max counterexample, as documented, runs and shows what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "l2max_counterexample.py"


def test_the_scale_gives_one_example_away_at_any_sigma():
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--trials", "60", "--sigmas", "6", "600"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rows = {table.splitlines()[0]: table.splitlines()[2:] for table in done.stdout.split("\n\n")}
    for name in ("l2-max, example", "l2-max, batch", "baseline"):
        for row in rows[name]:
            sigma, without, with_it, wrong, _, _, _, epsilon, published = row.split()
            if name == "baseline":
                assert float(without) / float(with_it) > 0.9
                assert int(wrong) > 10
                assert float(epsilon) == 0
            else:
                assert float(with_it) / float(without) > 4
                assert int(wrong) == 0
                assert float(epsilon) > 1.5
            assert (float(published) < 0.01) == (sigma == "600")
