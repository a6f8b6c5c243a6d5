"""The run directory: what lies where, and how it gets there whole.

    runs/<name>/
      config.toml          the settings, without the seed
      environment.json     versions, machine, command (without the seed)
      ledger.jsonl         every release (ledger.py)
      metrics.jsonl        loss, accuracy, epsilon over the steps
      secret.json          mode 0600: the seed of a seeded run
      audit.json           what gradveil audit found, if it was run
      checkpoints/step-00000100.safetensors, .json

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

from gradveil.accounting import ledger as ledgers
from gradveil.errors import LedgerError, RunDirectoryError

KEEP_CHECKPOINTS = 2


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file so that it is there whole, and on disk, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.fchmod(descriptor, mode & ~_umask() if mode != 0o600 else mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _facts_hash(facts: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in facts.items() if k != "facts_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunDirectoryError(
                f"{path} exists and is not empty. A run directory belongs to one run and is never written over. Give "
                "another one with --run-dir, or go on with that run: gradveil train --resume " + str(path)
            )
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be made: {error.strerror}. Give another --run-dir.") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        run = cls(path)
        if not path.is_dir() or not run.config.exists():
            raise RunDirectoryError(
                f"{path} is not a run directory (it has no config.toml). Give the directory that gradveil train wrote."
            )
        return run

    def write_seed(self, seed: int) -> None:
        write_whole(self.secret, json.dumps({"seed": seed}).encode(), mode=0o600)

    def read_seed(self) -> int | None:
        if not self.secret.exists():
            return None
        return int(json.loads(self.secret.read_text())["seed"])

    # ---- checkpoints

    def save_checkpoint(
        self,
        step: int,
        tensors: bytes,
        facts: Mapping[str, Any],
        bind: Callable[[str, bytes], None] = lambda path, data: None,
    ) -> None:
        """``bind`` is told of each file, by its path in the run directory, before it is written."""
        stem = f"step-{step:08d}"
        complete = {**facts, "step": step, "tensors_sha256": hashlib.sha256(tensors).hexdigest()}
        complete["facts_sha256"] = _facts_hash(complete)
        files = {f"{stem}.safetensors": tensors, f"{stem}.json": json.dumps(complete, indent=1).encode()}
        for name, data in files.items():
            bind(f"{self.checkpoints.name}/{name}", data)
        for name, data in files.items():
            write_whole(self.checkpoints / name, data)
        for old in self.list_checkpoints()[:-KEEP_CHECKPOINTS]:
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def list_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*.json"))

    def newest_checkpoint(self) -> CheckpointFile | None:
        paths = self.list_checkpoints()
        if not paths:
            return None
        try:
            facts = json.loads(paths[-1].read_bytes())
            whole = facts["facts_sha256"] == _facts_hash(facts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            whole = False
        if not whole:
            raise RunDirectoryError(f"checkpoint {paths[-1]} is damaged: it is not the JSON that was written.")
        return CheckpointFile(paths[-1], facts)

    def read_tensors(self, checkpoint: CheckpointFile) -> bytes:
        try:
            data = checkpoint.tensors.read_bytes()
        except FileNotFoundError:
            raise RunDirectoryError(f"checkpoint {checkpoint.tensors} is missing.") from None
        if hashlib.sha256(data).hexdigest() != checkpoint.facts["tensors_sha256"]:
            raise RunDirectoryError(f"checkpoint {checkpoint.tensors} is damaged: its hash does not fit its record.")
        return data

    # ---- trust

    def verified_ledger(self) -> ledgers.Contents:
        """The ledger, checked line by line and against the newest checkpoint."""
        contents = ledgers.read(self.ledger)
        checkpoint = self.newest_checkpoint()
        if checkpoint is not None:
            length, head = int(checkpoint.facts["ledger_length"]), checkpoint.facts["ledger_head"]
            if contents.length < length:
                raise LedgerError(
                    f"ledger line {contents.length + 1} is missing: checkpoint {checkpoint.path.name} was written when "
                    f"the ledger had {length} whole lines, and it has {contents.length} now. Releases were removed.",
                    line=contents.length + 1,
                )
            if contents.hashes[length - 1] != head:
                raise LedgerError(
                    f"ledger line {length} is not the line that checkpoint {checkpoint.path.name} saw: the ledger was "
                    "written anew.",
                    line=length,
                )
        return contents

    # ---- metrics

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        with open(self.metrics, "a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")  # a crash cut the last line off: it must not swallow this one
            file.write(json.dumps(record).encode() + b"\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines; a line that a crash cut off is left out."""
        if not self.metrics.exists():
            return []
        found = []
        for line in self.metrics.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found
