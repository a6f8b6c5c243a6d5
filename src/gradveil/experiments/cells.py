"""Cells: the independent pieces of work that experiments are made of.

A cell is its kind and its settings, and these decide its result. Two experiments that need the same run share it: a
cell's name is a hash of both. Where a cell is run (device, folder of the data) is not part of it, except where time is
what is measured.

    train    one private or plain training run, in a run directory
    attack   one attack on victims of a data set (gradveil.attacks.trial): on an untrained network, or, where ``of_run``
             holds the settings of a training cell, on that run at its end
    time     seconds per step of several strategies, in turn
"""

from __future__ import annotations

import gc
import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradveil.training.run_directory import write_whole

Result = dict[str, Any]
RESULT = "cell.json"
_JUDGED = 100  # test examples, where only time counts


@dataclass(frozen=True)
class Cell:
    kind: str
    settings: Mapping[str, Any] = field(hash=False)

    @property
    def key(self) -> str:
        """A folder's name: what can be read of it, and a hash of everything."""
        whole = json.dumps([self.kind, dict(self.settings)], sort_keys=True)
        shown = [str(self.settings.get(name, "")) for name in ("dataset", "strategy", "attack")]
        words = "-".join(word for word in (self.kind, *shown) if word)
        return f"{words}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Place:
    """Where a cell is run."""

    device: str = "cpu"
    data_dir: str | None = None
    threads: int | None = None  # of torch; None: as it is


def run_cell(cell: Cell, folder: Path, place: Place) -> Result:
    """The result of a cell, kept in its folder: one that is there already is not run again."""
    done = folder / RESULT
    if done.exists():
        return dict(json.loads(done.read_text()))
    import torch

    if place.threads is not None:
        torch.set_num_threads(place.threads)
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    found = KINDS[cell.kind](dict(cell.settings), folder, place)
    result = {
        "kind": cell.kind,
        "settings": dict(cell.settings),
        "machine": _machine(cell.settings.get("device", place.device)),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - begun, 3),
        **found,
    }
    write_whole(done, (json.dumps(result) + "\n").encode())
    return result


def _machine(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


# ---- training


def _train(settings: Result, folder: Path, place: Place) -> Result:
    from gradveil.training import loop as training
    from gradveil.training.config import RunConfig

    where, seed = folder / "run", settings.pop("seed")
    shutil.rmtree(where, ignore_errors=True)  # one that was broken off begins anew: resumed, it would be charged twice
    config = RunConfig.check({**settings, "device": place.device, "data_dir": place.data_dir})
    return _told(training.train(config, run_dir=where, seed=seed))


def _told(ended: Any) -> Result:
    """What tables are made of: the end of a run, and every look on the way with what was spent until then."""
    from gradveil.accounting import default_view, paper_curve, proved_curve
    from gradveil.training.run_directory import RunDirectory

    run = RunDirectory.open(ended.run_dir)
    contents = run.verified_ledger()
    releases = contents.releases
    looks = [m for m in run.read_metrics() if m.get("accuracy") is not None]
    trace: list[Result] = []
    curve = {}
    if releases:
        curve = paper_curve([r.sigma for r in releases], contents.header.sample_rate, contents.header.delta)
        neighbours, _ = default_view(contents.header.sampling)
        proved = proved_curve(contents.header, releases, neighbours=neighbours).epsilon  # by RDP, after every step
    for look in looks:
        step = look["step"]
        point: Result = {"step": step, "accuracy": look["accuracy"], "loss": look["loss"]}
        if releases:
            release = releases[step - 1]
            point |= {"clip": max(release.clip), "sigma": release.sigma, "noise_std": max(release.noise_std)}
            point["as_published"] = {method: float(values[step - 1]) for method, values in curve.items()}
            point["proved_rdp"] = float(proved[step - 1]) if len(proved) else None
        trace.append(point)
    statement = ended.statement.to_dict()
    return {
        "accuracy": ended.accuracy,
        "steps": ended.steps,
        "ended": ended.ended,
        "seconds_per_step": ended.seconds_per_step,
        "proved": statement["proved"],
        "as_published": {m: float(v[-1]) for m, v in curve.items()},
        "trace": trace,
    }


# ---- attacks


def _attack(settings: Result, folder: Path, place: Place) -> Result:
    import numpy as np

    from gradveil.attacks.trial import AttackConfig, run
    from gradveil.training import data

    dataset = settings.pop("dataset")
    shown, of_run = settings.pop("shown", 0), settings.pop("of_run", None)
    if of_run is None:
        outcome = run(AttackConfig(**settings, device=place.device), data.load(dataset, data_dir=place.data_dir))
    else:
        outcome = _attack_on_run(settings, of_run, folder, place)
    if shown:  # images of the data set: in the cell's folder, never in a report by themselves
        pictures = {"original": outcome.secret.x[:shown, 0]}
        pictures |= {f"frame {i}": x[:shown, 0] for i, x in outcome.reconstruction.frames.items()}
        pictures["found"] = outcome.reconstruction.x[:shown, 0]
        arrays = {n: x.clamp(0, 1).nan_to_num(0.5).cpu().numpy().astype(np.float32) for n, x in pictures.items()}
        np.savez_compressed(folder / "pictures.npz", **arrays)  # type: ignore[arg-type]
    return outcome.to_dict() | {"dataset": dataset}


def _attack_on_run(settings: Result, of_run: Result, folder: Path, place: Place) -> Any:
    from gradveil.attacks.from_run import load_target

    trained = Cell("train", of_run)
    where = folder.parent / trained.key
    if not (where / "run" / "config.toml").exists():  # its result may be all that was kept
        _train(dict(trained.settings), where, place)
    target = load_target(where / "run", data_dir=place.data_dir)
    return target.attack(target.settings({**settings, "device": place.device}))


# ---- time


def _time(settings: Result, folder: Path, place: Place) -> Result:
    """Seconds per step of each of ``rows``: short runs of one after the other, ``repeats`` times round.

    Each takes its turn first. Of a run the last ``steps`` count; in ``warm_up`` times as many before, kernels are
    compiled and steps captured.
    """
    from gradveil.training import inputs
    from gradveil.training import loop as training
    from gradveil.training.config import RunConfig
    from gradveil.training.run_directory import RunDirectory

    rows, steps, before = settings.pop("rows"), settings.pop("steps"), settings.pop("warm_up")
    repeats, seed = settings.pop("repeats"), settings.pop("seed")
    whole = (before + 1) * steps
    looks = {"steps": whole, "evaluate_every": steps, "checkpoint_every": whole}
    configs = [RunConfig.check({**settings, **looks, "data_dir": place.data_dir, **row}) for row in rows]
    loaded = inputs.prepare(configs[0])
    few = slice(0, _JUDGED)  # a look at them takes no time
    loaded = replace(loaded, x_test=loaded.x_test[few], y_test=loaded.y_test[few])
    took: list[list[float]] = [[] for _ in rows]
    for turn in range(repeats):
        for i in (*range(turn % len(rows), len(rows)), *range(turn % len(rows))):
            where = folder / "run"
            shutil.rmtree(where, ignore_errors=True)
            gc.collect()
            training.train(configs[i], run_dir=where, seed=seed + turn, inputs=loaded)
            seconds = [float(look["seconds"]) for look in RunDirectory.open(where).read_metrics()]
            took[i].append((seconds[-1] - seconds[-2]) / steps)
            shutil.rmtree(where)
    return {"seconds_per_step": took}


ALONE = ("time",)  # nothing else runs beside them
KINDS: dict[str, Callable[[Result, Path, Place], Result]] = {"train": _train, "attack": _attack, "time": _time}
