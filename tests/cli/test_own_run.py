"""A run of somebody's own model goes through everything that one of ``gradveil train`` does."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradveil as gv
from gradveil.accounting import ledger as ledgers
from gradveil.errors import ConfigError
from gradveil.reports.facts import read_run

SOURCE = """
import torch
from torch import nn
from sklearn.datasets import load_digits

def model():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(256, 10))

def data():
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return x[:1400], torch.tensor(digits.target[:1400]), x[1400:], torch.tensor(digits.target[1400:])

def other():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def nothing():
    return 3
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_digits.py").write_text(SOURCE)
    return folder


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))


def train(where, *, steps=6, **settings):
    import own_digits

    x, y, x_test, y_test = own_digits.data()
    model = own_digits.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    asked = {"strategy": "dyn-s-decay", "clip": 1.0, "sigma": 2.0, "steps": steps, "clipping": "flat", **settings}
    engine = gv.PrivacyEngine(run_dir=where, delta=1e-5, **asked)
    loader = DataLoader(TensorDataset(x, y), batch_size=128)
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if engine.step % 3 == 0:
            with torch.no_grad(), engine.public_data("held-out digits"):
                engine.log(accuracy=(model(x_test).argmax(1) == y_test).float().mean(), note="held out")
    engine.close()
    return where


RECORDED = {"model_factory": "own_digits:model", "data_factory": "own_digits:data"}


@pytest.fixture(scope="module")
def made(place):
    import sys

    sys.path.insert(0, str(place))
    try:
        return train(place / "run", about={"purpose": "to be tested", "unit": "one digit"}, **RECORDED)
    finally:
        sys.path.remove(str(place))


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def test_the_whole_session(gradveil, run):
    done = gradveil("attack", run, "--attack", "map", "--victims", 2, "--iterations", 2)
    assert done.code == 0, done.err
    done = gradveil("audit", run, "--steps", 60, "--examples", 8)
    assert done.code == 0, done.err
    done = gradveil("report", run)
    assert done.code == 0, done.err
    page = (run / "report.html").read_text()
    assert "to be tested" in page and "no accuracy" not in page
    limits = ("--max-epsilon", 100, "--min-accuracy", 0.01, "--max-attack-psnr", 60, "--require-bound")
    done = gradveil("check", run, *limits)
    assert done.code == 0, done.out
    done = gradveil("verify", run)
    assert done.code == 0 and "not bound:" not in done.out, done.out
    for form in ("registry", "model-card", "cyclonedx", "statement"):
        done = gradveil("export", run, "--to", form)
        assert done.code == 0 and "to be tested" in done.out, done.err
    row = json.loads(gradveil("compare", run, "--json").out)[0]
    assert row["accuracy"] > 0.05 and row["attack"] == "map" and row["epsilon_audited"] is not None


def test_what_is_written_and_bound(made):
    facts = read_run(made)
    assert {file.path for file in facts.files if file.state == "bound"} == {
        "checkpoints/step-00000006.json",
        "checkpoints/step-00000006.safetensors",
        "config.toml",
        "environment.json",
        "metrics.jsonl",
    }
    assert facts.problems == () and facts.contradictions == []
    assert facts.about == {"purpose": "to be tested", "unit": "one digit"}
    assert [record["step"] for record in facts.metrics] == [3, 6]
    assert facts.environment["torch"] == torch.__version__
    assert facts.own["engine"]["clip"] == 1.0


def test_an_attack_on_it_is_at_its_own_clip_noise_and_clipping(run):
    found = gv.attack(run, attack="map", victims=2, iterations=1).to_dict()
    clip = read_run(run).contents.releases[-1].clip[0]
    assert found["settings"]["clipping"] == "flat" and found["settings"]["training_batch"] == 128
    assert found["used"]["clip"] == pytest.approx([clip])
    assert found["used"]["noise_std_of_the_mean"] == pytest.approx([2.0 * clip / 128])


def test_an_audit_of_it_is_at_its_own_noise(gradveil, run):
    told = json.loads(gradveil("audit", run, "--steps", 40, "--examples", 6, "--json").out)
    assert told["strategy"] == "dyn-s-decay"
    # One step of a flat-clipped Gaussian with multiplier 2, at delta 1e-5.
    one_step = gv.account(sigma=2.0, sample_rate=1.0, steps=1, delta=1e-5).proved["add-remove"].epsilon
    assert told["epsilon_proved"] == pytest.approx(one_step, rel=0.01)


def test_functions_that_were_not_recorded_are_asked_for(gradveil, place, tmp_path):
    bare = train(tmp_path / "bare")
    assert not list(bare.glob("checkpoints/*"))
    done = gradveil("attack", bare)
    assert done.code == 2 and "has no checkpoint" in done.message
    half = train(tmp_path / "half", model_factory="own_digits:model")
    few = ("--attack", "map", "--victims", 2, "--iterations", 1)
    done = gradveil("attack", half, *few)
    assert done.code == 2 and "--data module:function" in done.message
    assert gradveil("attack", half, *few, "--data", "own_digits:data").code == 0
    assert gradveil("audit", half, "--steps", 30, "--examples", 6, "--data", "own_digits:data").code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "own_digits:other"), "leave --model out"),
        (("--data", "own_digits:other"), "leave --data out"),
        (("--sigma", 9), "the run: 2.0"),
        (("--strategy", "baseline"), "the run: 'dyn-s-decay'"),
    ],
)
def test_what_contradicts_the_ledger_is_refused(gradveil, run, options, said):
    done = gradveil("attack", run, "--victims", 2, *options)
    assert done.code == 2 and said in done.message


@pytest.mark.parametrize(("name", "said"), [("nothing", "return inputs and labels"), ("absent", "unknown function")])
def test_data_that_is_none_is_refused(gradveil, place, tmp_path, name, said):
    half = train(tmp_path / "half", steps=2, model_factory="own_digits:model")
    done = gradveil("attack", half, "--data", f"own_digits:{name}")
    assert done.code == 2 and said in done.message


def test_a_run_resumes_with_its_files(place, tmp_path):
    where = train(tmp_path / "run", steps=4)
    kinds = [kind for kind, _ in ledgers.read(where / "ledger.jsonl").notes]
    assert kinds.count("settings") == 1


def test_metrics_that_are_none_and_engines_without_a_directory(tmp_path):
    import own_digits

    engine = gv.PrivacyEngine(clip=1.0, sigma=2.0, steps=2)
    model = own_digits.model()
    x, y, *_ = own_digits.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.make_private(module=model, optimizer=optimizer, data_loader=TensorDataset(x, y), batch_size=64)
    with pytest.raises(ConfigError, match="no run_dir"):
        engine.log(accuracy=0.5)
    with pytest.raises(ConfigError, match="the metric accuracy"):
        engine.log(accuracy=[1])
    with pytest.raises(ConfigError, match="about"):
        gv.PrivacyEngine(clip=1.0, sigma=2.0, steps=2, about={"purpose": 3})
