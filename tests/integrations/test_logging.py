"""TensorBoard and MLflow get the curves and the statement of a run, each epsilon by its kind, and never the seed."""

from __future__ import annotations

import pytest

import gradveil
from gradveil.errors import LedgerError, RunDirectoryError
from gradveil.integrations.logging import LOSS, MLflowProgress, TensorBoardProgress, log_run
from small_runs import TINY, damaged, trained

SEED = 918273645546372  # nothing else has these digits


def no_seed_in(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert str(SEED).encode() not in path.read_bytes(), path


class TensorBoard:
    """Makes boards, and reads what they hold."""

    def __init__(self, folder):
        self.folder = folder

    def board(self):
        return TensorBoardProgress(self.folder)

    def read(self, board):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.folder))
        events.Reload()
        curves = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
        texts = {
            name.removesuffix("/text_summary"): events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
            for name in events.Tags()["tensors"]
        }
        return curves, texts


class MLflow:
    def __init__(self, folder):
        self.folder = folder

    def board(self):
        return MLflowProgress(experiment="test", run_name="one", tracking_uri=self.folder.as_uri())

    def read(self, board):
        run = board._client.get_run(board.run_id)
        assert run.info.status == "FINISHED"
        names = list(run.data.metrics)
        curves = {n: [(m.step, m.value) for m in board._client.get_metric_history(board.run_id, n)] for n in names}
        kept = (self.folder / run.info.experiment_id / board.run_id / "artifacts" / "statement.txt").read_text()
        facts = "\n".join(f"{name} | {value} |" for name, value in run.data.params.items())
        return curves, {"statement": kept, "facts": facts, "settings": facts}


@pytest.fixture(params=["tensorboard", "mlflow"])
def tool(request, tmp_path, monkeypatch):
    pytest.importorskip(
        request.param, reason=f"{request.param} is not installed: pip install 'gradveil[{request.param}]'"
    )
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the client alone has no database
    return {"tensorboard": TensorBoard, "mlflow": MLflow}[request.param](tmp_path / "log")


def test_a_run_while_it_trains(tool, tmp_path):
    with tool.board() as board:
        run = gradveil.train(run_dir=tmp_path / "run", seed=SEED, progress=board, **TINY)
        board.finish(run)
    curves, texts = tool.read(board)
    assert {LOSS, "accuracy", "epsilon/proved-PLD", "final/accuracy", "final/epsilon/proved-PLD"} <= set(curves)
    assert curves[LOSS][-1][0] == TINY["steps"]
    (last,) = curves["final/epsilon/proved-PLD"]
    assert last == (TINY["steps"], pytest.approx(run.statement.proved.epsilon, rel=1e-6))
    assert "final/epsilon/as-published-MA" in curves
    assert "not a guarantee" in texts["statement"]
    assert "privacy.neighbours | add-remove |" in texts["facts"]
    no_seed_in(tmp_path / "log")


def test_nothing_proved_is_nowhere_called_proved(tool, tmp_path):
    with tool.board() as board:
        run = gradveil.train(run_dir=tmp_path / "run", progress=board, **TINY | {"strategy": "dyn-s"})
        board.finish(run)
    curves, texts = tool.read(board)
    assert "epsilon/as-published" in curves
    assert not any("proved" in name for name in curves)
    assert "privacy.epsilon_proved | inf |" in texts["facts"]


def test_a_finished_run_directory(tool, tmp_path):
    run = trained(tmp_path / "run", seed=SEED, evaluate_every=2)
    with tool.board() as board:
        log_run(run, to=board)
    curves, texts = tool.read(board)
    for name in (LOSS, "accuracy", "epsilon/proved-PLD", "noise/clip", "noise/sigma"):
        assert [step for step, _ in curves[name]] == [2, 4, 6]
    proved = gradveil.account(run).proved["add-remove"].epsilon
    assert curves["final/epsilon/proved-PLD"] == [(6, pytest.approx(proved, rel=1e-6))]
    assert "sigma | 3.0 |" in texts["settings"]
    assert "ended | finished |" in texts["facts"]
    no_seed_in(tmp_path / "log")


def test_an_invalid_ledger_is_not_exported(tool, tmp_path):
    run = damaged(trained(tmp_path / "run"))
    with tool.board() as board:
        with pytest.raises(LedgerError, match="Nothing was exported"):
            log_run(run, to=board)
        with pytest.raises(RunDirectoryError):
            log_run(tmp_path, to=board)
