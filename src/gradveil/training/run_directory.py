"""The run directory: which file is where, and how it gets there whole.

    runs/<name>/
      config.toml          the settings, without the seed
      environment.json     versions, machine, command (without the seed)
      ledger.jsonl         every release (accounting/ledger.py)
      metrics.jsonl        loss, accuracy, epsilon over the steps
      secret.json          mode 0600: the seed of a seeded run
      audit.json           what gradveil audit found, if it was run
      checkpoints/step-00000100.safetensors, .json
      .lock                while a process writes to the run (accounting/_run_lock.py)

A checkpoint is its JSON file: written last, by rename, with the hash of the tensors beside it and the
ledger's length and head at that moment. No pickle is ever written or read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.accounting import _run_lock
from gradveil.accounting import files as _files
from gradveil.accounting import ledger as ledgers
from gradveil.accounting.files import write_whole as write_whole
from gradveil.errors import DataError, LedgerError, RunDirectoryError

KEEP_CHECKPOINTS = 2
_FACTS_LIMIT = 1 << 24  # bytes of a checkpoint's JSON
_SECRET_LIMIT = 1 << 12
_MOST_LOOKS = 100_000  # records of metrics.jsonl that are kept; of more, every second, fourth ... one
_NO_SEED = "Put back the file as the run wrote it, or go on without the seed: gradveil train --resume RUN --new-noise"


def _is_left_over(path: Path) -> bool:
    """Whether it is a temporary file of a process that is not there any more."""
    process = path.name.removesuffix(".part").rpartition(".")[2]
    if not path.name.startswith(".") or not process.isascii() or not process.isdecimal() or len(process) > 9:
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return int(process) == os.getpid()


def _facts_hash(facts: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in facts.items() if k != "facts_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class CheckpointFile:
    """One checkpoint on disk: its JSON part, and the path of its tensors."""

    path: Path
    facts: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    @property
    def tensors(self) -> Path:
        return self.path.with_suffix(".safetensors")


class RunDirectory:
    """One run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.ledger = path / ledgers.FILE_NAME
        self.metrics = path / "metrics.jsonl"
        self.secret = path / "secret.json"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """A new one. Whoever writes to it takes :meth:`lock` first, and then :meth:`check_empty` again."""
        run = cls(path)
        run.check_empty()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be made: {error.strerror}. Give another --run-dir.") from None
        return run

    def check_empty(self) -> None:
        """Refuse a directory that holds anything but a lock, or what a run left that was killed before its first file.

        config.toml is written last of what a run begins with: without it there is nothing to go on with.
        """
        path, before = self.path, (_run_lock.FILE_NAME, self.secret.name, self.environment.name)
        if path.exists() and (
            not path.is_dir() or any(p.name not in before and not _is_left_over(p) for p in path.iterdir())
        ):
            raise RunDirectoryError(
                f"{path} exists and is not empty. A run directory belongs to one run and is never written over. Give "
                "another one with --run-dir, or continue that run: gradveil train --resume " + str(path)
            )

    def lock(self) -> _run_lock.Hold:
        """The right to write to the run; refused at once where another process has it.

        What a killed writer left is swept: temporary files, and tensors without the JSON that makes them a checkpoint.
        """
        hold = _run_lock.Hold(self.path)
        left = [p for folder in (self.path, self.checkpoints) for p in folder.glob(".*.part") if _is_left_over(p)]
        left += [p for p in self.checkpoints.glob("step-*.safetensors") if not p.with_suffix(".json").exists()]
        for path in left:
            with contextlib.suppress(OSError):
                path.unlink()
        return hold

    @property
    def _go_on(self) -> str:
        """What to do after an error of the operating system; the ledger is written before everything else."""
        return (
            "The ledger is safe: every release so far is in it. To go on, {mend}, and then: gradveil train --resume "
            + str(self.path).replace("{", "{{").replace("}", "}}")
        )

    def writer(self) -> str | None:
        """Who is writing to the run, in words: it is still running. None if nobody is."""
        return _run_lock.writer(self.path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        run = cls(path)
        if not path.is_dir() or not run.config.exists():
            raise RunDirectoryError(
                f"{path} is not a run directory (it has no config.toml). Give the directory that gradveil train wrote."
            )
        return run

    def write_seed(self, seed: int) -> None:
        write_whole(self.secret, json.dumps({"seed": seed}).encode(), mode=0o600, what="the seed")

    def read_seed(self) -> int | None:
        if not self.secret.exists():
            return None
        try:
            seed = _files.read_object(self.secret, limit=_SECRET_LIMIT).get("seed")
        except DataError as error:
            raise RunDirectoryError(f"{error} {_NO_SEED}") from None
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise RunDirectoryError(f"{self.secret} holds no seed. {_NO_SEED}")
        return seed

    # ---- checkpoints

    def save_checkpoint(
        self,
        step: int,
        tensors: bytes,
        facts: Mapping[str, Any],
        bind: Callable[[str, bytes], None] = lambda path, data: None,
    ) -> None:
        """``bind`` is told of each file, by its path in the run directory, before it is written."""
        stem, what, then = f"step-{step:08d}", f"the checkpoint of step {step}", self._go_on
        try:
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise _files.explained(error, self.checkpoints, "making the folder of checkpoints", then) from None
        complete = {**facts, "step": step, "tensors_sha256": hashlib.sha256(tensors).hexdigest()}
        complete["tensors_bytes"] = len(tensors)
        complete["facts_sha256"] = _facts_hash(complete)
        files = {f"{stem}.safetensors": tensors, f"{stem}.json": json.dumps(complete, indent=1).encode()}
        for name, data in files.items():
            bind(f"{self.checkpoints.name}/{name}", data)
        for name, data in files.items():
            write_whole(self.checkpoints / name, data, what=what, then=then)
        for old in self.list_checkpoints()[:-KEEP_CHECKPOINTS]:
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def list_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*.json"))

    def newest_checkpoint(self) -> CheckpointFile | None:
        paths = self.list_checkpoints()
        if not paths:
            return None
        path = paths[-1]
        try:
            facts = _files.read_object(path, limit=_FACTS_LIMIT)
            whole = facts.get("facts_sha256") == _facts_hash(facts) and _is_checkpoint(facts)
        except (DataError, ValueError, RecursionError):
            if not path.exists():  # a newer one has replaced it
                raise FileNotFoundError(path) from None
            whole = False
        if not whole:
            raise RunDirectoryError(f"checkpoint {path} is damaged: it is not the JSON that was written.")
        return CheckpointFile(path, facts)

    def read_tensors(self, checkpoint: CheckpointFile) -> bytes:
        size = checkpoint.facts.get("tensors_bytes")  # older checkpoints do not say
        try:
            found = checkpoint.tensors.stat().st_size
            fits = size is None or size == found
            data = _files.read_bytes(checkpoint.tensors, limit=found) if fits else b""
        except FileNotFoundError:
            raise RunDirectoryError(f"checkpoint {checkpoint.tensors} is missing.") from None
        except DataError as error:
            raise RunDirectoryError(f"checkpoint {error}") from None
        if not fits or hashlib.sha256(data).hexdigest() != checkpoint.facts["tensors_sha256"]:
            raise RunDirectoryError(f"checkpoint {checkpoint.tensors} is damaged: its hash does not fit its record.")
        return data

    # ---- trust

    def verified_ledger(self) -> ledgers.Contents:
        """The ledger, checked line by line and against the newest checkpoint; also of a run that is still running."""
        return _run_lock.steady(self._verified_ledger, self.ledger, lambda contents: contents.torn)

    def _verified_ledger(self) -> ledgers.Contents:
        checkpoint = self.newest_checkpoint()  # before the ledger, which a running process makes longer meanwhile
        contents = ledgers.read(self.ledger)
        if checkpoint is not None:
            length, head = checkpoint.facts["ledger_length"], checkpoint.facts["ledger_head"]
            if contents.length < length:
                raise LedgerError(
                    f"ledger line {contents.length + 1} is missing: checkpoint {checkpoint.path.name} was written when "
                    f"the ledger had {length} whole lines, and it has {contents.length} now. Releases were removed.",
                    line=contents.length + 1,
                )
            if contents.hashes[length - 1] != head:
                raise LedgerError(
                    f"ledger line {length} is not the line that checkpoint {checkpoint.path.name} saw: the ledger "
                    "has been rewritten.",
                    line=length,
                )
        return contents

    # ---- metrics

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        try:
            with open(self.metrics, "a+b") as file:
                file.seek(0, os.SEEK_END)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")  # a crash cut the last line off: it must not swallow this one
                file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            raise _files.explained(error, self.metrics, "writing the metrics", self._go_on) from None

    def read_metrics(self, problems: list[str] | None = None, *, running: bool = False) -> list[dict[str, Any]]:
        """All records. What cannot be read is left out, and said in ``problems``.

        No problem is a line that a crash cut off and after which the run went on, nor in a running one the last line.
        """
        if not self.metrics.exists():
            return []
        found: list[dict[str, Any]] = []
        damaged, cut, every, last = "", "", 1, None
        try:
            for number, raw in enumerate(_files.read_lines(self.metrics), start=1):
                record = _metrics_record(raw)
                if record is not None:
                    cut, last = "", record
                    if number % every == 0:
                        found.append(record)
                    if len(found) > _MOST_LOOKS:
                        del found[::2]
                        every *= 2
                elif _is_cut(raw):
                    cut = f"line {number} was cut off"
                elif raw.strip():
                    damaged = damaged or f"line {number} is not a record of a run"
        except DataError as error:
            damaged = str(error).rstrip(".")
        if last is not None and found[-1:] != [last]:
            found.append(last)
        damaged = damaged or ("" if running else cut)
        if damaged and problems is not None:
            problems.append(f"{self.metrics.name}: {damaged}.")
        return found


_METRICS = ("loss", "accuracy", "accuracy_unaveraged", "epsilon", "seconds", "clip", "sigma", "noise_std")


def _metrics_record(raw: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl; None if it is not one."""
    try:
        record = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not _is_count(record.get("step")):
        return None
    numbers = (record[name] for name in _METRICS if record.get(name) is not None)
    return record if all(isinstance(n, int | float) and _files.number_or_none(n) is not None for n in numbers) else None


def _is_cut(raw: bytes) -> bool:
    begins = b'{"step":'
    return raw.startswith(begins[: len(raw.rstrip())]) and not raw.rstrip().endswith(b"}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _is_checkpoint(facts: Mapping[str, Any]) -> bool:
    """Whether the facts that are relied on are there, and of their kinds."""
    texts = all(isinstance(facts.get(name), str) for name in ("tensors_sha256", "ledger_head"))
    return (
        texts and _is_count(facts.get("step")) and _is_count(facts.get("ledger_length")) and facts["ledger_length"] > 0
    )
