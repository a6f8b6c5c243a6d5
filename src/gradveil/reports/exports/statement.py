"""The statement as JSON, with what it stands on; its JSON Schema is statement.schema.json beside this file."""

from __future__ import annotations

import json
from typing import Any

from gradveil import __version__
from gradveil.accounting.tradeoff import tradeoff
from gradveil.reports.exports import Export
from gradveil.reports.facts import RunFacts

FORMAT = "gradveil-statement/1"


def made(run: RunFacts) -> Export:
    assert run.contents is not None and run.statement is not None
    rates = tradeoff(run.contents.header, run.contents.charged())
    whole: dict[str, Any] = {
        "format": FORMAT,
        "run": run.name,
        "written_by": f"gradveil {__version__}",
        "ledger": {
            "head": run.contents.head,
            "lines": run.contents.length,
            "releases": len(run.contents.releases),
            "ended": run.contents.ended,
        },
        "statement": run.statement.to_dict(),
        "tradeoff": None
        if rates is None
        else {
            "mu": rates.mu,
            "true_positive_rates": {f"{rate:g}": value for rate, value in rates.true_positive_rates.items()},
        },
        "accuracy": run.accuracy,
        "attacks": [
            {
                "attack": attack.name,
                "fits_the_run": run.misfit(attack) is None,
                "psnr_median": attack.psnr,
                "success_rate": attack.result.get("success_rate"),
            }
            for attack in run.attacks
        ],
        "files": [{"path": file.path, "state": file.state} for file in run.files],
        "about": run.about,
    }
    return Export(json.dumps(whole, indent=1, allow_nan=False) + "\n")
