"""A run that goes on with other threads, kernels, versions or another device says so, in words and in its ledger."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from digits_runs import SEED, equal, interrupted, settings, tensors
from gradveil.clipping.backends import layers, native
from gradveil.errors import PrivacyViolation
from gradveil.training import environment, loop, session
from gradveil.training.run_directory import RunDirectory


def _notes(where: Path) -> list[Any]:
    return [body for kind, body in RunDirectory(where).verified_ledger().notes if kind == "environment"]


def test_every_checkpoint_says_what_its_last_bits_depend_on(tmp_path: Path) -> None:
    run = interrupted(settings(), tmp_path / "run", after=4)
    checkpoint = run.newest_checkpoint()
    assert checkpoint is not None
    told = checkpoint.facts["environment"]
    assert told == environment.numerics(torch.device("cpu"))
    assert told["torch"] == str(torch.__version__) and told["threads"] == torch.get_num_threads()
    assert {"device", "kernels", "processes"} <= told.keys()


def test_a_run_that_goes_on_as_it_was_says_nothing(tmp_path: Path) -> None:
    interrupted(settings(), tmp_path / "run", after=4)
    loop.resume(tmp_path / "run")  # warnings are errors here
    assert _notes(tmp_path / "run") == []


@pytest.mark.parametrize("seed", [SEED, None])
def test_another_number_of_threads_is_said_and_noted(tmp_path: Path, seed: int | None) -> None:
    interrupted(settings(), tmp_path / "run", after=4, seed=seed)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with pytest.warns(UserWarning, match=f"threads: {before + 1} .at the checkpoint: {before}") as caught:
            loop.resume(tmp_path / "run")
    finally:
        torch.set_num_threads(before)
    assert ("--new-noise" in str(caught[0].message)) is (seed is not None)
    assert _notes(tmp_path / "run") == [{"threads": {"before": before, "now": before + 1}}]


def test_without_compiled_kernels_it_is_said_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.kernels() is None:
        pytest.skip("no compiled kernels here")
    training = settings(steps=8, checkpoint_every=4, evaluate_every=8)
    loop.train(training, run_dir=tmp_path / "whole", seed=SEED)
    run = interrupted(training, tmp_path / "run", after=4)
    monkeypatch.setenv("GRADVEIL_NATIVE", "0")
    native._load.cache_clear()
    layers._load.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"PyTorch \(GRADVEIL_NATIVE=0\)"):
            loop.resume(run.path)
    finally:
        monkeypatch.undo()
        native._load.cache_clear()
        layers._load.cache_clear()
    assert list(_notes(run.path)[0]) == ["kernels"]
    assert not equal(tensors(run.path), tensors(tmp_path / "whole")), "the note would be for nothing"


def test_a_step_that_cannot_be_repeated_is_withheld_with_the_way_on(tmp_path: Path, monkeypatch) -> None:
    run = interrupted(settings(), tmp_path / "run", after=8)
    for path in [p for p in run.checkpoints.iterdir() if "00000008" in p.name]:
        path.unlink()  # as if killed before the second checkpoint: steps 4 to 7 come again
    native_before = environment.numerics

    def elsewhere(device: torch.device) -> dict[str, Any]:
        return native_before(device) | {"torch": "1.0"}

    monkeypatch.setattr(session, "numerics", elsewhere)
    monkeypatch.setattr("gradveil.engine.guards.fingerprint", lambda tensors: "0" * 32)
    monkeypatch.setattr("gradveil.engine.setup.fingerprint", lambda tensors: "0" * 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PrivacyViolation, match="--new-noise"):
            loop.resume(run.path)
        loop.resume(run.path, new_noise=True)
    assert RunDirectory(run.path).verified_ledger().ended == "finished"


def test_a_checkpoint_of_before_has_no_environment_and_goes_on() -> None:
    assert environment.differences(None, {"threads": 1}) == {}
    assert environment.differences({"threads": 1}, {"threads": 1, "torch": "2"}) == {}
    assert environment.differences([], {"threads": 1}) == {}
