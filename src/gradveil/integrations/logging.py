"""TensorBoard and MLflow: runs of :func:`gradveil.train` while they train, and finished run directories.

    with TensorBoardProgress("boards/a") as board:
        run = gradveil.train(dataset="digits", progress=board)
        board.finish(run)

    with MLflowProgress(tracking_uri="http://server:5000", experiment="digits") as board:
        log_run("runs/a", to=board)

An epsilon is written under a name that says what kind it is (``epsilon/proved-RDP``, ``epsilon/as-published``); kinds
are never merged into one curve. The loss is computed from the private data without noise, which no epsilon covers, and
its name says so. The seed is neither read nor written. The ledger is on disk before progress is reported
(training/session.py): what is seen here was counted before.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.errors import LedgerError
from gradveil.integrations._shared import epsilon_name, require

if TYPE_CHECKING:
    from gradveil.accounting import Statement
    from gradveil.training.results import Progress, Result

LOSS = "loss/not-private"
ACCURACY = "accuracy"


class _Board:
    """Curves by step, and the facts of a run. Says what is written; the classes below say where."""

    def scalar(self, name: str, value: float, step: int) -> None:
        raise NotImplementedError

    def settings(self, settings: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def text(self, name: str, text: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __call__(self, progress: Progress) -> None:
        """What ``gradveil.train(progress=...)`` calls now and then."""
        epsilon = progress.epsilon
        self.look(
            progress.step,
            loss=progress.loss,
            accuracy=progress.accuracy,
            kind=None if epsilon is None else epsilon.kind,
            epsilon=None if epsilon is None else epsilon.value,
        )

    def look(
        self, step: int, *, loss: float | None, accuracy: float | None, kind: str | None, epsilon: float | None
    ) -> None:
        """One look at a run under way."""
        for name, value in ((LOSS, loss), (ACCURACY, accuracy), (epsilon_name(kind or ""), epsilon)):
            if value is not None and math.isfinite(value):
                self.scalar(name, value, step)

    def finish(self, result: Result) -> None:
        """The end of a run: final accuracy, and its statement."""
        if math.isfinite(result.accuracy):
            self.scalar("final/accuracy", result.accuracy, result.steps)
        self.state(result.statement, ended=result.ended)

    def state(self, statement: Statement, *, ended: str) -> None:
        """What is proved and what is only published, each under its own name; an infinite epsilon in words only."""
        told = statement.to_dict()
        step = statement.steps_taken
        epsilons = {f"proved-{statement.proved.accountant}": statement.proved.epsilon}
        epsilons |= {f"as-published-{name}": value.epsilon for name, value in statement.paper.items()}
        for name, epsilon in epsilons.items():
            if math.isfinite(epsilon):
                self.scalar(f"final/epsilon/{name}", epsilon, step)
        facts = ("strategy", "guarantee", "sampler", "neighbours", "delta", "steps_declared", "steps_taken", "stopping")
        found = {f"privacy.{name}": told[name] for name in facts}
        found["privacy.epsilon_proved"] = told["proved"]["epsilon"]
        self.settings({**found, "ended": ended})
        self.text("statement", str(statement))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TensorBoardProgress(_Board):
    """Writes to ``log_dir``; ``tensorboard --logdir`` shows it. Extra: gradveil[tensorboard]."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(log_dir))

    def scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)

    def settings(self, settings: Mapping[str, Any]) -> None:
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        self._writer.add_text("facts" if "ended" in settings else "settings", f"| | |\n|---|---|\n{rows}")

    def text(self, name: str, text: str) -> None:
        # TensorBoard renders Markdown: four blanks keep the lines as they are.
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))

    def close(self) -> None:
        self._writer.close()


class MLflowProgress(_Board):
    """One run on a tracking server, or wherever ``tracking_uri`` says. Extra: gradveil[mlflow].

    The client alone is used: a run that is active in the process is left alone. ``run_id`` is the new run's.
    """

    def __init__(
        self, *, experiment: str = "gradveil", run_name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        require("mlflow", "mlflow")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        where = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        self.run_id: str = self._client.create_run(where, run_name=run_name).info.run_id

    def scalar(self, name: str, value: float, step: int) -> None:
        self._client.log_metric(self.run_id, name, value, step=step)

    def settings(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            self._client.log_param(self.run_id, name, value)

    def text(self, name: str, text: str) -> None:
        self._client.log_text(self.run_id, text, f"{name}.txt")

    def close(self) -> None:
        self._client.set_terminated(self.run_id)

    def __exit__(self, *error: object) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if error and error[0] is not None else "FINISHED")


def log_run(run_dir: str | os.PathLike[str], *, to: TensorBoardProgress | MLflowProgress) -> None:
    """Export a run directory: its settings, its metrics over the steps, and the statement of its ledger.

    The ledger is verified first; where it does not hold, nothing is exported. secret.json is not opened, and the path
    of the data stays here.
    """
    from gradveil.reports.facts import read_run

    facts = read_run(Path(run_dir))
    if facts.ledger_problem is not None:
        raise LedgerError(f"{facts.ledger_problem} Nothing was exported: no epsilon follows from such a ledger.")
    if facts.config is not None:
        own = {name: value for name, value in facts.config.settings().items() if name != "data_dir"}
        to.settings({name: json.dumps(v) if isinstance(v, dict) else v for name, v in own.items()})
    for record in facts.metrics:
        to.look(
            int(record["step"]),
            loss=record.get("loss"),
            accuracy=record.get("accuracy"),
            kind=record.get("epsilon_kind"),
            epsilon=record.get("epsilon"),
        )
        for name in ("clip", "sigma", "noise_std"):
            if record.get(name) is not None:
                to.scalar(f"noise/{name}", float(record[name]), int(record["step"]))
    if facts.accuracy is not None and facts.steps_taken is not None:
        to.scalar("final/accuracy", facts.accuracy, facts.steps_taken)
    if facts.statement is not None:
        to.state(facts.statement, ended=facts.state)
