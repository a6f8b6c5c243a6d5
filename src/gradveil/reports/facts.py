"""A run directory, read for showing: what is there, and in words what is not or cannot be trusted. No torch.

Nothing here raises because a run is unfinished or damaged: an invalid ledger, an interrupted training, an attack that
was never run are facts to be shown. Only a path that is no run at all is an error.

What may be private stays out: the seed, captured gradients and checkpoints are never opened, and of an attack only its
figures are. Its pictures are read by who asks for them (:meth:`AttackFacts.pictures`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.accounting.ledger import Contents
from gradveil.accounting.ledger import read as read_ledger
from gradveil.accounting.manifest import BAD, FileState, bound_files, file_states
from gradveil.errors import GradveilError, LedgerError, RunDirectoryError
from gradveil.training.config import RunConfig, read_toml
from gradveil.training.recorded import contradictions
from gradveil.training.run_directory import RunDirectory

if TYPE_CHECKING:
    import numpy as np

    from gradveil.accounting import Statement

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
        import numpy as np

        path = self.folder / PICTURES
        if not path.exists():
            return {}
        with np.load(path) as file:
            own = f"{self.number}/"
            return {name.removeprefix(own): file[name] for name in file.files if name.startswith(own)}


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
    problems: Sequence[str] = field(default=())  # of other files, in words

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def strategy(self) -> str:
        if self.contents is not None:
            return self.contents.header.strategy
        return self.config.strategy if self.config is not None else "unknown"

    @property
    def is_private(self) -> bool:
        return self.contents is not None and self.contents.header.guarantee != "none"

    @property
    def state(self) -> str:
        """ "finished", "interrupted" or "ledger invalid"; a run that ended early says how."""
        if self.ledger_problem is not None:
            return "ledger invalid"
        if self.contents is None or self.contents.ended is None:
            return "interrupted"
        return self.contents.ended

    @property
    def steps_taken(self) -> int | None:
        if self.contents is None:
            return None
        looked = int(self.metrics[-1]["step"]) if self.metrics else 0
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

    @cached_property
    def statement(self) -> Statement | None:
        """From the ledger, the audit beside it; None where that cannot be trusted. Takes a second for long runs."""
        from gradveil.accounting import statement_of

        if self.contents is None:
            return None
        return statement_of(self.contents, audited=self.audit)

    @property
    def proved(self) -> float | None:
        """The proved epsilon; infinite where nothing is proved, None where there is no ledger to prove it from."""
        return None if self.statement is None else float(self.statement.proved.epsilon)

    @property
    def audited(self) -> float | None:
        """The lower bound on epsilon that an audit measured."""
        return None if self.audit is None else _number(self.audit.get("epsilon_lower_bound"))

    @property
    def audit_limit(self) -> float | None:
        """What the audited epsilon may not exceed: what is proved for the same, a step or a run; None: not known."""
        own = None if self.audit is None else _number(self.audit.get("epsilon_proved"))
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
    config = None
    if run.config.exists():
        try:
            config = RunConfig.check(read_toml(run.config))
        except GradveilError as error:
            problems.append(f"config.toml: {error}")
    contents, ledger_problem = _ledger(run)
    return RunFacts(
        path=path,
        config=config,
        environment=_json(run.environment, problems) or {},
        metrics=run.read_metrics(),
        contents=contents,
        ledger_problem=ledger_problem,
        attacks=_attacks(path / ATTACKS, problems),
        audit=_json(path / AUDIT, problems),
        problems=tuple(problems),
    )


def _ledger(run: RunDirectory) -> tuple[Contents | None, str | None]:
    """Checked line by line, and against the newest checkpoint where there is one."""
    if not run.ledger.exists():
        begun = run.metrics.exists() or bool(run.list_checkpoints())
        return None, "ledger.jsonl is missing: what was released is not known." if begun else None
    try:
        contents = run.verified_ledger() if run.config.exists() else read_ledger(run.ledger)
        bound_files(contents)  # lines that name files must make sense
        return contents, None
    except (LedgerError, RunDirectoryError) as error:
        return None, str(error)


def _number(value: object) -> float | None:
    """Of JSON, where infinity is "inf"; None where it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return None if math.isnan(found) else found


def _json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError, OSError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None


def _attacks(folder: Path, problems: list[str]) -> tuple[AttackFacts, ...]:
    found: list[AttackFacts] = []
    for path in sorted(folder.glob(f"*/{RESULT}")):
        whole = _json(path, problems)
        if whole is None:
            continue
        with contextlib.suppress(KeyError, TypeError):
            for number, trial in enumerate(whole["trials"]):
                _ = trial["settings"]["attack"], trial["settings"]["strategy"], trial["result"]
                facts = AttackFacts(folder=path.parent, number=number, dataset=str(whole["dataset"]), trial=trial)
                found.append(facts)
            continue
        problems.append(f"{path.parent.name}/{RESULT} is not the result of an attack.")
    return tuple(found)
