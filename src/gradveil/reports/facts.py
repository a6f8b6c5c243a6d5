"""A run directory, read for showing: what is there, and in words what is not or cannot be trusted. No torch.

Nothing here raises because a run is unfinished or damaged: an invalid ledger, an interrupted training, an attack that
was never run are facts to be shown. Only a path that is no run at all is an error.

What may be private stays out: the seed, captured gradients and checkpoints are never opened, and of an attack only its
figures are. Its pictures are read by who asks for them (:meth:`AttackFacts.pictures`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradveil.accounting import Statement, statement_of
from gradveil.accounting import files as _files
from gradveil.accounting._checks import trusted
from gradveil.accounting.files import number_or_none
from gradveil.accounting.ledger import Contents
from gradveil.accounting.manifest import BAD, FileState, bound_files, file_states, settings_of
from gradveil.errors import DataError, GradveilError, LedgerError, RunDirectoryError
from gradveil.training.config import RunConfig, read_toml
from gradveil.training.recorded import contradictions
from gradveil.training.run_directory import RunDirectory

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
ATTACKS, AUDIT = "attacks", "audit.json"
RESULT = "result.json"
PICTURES, FRAMES, SECRET = "pictures.npz", "frames.png", "secret.json"  # for the owner only


@dataclass(frozen=True, kw_only=True)
class AttackFacts:
    """One trial of an attack on a run: its settings, its figures, and where its pictures lie."""

    folder: Path
    number: int  # of the trial in its folder
    dataset: str
    trial: Mapping[str, Any]  # as gradveil.attacks.trial.Outcome.to_dict gives it

    @property
    def name(self) -> str:
        return str(self.trial["settings"]["attack"])

    @property
    def strategy(self) -> str:
        return str(self.trial["settings"]["strategy"])

    @property
    def result(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.trial["result"]
        return found

    @property
    def psnr(self) -> float | None:
        """Median PSNR in dB; None for tables, which have none."""
        value = self.result.get("psnr_median")
        return None if value is None else float(value)

    def pictures(self) -> dict[str, np.ndarray[Any, Any]]:
        """Images of victims, training examples among them: "original", "frame <iteration>", "found"; (n, C, H, W)."""
        path, own = self.folder / PICTURES, f"{self.number}/"
        if not path.exists():
            return {}
        found = {name.removeprefix(own): array for name, array in _files.read_arrays(path, beginning=own).items()}
        if len({array.shape for array in found.values()}) > 1 or any(
            array.ndim != 4 or array.dtype.kind != "f" or not array.size for array in found.values()
        ):
            raise _files.unreadable(path, "its arrays are not images of the same victims")
        return found


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """``contents`` is None where there is no ledger, or one that does not hold: then ``ledger_problem`` says why."""

    path: Path
    config: RunConfig | None
    environment: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    contents: Contents | None
    ledger_problem: str | None
    attacks: Sequence[AttackFacts]
    audit: Mapping[str, Any] | None
    own: Mapping[str, Any] | None = None  # config.toml of an engine's own run
    problems: Sequence[str] = field(default=())  # of other files, in words
    statement: Statement | None = None  # from the ledger, the audit beside it; None where that cannot be trusted
    writer: str | None = None  # the process that is writing to the run, in words: it is still running

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def strategy(self) -> str:
        if self.contents is not None:
            return self.contents.header.strategy
        return self.config.strategy if self.config is not None else "unknown"

    @property
    def about(self) -> dict[str, str]:
        """What was said about the run (purpose, data, unit, tuning, sign_off), in its ledger or else in config.toml."""
        told = None if self.contents is None else (settings_of(self.contents) or {}).get("about")
        if told is None:
            told = (self.own or {}).get("about") if self.config is None else self.config.about
        return {str(k): str(v) for k, v in told.items()} if isinstance(told, Mapping) else {}

    @property
    def is_private(self) -> bool:
        return self.contents is not None and self.contents.header.guarantee != "none"

    @property
    def state(self) -> str:
        """ "finished", "running", "interrupted" or "ledger invalid"; a run that ended early says how."""
        if self.ledger_problem is not None:
            return "ledger invalid"
        if self.contents is None or self.contents.ended is None:
            return "running" if self.writer is not None else "interrupted"
        return self.contents.ended

    @property
    def steps_taken(self) -> int | None:
        if self.contents is None:
            return None
        looked: int = self.metrics[-1]["step"] if self.metrics else 0
        return max(len(self.contents.releases), looked)

    @property
    def accuracy(self) -> float | None:
        """Test accuracy at the last look."""
        looks = [m["accuracy"] for m in self.metrics if m.get("accuracy") is not None]
        return float(looks[-1]) if looks else None

    @cached_property
    def files(self) -> Sequence[FileState]:
        """Every file of the run directory, and whether the ledger binds it; empty without a ledger that holds."""
        return () if self.contents is None else file_states(self.path, self.contents)

    def bound(self, path: Path) -> bool:
        """Whether a file of the run directory is one that the ledger names."""
        name = path.relative_to(self.path).as_posix()
        return any(file.path == name and file.state == "bound" for file in self.files)

    @cached_property
    def contradictions(self) -> Sequence[str]:
        """What the files of the run say against its ledger, in sentences: it was cut, rewritten or mixed up."""
        if self.contents is None:
            return ()
        changed = [f"{file}." for file in self.files if file.state in BAD]
        steps = [int(path.stem[5:]) for path in RunDirectory(self.path).list_checkpoints() if path.stem[5:].isdecimal()]
        return changed + contradictions(
            self.contents, config=self.config, metrics=self.metrics, checkpoint=max(steps, default=0)
        )

    @property
    def proved(self) -> float | None:
        """The proved epsilon; infinite where nothing is proved, None where there is no ledger to prove it from."""
        return None if self.statement is None else float(self.statement.proved.epsilon)

    @property
    def audited(self) -> float | None:
        """The lower bound on epsilon that an audit measured."""
        return None if self.audit is None else number_or_none(self.audit.get("epsilon_lower_bound"))

    @property
    def audit_limit(self) -> float | None:
        """What the audited epsilon may not exceed: what is proved for the same, a step or a run; None: not known."""
        own = None if self.audit is None else number_or_none(self.audit.get("epsilon_proved"))
        return self.proved if own is None else own

    def misfit(self, attack: AttackFacts) -> str | None:
        """Why an attack was not one on what this run released; None if it was, as far as its settings say."""
        if self.contents is None:
            return None
        header, settings = self.contents.header, attack.trial["settings"]
        pairs = {"strategy": header.strategy, "steps": header.steps, "training_batch": header.expected_batch_size}
        if header.guarantee != "none":
            pairs |= {name: header.plan.get(name, {}).get("start") for name in ("clip", "sigma")}
            pairs["clipping"] = "flat" if header.groups == ("all",) else "per-layer"
        for name, recorded in pairs.items():
            if isinstance(settings.get(name), str | int | float) and settings[name] != recorded:
                return f"it was tried with {name} = {settings[name]}, and the run has {recorded}"
        return None

    @property
    def strongest(self) -> AttackFacts | None:
        """The attack that got nearest to the images, whichever it was."""
        known = [a for a in self.attacks if a.psnr is not None]
        return max(known, key=lambda a: a.psnr or -math.inf, default=None)


def read_run(path: Path) -> RunFacts:
    """The facts of a run directory: one that ``gradveil train`` wrote, or an engine's own with a ledger alone."""
    run = RunDirectory(path)
    if not path.is_dir() or not (run.config.exists() or run.ledger.exists()):
        raise RunDirectoryError(
            f"{path} is not a run directory: it has neither config.toml nor {run.ledger.name}. Give the directory that "
            "gradveil train wrote, or the run_dir of a PrivacyEngine."
        )
    problems: list[str] = []
    config, own = None, None
    if run.config.exists():
        try:
            told = read_toml(run.config)
            own = told if isinstance(told.get("engine"), dict) else None  # of an engine around somebody's own loop
            config = RunConfig.check(told) if own is None else None
        except GradveilError as error:
            problems.append(f"config.toml: {error}")
    writer = run.writer()
    contents, ledger_problem = _ledger(run)
    audit = _noted(problems, lambda: read_audit(path / AUDIT), None)
    stated = None
    if (whole := contents) is not None:
        try:
            stated = trusted(lambda: statement_of(whole, audited=audit))
        except LedgerError as error:
            contents, ledger_problem = None, str(error)
    return RunFacts(
        path=path,
        config=config,
        own=own,
        environment=_noted(problems, lambda: _optional(run.environment), {}),
        metrics=run.read_metrics(problems, running=writer is not None),
        contents=contents,
        ledger_problem=ledger_problem,
        attacks=_attacks(path / ATTACKS, problems),
        audit=audit,
        problems=tuple(problems),
        writer=writer,
        statement=stated,
    )


def _ledger(run: RunDirectory) -> tuple[Contents | None, str | None]:
    """Checked line by line, and against the newest checkpoint where there is one."""
    if not run.ledger.exists():
        begun = run.metrics.exists() or bool(run.list_checkpoints())
        return None, "ledger.jsonl is missing: what was released is not known." if begun else None
    try:
        contents = run.verified_ledger()
        bound_files(contents)  # lines that name files must make sense
        return contents, None
    except (LedgerError, RunDirectoryError) as error:
        return None, str(error)


def _optional(path: Path) -> dict[str, Any]:
    return _files.read_object(path) if path.exists() else {}


def read_audit(path: Path) -> dict[str, Any] | None:
    """What an audit.json holds; None if there is none. :class:`DataError` where it is not what gradveil audit wrote."""
    if not path.exists():
        return None
    found = _files.read_object(path)
    numbers = ("epsilon_lower_bound", "epsilon_proved", "delta", "confidence")
    if wrong := [n for n in numbers if found.get(n) is not None and number_or_none(found[n]) is None]:
        raise _files.unreadable(path, f"{wrong[0]} is not a number")
    if "unit" in found and not isinstance(found["unit"], str):
        raise _files.unreadable(path, "unit is not a word")
    return found


def _noted(problems: list[str], read: Callable[[], T], default: T) -> T:
    """What ``read`` gives, or ``default`` and a problem in words."""
    try:
        return read()
    except DataError as error:
        problems.append(str(error))
        return default


_RESULTS = (
    "psnr_median",
    "guess_psnr_median",
    "psnr_worst_5_percent",
    "wrong_median",
    "guess_wrong_median",
    "features",
    "success_rate",
    "labels_right",
)


def _attacks(folder: Path, problems: list[str]) -> tuple[AttackFacts, ...]:
    found: list[AttackFacts] = []
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    except OSError as error:
        problems.append(str(_files.unreadable(folder, error.strerror or str(error))))
        return ()
    for path in folders:
        if not (path / RESULT).exists():
            problems.append(f"{ATTACKS}/{path.name} has no {RESULT}: an attack that did not finish, or was removed.")
        else:
            found += _noted(problems, lambda path=path: _trials(path / RESULT), [])  # type: ignore[misc]
    return tuple(found)


def _trials(path: Path) -> list[AttackFacts]:
    whole = _files.read_object(path)
    trials, dataset = whole.get("trials"), whole.get("dataset")
    if not isinstance(trials, list) or not isinstance(dataset, str):
        raise _files.unreadable(path, "it is not the result of an attack")
    found = []
    for number, trial in enumerate(trials):
        if wrong := _what_is_wrong(trial):
            raise _files.unreadable(path, f"it is not the result of an attack: trial {number} {wrong}")
        found.append(AttackFacts(folder=path.parent, number=number, dataset=dataset, trial=trial))
    return found


def _what_is_wrong(trial: object) -> str:
    if not isinstance(trial, dict):
        return "is not an object"
    settings, result = trial.get("settings"), trial.get("result")
    if not isinstance(settings, dict) or not isinstance(result, dict):
        return "has no settings or no result"
    if not all(isinstance(settings.get(name), str) for name in ("attack", "strategy")):
        return "does not name its attack and its strategy"
    numbers = {name: result.get(name) for name in _RESULTS} | {"success_bound": trial.get("success_bound")}
    told = {name: value for name, value in numbers.items() if value is not None}
    wrong = [n for n, value in told.items() if isinstance(value, str) or number_or_none(value) is None]
    return f"has a {wrong[0]} that is not a number" if wrong else ""
