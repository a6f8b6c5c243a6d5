"""What train() and resume() refuse, with nothing written and nothing lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from digits_runs import SEED, Killed, interrupted, killed, settings
from gradveil.errors import GradveilError, LedgerError, RunDirectoryError
from gradveil.training.loop import resume, train
from gradveil.training.run_directory import RunDirectory


def test_a_run_directory_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match=r"not empty.*never written over.*--resume"):
        train(settings(), run_dir=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(RunDirectoryError, match="exists"):
        train(settings(), run_dir=tmp_path / "mine.txt")


@pytest.mark.parametrize(
    "changes",
    [
        {"physical_batch_size": 0},
        {"physical_batch_size": -1},
        {"strategy": "adaclip", "options": {"h2": math.inf}},
        {"strategy": "quantile-clip", "options": {"learning_rate": math.inf}},
        {"strategy": "quantile-clip", "options": {"count_noise": math.inf}},
        {"options": {"quantile": 0.5}},
        {"clipping": "per-cake"},
        {"activation": "rleu"},
        {"model": "paper-mlp"},
        {"device": "tpu"},
        {"batch_size": 1348},
        {"delta": 0.001},
        {"steps": 0},
        {"dataset": "purchase-10", "views": 2, "augment": "flip"},
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(GradveilError):
        train(settings(**changes), run_dir=tmp_path / "run", seed=SEED)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_ledger_is_gone_is_not_resumed(tmp_path: Path) -> None:
    train(settings(), run_dir=tmp_path / "run", seed=SEED)
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="no ledger"):
        resume(tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_a_directory_that_is_no_run_is_not_resumed(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunDirectoryError, match="not a run directory"):
            resume(where)


@pytest.fixture
def cut(tmp_path: Path) -> RunDirectory:
    return interrupted(settings(), tmp_path / "cut", after=8)


def _newest(run: RunDirectory) -> Path:
    return run.list_checkpoints()[-1]


@pytest.mark.parametrize("changes", [{"sigma": 13.0}, {"strategy": "dyn-sigma"}, {"lr": 0.1}, {"model": "paper-mlp"}])
def test_a_run_is_not_resumed_with_other_settings(cut: RunDirectory, changes: dict[str, Any]) -> None:
    before = cut.ledger.read_bytes()
    with pytest.raises(RunDirectoryError, match=f"started with {next(iter(changes))}"):
        resume(cut.path, settings=changes)
    assert cut.ledger.read_bytes() == before


@pytest.mark.parametrize(
    "change", [("sigma = 12.0", "sigma = 24.0"), ("lr = 0.2", "lr = 0.3"), ("steps = 12", "steps = 9")]
)
def test_a_run_whose_config_was_edited_is_not_resumed(cut: RunDirectory, change: tuple[str, str]) -> None:
    text = cut.config.read_text()
    assert change[0] in text
    cut.config.write_text(text.replace(*change))
    before = cut.ledger.read_bytes()
    with pytest.raises(RunDirectoryError, match="settings"):
        resume(cut.path)
    assert cut.ledger.read_bytes() == before


def test_a_seeded_run_is_not_resumed_with_another_seed_or_without_its_secret(cut: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match="seed") as caught:
        resume(cut.path, seed=SEED + 1)
    assert str(SEED) not in str(caught.value)
    cut.secret.unlink()
    with pytest.raises(RunDirectoryError, match=r"secret\.json"):
        resume(cut.path)


def test_a_runkilled_before_its_seed_was_written_does_not_go_on_unseeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write_seed", killed)
        with pytest.raises(Killed):
            train(settings(steps=1), run_dir=tmp_path / "run", seed=SEED)
    with pytest.raises(RunDirectoryError):
        resume(tmp_path / "run")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", b'{"step": "x"}', b"\xff\xfe", b'{"step": 8}'])
def test_a_checkpoint_whose_record_is_not_what_was_written_is_refused(cut: RunDirectory, data: bytes) -> None:
    _newest(cut).write_bytes(data)
    with pytest.raises(RunDirectoryError, match="damaged"):
        resume(cut.path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 9),
        ("step", 4),
        ("ledger_length", "x"),
        ("ledger_length", 0),
        ("ledger_length", None),
        ("ledger_head", "0" * 64),
        ("tensors_sha256", "0" * 64),
        ("config_digest", "0" * 64),
        ("optimizer", None),
        ("optimizer", "gone"),
    ],
)
def test_a_checkpoint_with_a_changed_fact_is_refused(cut: RunDirectory, name: str, value: Any) -> None:
    facts = json.loads(_newest(cut).read_text())
    facts[name] = value
    if value == "gone":
        del facts[name]
    _newest(cut).write_text(json.dumps(facts))
    before = cut.ledger.read_bytes()
    with pytest.raises((RunDirectoryError, LedgerError)):
        resume(cut.path)
    assert cut.ledger.read_bytes() == before


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "missing"])
def test_a_checkpoint_with_damaged_tensors_is_refused(cut: RunDirectory, damage: str) -> None:
    path = _newest(cut).with_suffix(".safetensors")
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        data[-5] ^= 1
        path.write_bytes({"changed": data, "cut": data[:-5], "empty": b""}[damage])
    before = cut.ledger.read_bytes()
    with pytest.raises(RunDirectoryError, match="checkpoint"):
        resume(cut.path)
    assert cut.ledger.read_bytes() == before


def test_a_run_with_a_damaged_ledger_is_not_resumed(cut: RunDirectory) -> None:
    data = bytearray(cut.ledger.read_bytes())
    data[len(data) // 2] ^= 1
    cut.ledger.write_bytes(data)
    with pytest.raises(LedgerError) as caught:
        resume(cut.path)
    assert caught.value.line == bytes(data).count(b"\n", 0, len(data) // 2) + 1
    assert cut.ledger.read_bytes() == data
