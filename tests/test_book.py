"""The book of a run: on disk before results are, one for a run directory, and steps that are taken again."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradveil.accounting import ledger as ledgers
from gradveil.engine.guards import AwaitedRelease
from gradveil.errors import BudgetExhausted, LedgerError, PrivacyViolation, RunDirectoryError
from loops import run, start, weights


def step_once(model, opt, loader):
    for x, y in islice(loader, 1):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


def released(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_a_run_directory_is_used_once_and_resumed_on_request(tmp_path):
    engine, model, opt, loader = start(run_dir=tmp_path / "run", seed=2, strategy="quantile-clip")
    for x, y in islice(loader, 5):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    state, kept = engine.state_dict(), copy.deepcopy(model.state_dict())
    engine.detach()
    with pytest.raises(RunDirectoryError, match="holds a ledger already"):
        start(run_dir=tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="begun with"):
        start(run_dir=tmp_path / "run", resume=True, sigma=9.0, strategy="quantile-clip")
    with pytest.raises(RunDirectoryError, match="groups"):
        start(
            run_dir=tmp_path / "run",
            resume=True,
            strategy="quantile-clip",
            model=nn.Sequential(nn.Flatten(), nn.Linear(25, 3)),
        )
    again, model, opt, loader = start(run_dir=tmp_path / "run", resume=True, seed=2, strategy="quantile-clip")
    model.load_state_dict(kept)
    again.load_state_dict(state)
    run(again, model, opt, loader)
    assert [r.step for r in again.releases] == list(range(12))
    whole, other, opt, loader = start(seed=2, strategy="quantile-clip")
    run(whole, other, opt, loader)
    assert torch.equal(weights(model), weights(other))
    assert again.releases == whole.releases


def test_the_ledger_is_on_disk_before_weights_or_statements_are_handed_out(tmp_path, monkeypatch):
    engine, model, opt, loader = start(run_dir=tmp_path / "run", steps=9)
    ledger = tmp_path / "run" / "ledger.jsonl"
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd)))
    monkeypatch.setattr("gradveil.accounting.ledger._SYNC_AFTER", 1e9)
    hand_outs = [model.state_dict, lambda: copy.deepcopy(model), lambda: pickle.dumps(model), engine.statement]
    for steps, hand_out in enumerate(hand_outs, start=1):
        step_once(model, opt, loader)
        assert len(ledgers.read(ledger).releases) == steps  # with the operating system at once
        assert not synced  # on the disk itself when something is handed out
        hand_out()
        assert synced
        synced.clear()
    run(engine, model, opt, loader)
    assert len(ledgers.read(ledger).releases) == 9


def test_what_an_engine_that_is_gone_released_is_written_at_exit(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from loops import start, run
def train():
    run(*start(run_dir={str(tmp_path / "run")!r}, steps=3))
import gradveil.accounting.ledger, itertools
gradveil.accounting.ledger._SYNC_AFTER = 1e9
import gradveil.mechanism.sampling
gradveil.mechanism.sampling.PrivateLoader._finish = property(lambda self: None, lambda self, value: None)
train()
import gc; gc.collect()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(ledgers.read(tmp_path / "run" / "ledger.jsonl").releases) == 3


def test_a_digest_that_is_still_computed_is_written_at_exit(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from dataclasses import replace
from test_book import start, step_once
engine, model, opt, loader = start(run_dir={str(tmp_path / "run")!r}, steps=3, seed=1)
step_once(model, opt, loader)
engine._log.note(replace(engine.releases[0], step=1, digest=None), digest_follows=True)
import torch
engine._log.give_digest(torch.tensor([7]))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    releases = ledgers.read(tmp_path / "run" / "ledger.jsonl").releases
    assert [(r.step, r.digest is not None) for r in releases] == [(0, True), (1, True)]


def test_a_release_is_in_the_file_before_its_digest_is_computed(tmp_path):
    engine, model, opt, loader = start(run_dir=tmp_path / "run", steps=3, seed=1)
    step_once(model, opt, loader)
    path = tmp_path / "run" / "ledger.jsonl"
    engine._log.note(replace(engine.releases[0], step=1, digest=None), digest_follows=True)
    assert [(r.step, r.digest is not None) for r in ledgers.read(path).releases] == [(0, True), (1, False)]
    engine._log.give_digest(torch.tensor([7]))
    engine.commit()
    assert [(r.step, r.digest is not None) for r in ledgers.read(path).releases] == [(0, True), (1, True)]


def test_a_resumed_run_with_layers_of_another_size_is_refused(tmp_path):
    start(run_dir=tmp_path / "run", model=nn.Sequential(nn.Flatten(), nn.Linear(25, 3)))
    with pytest.raises(RunDirectoryError, match="group_sizes"):
        start(run_dir=tmp_path / "run", resume=True, model=nn.Sequential(nn.Flatten(), nn.Linear(25, 5)))


def test_going_back_without_a_seed_draws_new_noise_and_a_new_sample():
    """The same noise on two gradients cancels in their difference."""
    engine, model, opt, loader = start(sigma=50.0)
    state = engine.state_dict()
    step_once(model, opt, loader)
    first = released(model)
    engine.load_state_dict(state)
    step_once(model, opt, loader)
    assert float((released(model) - first).std()) > 0.5 * 50 * math.sqrt(2) / 10
    assert [r.step for r in engine.releases] == [0, 0]


def test_a_seeded_step_that_is_redone_repeats_itself_or_is_withheld():
    engine, model, opt, loader = start(seed=1, sigma=50.0)
    state, kept = engine.state_dict(), copy.deepcopy(model.state_dict())
    step_once(model, opt, loader)
    first = released(model)
    model.load_state_dict(kept)
    engine.load_state_dict(state)
    step_once(model, opt, loader)
    assert torch.equal(released(model), first)
    with torch.no_grad():
        model[0].weight.add_(0.1)
    engine.load_state_dict(state)
    with pytest.raises(PrivacyViolation, match="does not repeat itself bit for bit"):
        step_once(model, opt, loader)
    assert all(p.grad is None for p in model.parameters())  # nothing with the old noise on it is left
    assert len(engine.releases) == 2


@pytest.mark.parametrize(
    "other", [{"sigma": 25.0}, {"lr": 0.2}, {"optimizer": "adam"}, {"steps": 13}, {"strategy": "dyn-s-decay"}]
)
def test_two_runs_with_one_seed_and_other_settings_share_neither_noise_nor_samples(other):
    runs = []
    for settings in ({}, other):
        engine, model, opt, loader = start(**{"seed": 1, "sigma": 50.0} | settings)
        step_once(model, opt, loader)
        runs.append(
            (released(model) / engine.releases[0].noise_std[0], engine.sampling.draw(engine._run_key, 3).tolist())
        )
    correlation = torch.corrcoef(torch.stack([runs[0][0], runs[1][0]]))[0, 1]
    assert abs(float(correlation)) < 0.4  # 77 coordinates
    assert runs[0][1] != runs[1][1]


def test_a_budget_refuses_the_step_that_would_overspend_before_it_is_taken():
    engine, model, opt, loader = start(sigma=4.0, clipping="flat", steps=12)
    run(engine, model, opt, loader)
    full = engine.statement().proved.epsilon
    engine, model, opt, loader = start(sigma=4.0, clipping="flat", steps=12, budget=full * 0.7)
    with pytest.raises(BudgetExhausted, match=r"step \d+ of 12 would spend more than the budget"):
        run(engine, model, opt, loader)
    taken = len(engine.releases)
    assert 1 <= taken < 12
    assert engine.statement().proved.epsilon <= full * 0.7
    opt.zero_grad()
    with pytest.raises(BudgetExhausted):
        step_once(model, opt, loader)  # in a new loop: refused again, and nothing to step with
    assert all(p.grad is None for p in model.parameters())
    assert len(engine.releases) == taken
    generous, *rest = start(sigma=4.0, clipping="flat", steps=12, budget=full * 1.01)
    run(generous, *rest)
    assert len(generous.releases) == 12


def test_a_release_whose_digest_is_still_computed_is_written_before_the_end(tmp_path):
    engine, model, opt, loader = start(run_dir=tmp_path / "run", steps=3, seed=1)
    step_once(model, opt, loader)
    done = engine.releases[0]
    engine._log.note(replace(done, step=1, digest=None), digest_follows=True)
    engine._log.give_digest(torch.tensor([7]))
    engine.close("stopped")
    found = ledgers.read(tmp_path / "run" / "ledger.jsonl")
    assert [(r.step, r.digest is not None) for r in found.releases] == [(0, True), (1, True)]
    assert found.ended == "stopped"


def test_a_step_that_was_broken_off_before_its_digest_is_counted_without_one():
    engine, model, opt, loader = start(steps=3, seed=1)
    step_once(model, opt, loader)
    engine._log.note(replace(engine.releases[0], step=1, digest=None), digest_follows=True)
    assert [r.digest is not None for r in engine.releases] == [True, False]


def taken_up_again(path, state, kept, **settings):
    """A run resumed by another process, from a checkpoint of its first step."""
    engine, model, opt, loader = start(run_dir=path, resume=True, sigma=50.0, **settings)
    model.load_state_dict(kept)
    engine.load_state_dict(state)
    return engine, model, opt, loader


def test_a_seeded_run_goes_on_without_its_seed_with_new_noise_on_steps_released_before(tmp_path):
    path = tmp_path / "run"
    engine, model, opt, loader = start(run_dir=path, seed=1, sigma=50.0)
    state, kept = engine.state_dict(), copy.deepcopy(model.state_dict())
    step_once(model, opt, loader)
    first = released(model)
    engine.detach()
    again, model, opt, loader = taken_up_again(path, state, kept)
    step_once(model, opt, loader)
    assert not torch.equal(released(model), first)
    assert [(r.step, r.digest is not None) for r in again.releases] == [(0, True), (0, False)]


def test_a_run_without_a_seed_that_goes_on_with_one_is_held_to_what_it_released_by_it(tmp_path):
    path = tmp_path / "run"
    engine, model, _, _ = start(run_dir=path, sigma=50.0)
    state, kept = engine.state_dict(), copy.deepcopy(model.state_dict())
    engine.detach()
    first, model, opt, loader = taken_up_again(path, state, kept, seed=5)
    step_once(model, opt, loader)
    assert first.releases[0].digest
    first.detach()
    other = {name: value + 0.1 for name, value in kept.items()}
    _, model, opt, loader = taken_up_again(path, state, other, seed=5)
    with pytest.raises(PrivacyViolation, match="does not repeat itself bit for bit"):
        step_once(model, opt, loader)


def test_nothing_is_noted_after_the_end():
    engine, model, opt, loader = start(steps=3, seed=1)
    step_once(model, opt, loader)
    engine.close()
    with pytest.raises(LedgerError, match="ended"):
        engine._log.note(replace(engine.releases[0], step=1), digest_follows=True)


def test_a_digest_that_cannot_be_waited_for_stays_to_be_written(monkeypatch):
    engine, model, opt, loader = start(steps=3, seed=1)
    step_once(model, opt, loader)
    engine._log.note(replace(engine.releases[0], step=1, digest=None), digest_follows=True)
    engine._log.give_digest(torch.tensor([7]))
    with monkeypatch.context() as patched:
        patched.setattr(AwaitedRelease, "read", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.commit()
    assert [(r.step, r.digest is not None) for r in engine.releases] == [(0, True), (1, True)]


def _interrupted(self):
    raise KeyboardInterrupt
