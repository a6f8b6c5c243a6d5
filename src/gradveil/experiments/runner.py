"""Runs the cells of an experiment: what is done already is kept, the rest is spread over processes and devices.

``backend`` is one of joblib's: "loky" (processes on this machine) or, on a cluster, "dask" or "ray", where their
packages are installed and the folder of the results is shared by all machines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradveil.errors import ConfigError
from gradveil.experiments.cells import ALONE, RESULT, Cell, Place, Result, run_cell

BACKENDS = ("loky", "dask", "ray")
Told = Callable[[int, int, Result], None]
"""Told how many cells are done, of how many, and the latest."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """``devices`` take turns; ``jobs`` cells run at a time (default: one for each device, or core of a CPU)."""

    devices: Sequence[str] = ("cpu",)
    jobs: int | None = None
    backend: str = "loky"
    scheduler: str | None = None  # the address of a Dask scheduler or a Ray head; None: one is started here
    data_dir: str | None = None

    def count(self, cells: int) -> int:
        cores = os.cpu_count() or 1
        jobs = self.jobs or (cores if set(self.devices) == {"cpu"} else len(self.devices))
        return max(1, min(jobs, cells))


class Store:
    """A folder of cells. Experiments in one folder share the cells that they have in common."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, cell: Cell) -> Path:
        return self.path / "cells" / cell.key

    def get(self, cell: Cell) -> Result | None:
        path = self.folder(cell) / RESULT
        return dict(json.loads(path.read_text())) if path.exists() else None

    def run(self, cells: Iterable[Cell], workers: Workers, told: Told | None = None) -> dict[str, Result]:
        """Results by key. Broken off, it goes on where it was: finished cells are not run again."""
        wanted = {cell.key: cell for cell in cells}
        found = {key: result for key, cell in wanted.items() if (result := self.get(cell)) is not None}
        missing = [cell for key, cell in wanted.items() if key not in found]

        def take(cell: Cell, result: Result) -> None:
            found[cell.key] = result
            if told is not None:
                told(len(found), len(wanted), result)

        spread = [cell for cell in missing if cell.kind not in ALONE]
        for wave in ([c for c in spread if "of_run" not in c.settings], [c for c in spread if "of_run" in c.settings]):
            count = workers.count(len(wave))  # what looks at a run comes after the runs
            if not wave or (count == 1 and workers.backend == "loky"):
                continue
            places = [Place(device, workers.data_dir, _share(count)) for device in workers.devices]
            tasks = [(cell, self.folder(cell), places[i % len(places)]) for i, cell in enumerate(wave)]
            for i, result in _spread(tasks, count, workers):
                take(wave[i], result)
        for i, cell in enumerate(cell for cell in missing if cell.key not in found):
            device = workers.devices[i % len(workers.devices)]
            take(cell, run_cell(cell, self.folder(cell), Place(device, workers.data_dir)))
        return {key: found[key] for key in wanted}


def _share(jobs: int) -> int:
    """Threads for each of some jobs at a time."""
    return max(1, (os.cpu_count() or 1) // jobs)


def _spread(tasks: list[tuple[Cell, Path, Place]], count: int, workers: Workers) -> Iterable[tuple[int, Result]]:
    import joblib

    one_by_one = "generator_unordered" if workers.backend == "loky" else "list"
    with _cluster(workers), joblib.parallel_config(backend=workers.backend):
        pool = joblib.Parallel(n_jobs=count, return_as=one_by_one)
        yield from pool(joblib.delayed(_numbered)(i, *task) for i, task in enumerate(tasks))


def _numbered(i: int, cell: Cell, folder: Path, place: Place) -> tuple[int, Result]:
    return i, run_cell(cell, folder, place)


@contextmanager
def _cluster(workers: Workers) -> Iterator[None]:
    """Connected to the cluster, or to one that is started here for as long as it is needed; joblib finds it."""
    if workers.backend == "loky":
        yield
        return
    try:
        if workers.backend == "dask":
            from dask.distributed import Client
        else:
            import ray
            from ray.util.joblib import register_ray
    except ImportError:
        raise ConfigError(
            f"the backend {workers.backend!r} needs its package, which is not installed here. "
            'Install it: pip install "gradveil[cluster]".'
        ) from None
    if workers.backend == "dask":
        with Client(workers.scheduler) if workers.scheduler else Client(processes=True):
            yield
        return
    ray.init(address=workers.scheduler)
    register_ray()
    try:
        yield
    finally:
        ray.shutdown()
