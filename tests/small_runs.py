"""Small runs to look at: trained on digits in a few steps, attacked, interrupted, or damaged."""

from __future__ import annotations

import json

from gradveil.training import loop as training
from gradveil.training.config import RunConfig

TINY = {"dataset": "digits", "steps": 6, "batch_size": 64, "lr": 0.1, "clip": 1.0, "sigma": 3.0}


def trained(path, *, seed=None, **settings):
    training.train(RunConfig.check({**TINY, **settings}), run_dir=path, seed=seed)
    return path


def with_attack(run, *, psnr=12.0, attack="map", images=True):
    """As if an attack had been run, with these figures."""
    result = {"psnr_median": psnr, "guess_psnr_median": 11.0, "success_rate": 0.0, "labels_right": 1.0}
    if not images:
        result = {"wrong_median": 3.0, "success_rate": 0.0, "labels_right": 1.0}
    settings = {"attack": attack, "strategy": "baseline", "victims": 5, "batch": 1, "view": "per-example-noised"}
    trial = {"settings": settings, "result": result, "success_bound": 0.9, "iterations": 10, "seconds": 1.0}
    folder = run / "attacks" / f"{attack}-made-up"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"dataset": "digits", "model": "cpl-net", "trials": [trial]}))
    return run


def interrupted(run, *, after):
    """The ledger ends with this many releases."""
    ledger, lines, releases = run / "ledger.jsonl", [], 0
    for line in ledger.read_text().splitlines(keepends=True):
        lines.append(line)
        releases += line.startswith("[") or json.loads(line)["kind"] == "release"
        if releases == after:
            break
    assert releases == after
    ledger.write_text("".join(lines))
    return run


def damaged(run):
    """One byte of a release changed."""
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "release")
    assert '"sigma":3.0' in lines[place]
    lines[place] = lines[place].replace('"sigma":3.0', '"sigma":9.0', 1)
    ledger.write_text("".join(lines))
    return run
