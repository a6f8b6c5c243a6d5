"""What a privacy filter costs: its epsilon beside that of the PLD, for the same constant noise.

python benchmarks/filter_price.py --out benchmarks/results/filter_price.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from machine import description, write

from gradveil.accounting import Setting, Target, calibrate_sigma, choose_filters, planned_epsilon

EPSILONS, DELTA = (0.5, 1.0, 2.0, 3.0), 1e-5
# Sample rate, steps. The last three have few steps with little noise, where one order describes the loss badly.
RUNS = ((0.01, 10_000), (0.01, 2_500), (0.04, 1_200), (0.1, 600), (0.2, 300), (1.0, 50))
RUNS += ((0.01, 1_000), (0.1, 60), (0.01, 100))


def cell(rate: float, steps: int, epsilon: float) -> dict[str, float]:
    setting = Setting(sample_rate=rate)
    sigma = calibrate_sigma(Target(epsilon=epsilon, delta=DELTA), setting, steps=steps).sigma
    pld = planned_epsilon([sigma] * steps, setting, delta=DELTA).epsilon
    lead = choose_filters(setting.charges([sigma] * steps), delta=DELTA)[0]
    mine = lead.epsilon(DELTA)
    return {"sigma": sigma, "pld": pld, "filter": mine, "order": lead.order, "price": mine / pld - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for rate, steps in RUNS:
        rows.append({"rate": rate, "steps": steps, "cells": [cell(rate, steps, epsilon) for epsilon in EPSILONS]})
        print(rate, steps, [f"{c['price']:.3f}" for c in rows[-1]["cells"]], flush=True)
    worst = max(c["price"] for row in rows for c in row["cells"])
    machine = description("cpu", 1)
    write(args.out, {"machine": machine, "delta": DELTA, "epsilons": EPSILONS, "worst": worst, "rows": rows})


if __name__ == "__main__":
    main()
