"""Training runs that are killed again and again, and runs that two processes want to write at once.

    python benchmarks/kills.py --kills 1000 --pairs 100 --out benchmarks/results/kills.json

Each seeded run (digits, three strategies in turn; every fourth over two processes) is killed until it is whole: by
KILL, TERM or INT, or stopped by STOP for a while and then killed; at a random moment, or at a random call that brings
something to disk (fsync, replace, write). Of a run over two processes one is chosen at random. What must hold after
each kill: the ledger verifies and only grew, and each step of the newest checkpoint has its release. At the end: the
run resumed without further kills has the weights of one that was left alone, bit for bit.

A pair is two processes that resume one interrupted run at once: one trains to the end, bit-equal; the other is refused
with a message that names the owner, or comes when the run is complete. Anything else is listed under "wrong".

A file of results is written after each run, so a campaign that is cut short says how far it came.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from machine import description, write

from gradveil.accounting import ledger as ledgers
from gradveil.errors import GradveilError
from gradveil.training.run_directory import RunDirectory

SEED = 20260917
REFUSED = 77  # exit status of a process that ended with one of gradveil's errors
RUNS: dict[str, dict[str, Any]] = {
    "dyn-sigma": {"strategy": "dyn-sigma", "sigma": 6.0},
    "quantile-clip": {"strategy": "quantile-clip", "sigma": 3.0, "momentum": 0.9},
    "adaclip": {"strategy": "adaclip", "sigma": 3.0, "optimizer": "adam", "lr": 0.01},
}
SHARED: dict[str, Any] = {"dataset": "digits", "batch_size": 32, "lr": 0.2, "steps": 30, "checkpoint_every": 4}
SIGNALS = ("KILL", "TERM", "INT", "STOP")
Tensors = dict[str, torch.Tensor]


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["kills", "gradveil.training.loop", "sklearn.datasets", "torch._dynamo", "torch._refs"]
    )
    return context


def _strike_at(count: int, name: str) -> None:
    """This process gets a signal at its ``count``-th moment before or after a call that brings something to disk."""
    left = count

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))

    def wrap(function: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            tick()
            result = function(*arguments, **more)
            tick()
            return result

        return call

    for name_of_call in ("fsync", "replace", "write"):
        setattr(os, name_of_call, wrap(getattr(os, name_of_call)))


def process(
    settings: Mapping[str, Any], where: Path, fresh: bool, strike: tuple[int, str] | None, rank: tuple[int, int, int]
) -> None:
    """The life of one training process; ``rank``: which one, of how many, and their port."""
    from gradveil.engine import PrivacyEngine
    from gradveil.training import loop
    from gradveil.training.config import RunConfig

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    torch.set_num_threads(1)
    number, count, port = rank
    if count > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(number))
        os.environ.update(RANK=str(number), WORLD_SIZE=str(count))
    PrivacyEngine.statement = lambda self: None  # type: ignore[method-assign,assignment,return-value]
    if strike is not None:
        _strike_at(*strike)
    try:
        if fresh:
            loop.train(RunConfig.check(settings), run_dir=where, seed=SEED, command=["kills"])
        else:
            loop.resume(where)
    except GradveilError as error:
        where.with_suffix(f".error-{number}-{os.getpid()}").write_text(f"{type(error).__name__}: {error}")
        os._exit(REFUSED)
    except KeyboardInterrupt:
        os._exit(130)
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launched(
    settings: Mapping[str, Any], where: Path, *, fresh: bool, strikes: Mapping[int, tuple[int, str]], ranks: int
) -> list[Any]:
    """One process for each rank; ``strikes``: which are struck by themselves, and when."""
    port = _free_port() if ranks > 1 else 0
    started = []
    for number in range(ranks):
        arguments = (settings, where, fresh, strikes.get(number), (number, ranks, port))
        started.append(_context().Process(target=process, args=arguments))
        started[-1].start()
    return started


def _send(victim: Any, name: str, random: np.random.Generator) -> None:
    if not victim.is_alive():
        return
    os.kill(victim.pid, getattr(signal, f"SIG{name}"))
    if name == "STOP":
        victim.join(float(random.uniform(0.05, 0.3)))
        os.kill(victim.pid, signal.SIGKILL)


def ended(processes: list[Any], patience: float) -> list[int]:
    """The exit status of each; what does not end in time is killed."""
    deadline = time.monotonic() + patience
    for one in processes:
        one.join(max(0.1, deadline - time.monotonic()))
        if one.is_alive():
            os.kill(one.pid, signal.SIGKILL)
            one.join()
    return [one.exitcode for one in processes]


class Campaign:
    """Kills and pairs, and what came of them."""

    def __init__(self, folder: Path, random: np.random.Generator) -> None:
        self.folder, self.random = folder, random
        self.kills: Counter[str] = Counter()
        self.pairs: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._expected: dict[tuple[str, int], Tensors] = {}
        self.span = 5.0

    def expected(self, name: str, ranks: int) -> Tensors:
        """The weights of the run that was left alone."""
        if (name, ranks) not in self._expected:
            where, began = self.folder / f"whole-{name}-{ranks}", time.monotonic()
            statuses = ended(launched(SHARED | RUNS[name], where, fresh=True, strikes={}, ranks=ranks), 600)
            if statuses != [0] * ranks:
                raise SystemExit(f"{name} over {ranks} process(es), left alone, ended with {statuses}")
            self.span = time.monotonic() - began
            self._expected[name, ranks] = weights(where)
        return self._expected[name, ranks]

    def run_under_fire(self, name: str, ranks: int, most: int) -> None:
        """One run, killed up to ``most`` times, and then left alone to its end."""
        settings, expected = SHARED | RUNS[name], self.expected(name, ranks)
        where = self.folder / "run"
        fresh, before, struck = True, b"", 0
        for _ in range(200):
            if not fresh and read_end(where):
                break
            fire = struck < most
            kind, victim = str(self.random.choice(SIGNALS)), int(self.random.integers(ranks))
            by_call = fire and self.random.random() < 0.6
            strikes = {victim: (int(self.random.integers(1, 80)), kind)} if by_call else {}
            processes = launched(settings, where, fresh=fresh, strikes=strikes, ranks=ranks)
            if fire and not by_call:
                processes[victim].join(float(self.random.uniform(0.02, 0.6 * self.span)))
                _send(processes[victim], kind, self.random)
            elif by_call and kind == "STOP":
                self._finish_stopped(processes[victim])
            if fire and ranks > 1:  # the others notice in their own time; they are not waited for
                processes[victim].join(20)
            statuses = ended(processes, 6 if fire and ranks > 1 else 600)
            if fire and statuses[victim] != 0:
                self.kills[f"{kind} {'at a call' if by_call else 'at random'}, {ranks} process(es)"] += 1
                struck += 1
            fresh, before = self._look(where, name, statuses, before)
            if statuses == [0] * ranks:
                break
        else:
            self.wrong.append(f"{name}, {ranks} process(es): not whole after 200 attempts")
        self._compare(where, name, ranks, expected)
        shutil.rmtree(where, ignore_errors=True)

    def _finish_stopped(self, victim: Any) -> None:
        """A process that stops itself at a call is killed a moment later; one that gets to its end is left alone."""
        deadline = time.monotonic() + 600
        while victim.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    os.kill(victim.pid, signal.SIGKILL)
            victim.join(0.05)

    def _look(self, where: Path, name: str, statuses: list[int], before: bytes) -> tuple[bool, bytes]:
        """What must hold after every kill: whether the run is to begin again, and the ledger's whole lines."""
        run = RunDirectory(where)
        if not run.config.exists():
            shutil.rmtree(where, ignore_errors=True)
            return True, b""
        now = whole_lines(run.ledger)
        if not now.startswith(before):
            self.wrong.append(f"{name} {statuses}: the ledger lost lines")
        if now:
            try:
                contents, checkpoint = run.verified_ledger(), run.newest_checkpoint()
                if checkpoint is not None:
                    covered = {r.step for r in contents.releases[: checkpoint.facts["ledger_length"]]}
                    if not covered >= set(range(checkpoint.step)):
                        self.wrong.append(f"{name} {statuses}: a checkpoint without its releases")
            except GradveilError as error:
                self.wrong.append(f"{name} {statuses}: {error}")
        return False, now

    def _compare(self, where: Path, name: str, ranks: int, expected: Tensors) -> None:
        found = weights(where)
        equal = found.keys() == expected.keys() and all(torch.equal(v, expected[k]) for k, v in found.items())
        self.runs[f"{'bit-equal' if equal else 'different'}, {ranks} process(es)"] += 1
        if not equal:
            self.wrong.append(f"{name}, {ranks} process(es): the weights are not those of the run that was left alone")

    def pair(self, name: str) -> None:
        """Two processes resume one interrupted run at once."""
        settings, expected = SHARED | RUNS[name], self.expected(name, 1)
        where = self.folder / "pair"
        strike = {0: (int(self.random.integers(20, 60)), "KILL")}
        ended(launched(settings, where, fresh=True, strikes=strike, ranks=1), 600)
        if not RunDirectory(where).config.exists() or read_end(where):
            shutil.rmtree(where, ignore_errors=True)
            return
        first = launched(settings, where, fresh=False, strikes={}, ranks=1)
        time.sleep(float(self.random.uniform(0, 0.3)))
        second = launched(settings, where, fresh=False, strikes={}, ranks=1)
        statuses = sorted(ended([*first, *second], 600))
        told = [p.read_text() for p in where.parent.glob(f"{where.name}.error-*")]
        if statuses == [0, REFUSED] and len(told) == 1 and "is being written by process" in told[0]:
            self.pairs["one refused, with the owner's number"] += 1
        elif statuses == [0, 0] and not told:
            self.pairs["the second came after the first had ended"] += 1
        else:
            self.pairs["wrong"] += 1
            self.wrong.append(f"pair {name}: ended with {statuses}: {told}")
        self._compare(where, f"pair {name}", 1, expected)
        for path in where.parent.glob(f"{where.name}.error-*"):
            path.unlink()
        shutil.rmtree(where)

    def results(self) -> dict[str, Any]:
        return {
            "kills": {"total": self.kills.total(), **dict(sorted(self.kills.items()))},
            "pairs": {"total": self.pairs.total(), **dict(sorted(self.pairs.items()))},
            "runs": dict(sorted(self.runs.items())),
            "wrong": self.wrong,
        }


def whole_lines(ledger: Path) -> bytes:
    data = ledger.read_bytes() if ledger.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def read_end(where: Path) -> bool:
    path = where / ledgers.FILE_NAME
    return bool(whole_lines(path)) and ledgers.read(path).ended is not None


def weights(where: Path) -> Tensors:
    run = RunDirectory(where)
    checkpoint = run.newest_checkpoint()
    return {} if checkpoint is None else safetensors.torch.load(run.read_tensors(checkpoint))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time, with what there is")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    about = {"steps": SHARED["steps"], "seed": args.seed} | description("cpu", 1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), np.random.default_rng(args.seed))
        number = 0
        while time.monotonic() - began < args.seconds:
            names = list(RUNS)
            if campaign.kills.total() < args.kills:
                ranks = 2 if number % 4 == 3 else 1
                most = min(12, args.kills - campaign.kills.total())
                campaign.run_under_fire(names[number % 3], ranks, most)
            if campaign.pairs.total() < args.pairs:
                campaign.pair(names[number % 3])
            number += 1
            results = campaign.results() | {"seconds": round(time.monotonic() - began), "asked": vars(args)["kills"]}
            write(args.out, about | results)
            print(f"{campaign.kills.total()} kills, {campaign.pairs.total()} pairs, {campaign.wrong}", flush=True)
            if campaign.kills.total() >= args.kills and campaign.pairs.total() >= args.pairs:
                break
    raise SystemExit(1 if campaign.wrong else 0)


if __name__ == "__main__":
    main()
