"""``gradveil attack`` on a user's own model and files, and ``gradveil inspect``: what they write, print and refuse."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradveil as package
from gradveil.training import data

SOURCE = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 10))

def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 17), nn.Sigmoid(), nn.Linear(17, 10))

def number():
    return 3
"""
MODEL = ("--model", "net_of_mine:make", "--input-shape", "1,8,8")


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 10))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory: a model's source, its weights, a gradient of a digit, and the digit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net_of_mine.py").write_text(SOURCE)
    digits, model = data.load("digits"), make()
    x, y = digits.x_train[:1], digits.y_train[:1]
    F.cross_entropy(model(x), y).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    save_file(found, tmp_path / "gradients.safetensors")
    save_file(found | {"1.bias": found["1.bias"] * float("nan")}, tmp_path / "nan.safetensors")
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    save_file({"x": x, "y": y}, tmp_path / "truth.safetensors")
    save_file({"x": digits.x_train[10:60], "y": digits.y_train[10:60]}, tmp_path / "public.safetensors")
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x04hello")
    return tmp_path


@pytest.fixture
def captured(here: Path) -> Path:
    digits, model = data.load("digits"), make()
    engine = package.PrivacyEngine(clip=1.0, sigma=2.0, steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(digits.x_train, digits.y_train), batch_size=3
    )
    engine.record_gradients("seen", steps=[0, 2])
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return here / "seen"


GRADIENTS = ("--gradients", "gradients.safetensors", "--weights", "weights.safetensors")


def test_without_the_truth_there_is_a_reconstruction_and_no_score(gradveil: Callable[..., Any], here: Path) -> None:
    outcome = gradveil("attack", *MODEL, *GRADIENTS, "--attack", "analytic", "--out", "out")
    assert outcome.code == 0
    assert "attack loss" in outcome.out and "PSNR" not in outcome.out and "--truth" in outcome.out
    result = json.loads((here / "out" / "result.json").read_text())
    (attacked,) = result["attacked"]
    assert result["scored"] is False and attacked["result"] is None
    assert attacked["strategy"] == "non-private" and attacked["clip"] is None
    truth = load_file(here / "truth.safetensors")
    assert attacked["victims"][0]["labels"] == truth["y"].tolist()
    assert torch.allclose(load_file(here / "out" / "reconstruction.safetensors")["x"][0], truth["x"], atol=1e-3)
    assert (here / "out" / "frames.png").read_bytes()[:4] == b"\x89PNG"
    assert stat.S_IMODE((here / "out").stat().st_mode) == 0o700


def test_with_the_truth_there_are_the_usual_scores(gradveil: Callable[..., Any], here: Path) -> None:
    extra = ("--truth", "truth.safetensors", "--public", "public.safetensors", "--attack", "analytic", "--out", "out")
    outcome = gradveil("attack", *MODEL, *GRADIENTS, *extra)
    assert outcome.code == 0 and "PSNR" in outcome.out
    (attacked,) = json.loads((here / "out" / "result.json").read_text())["attacked"]
    assert attacked["result"]["psnr_median"] > 80 and attacked["result"]["success_rate"] == 1.0


def test_the_public_facts_are_options(gradveil: Callable[..., Any], here: Path) -> None:
    facts = ("--clip", 2, "--sigma", 3, "--batch-size", 6, "--observe", "per-example-noised", "--clipping", "flat")
    few = ("--attack", "map", "--iterations", 2, "--out", "out", "--json")
    outcome = gradveil("attack", *MODEL, *GRADIENTS, *facts, *few)
    (attacked,) = json.loads(outcome.out)["attacked"]
    assert attacked["clip"] == [2.0] and attacked["noise_std"] == [1.0] and attacked["examples_behind_each"] == 1
    batch = json.loads(gradveil("attack", *MODEL, *GRADIENTS, "--batch", 2, *few).out)["attacked"][0]
    assert len(batch["victims"][0]["labels"]) == 2 and batch["noise_std"] is None


def test_candidates_are_what_is_public(gradveil: Callable[..., Any], here: Path) -> None:
    arguments = ("attack", *MODEL, *GRADIENTS, "--attack", "prior", "--out", "out")
    assert gradveil(*arguments, "--public", "public.safetensors").code == 0
    refused = gradveil(*arguments)
    assert refused.code == 2 and "candidates" in refused.message


def test_what_an_engine_recorded_is_attacked_step_by_step(gradveil: Callable[..., Any], captured: Path) -> None:
    few = ("--captured", captured, "--attack", "map", "--iterations", 2, "--out", "out", "--json")
    found = json.loads(gradveil("attack", *MODEL, *few).out)["attacked"]
    assert [a["steps"] for a in found] == [[0], [2]]
    assert found[0]["strategy"] == "baseline" and found[0]["examples_behind_each"] == 3
    assert found[0]["noise_std"] == [pytest.approx(2.0 / 3)] * 2
    one = json.loads(gradveil("attack", *MODEL, *few, "--step", 2, "--batch", 1).out)["attacked"]
    assert [a["steps"] for a in one] == [[2]] and one[0]["examples_behind_each"] == 1
    together = json.loads(gradveil("attack", *MODEL, *few, "--joint").out)["attacked"]
    assert [a["steps"] for a in together] == [[0, 2]]
    several = gradveil("attack", *MODEL, *few, "--truth", captured.parent / "truth.safetensors")
    assert several.code == 2 and "--step" in several.message
    for facts in (("--clip", 1), ("--weights", "weights.safetensors"), ("--observe", "batch")):
        refused = gradveil("attack", *MODEL, *few, *facts)
        assert refused.code == 2 and f"{facts[0]} is part of the recording" in refused.message
    absent = gradveil("attack", *MODEL, *few, "--step", 1)
    assert absent.code == 2 and "[0, 2]" in absent.message


WRONG: dict[str, tuple[list[str], str]] = {
    "no model": (["--gradients", "gradients.safetensors"], "--model package:function"),
    "no shape": (["--model", "net_of_mine:make", "--gradients", "gradients.safetensors"], "--input-shape"),
    "a shape that is none": (["--model", "net_of_mine:make", "--input-shape", "1x8"], "1,28,28"),
    "nothing to attack": ([*MODEL], "either --gradients or --captured"),
    "both": ([*MODEL, *GRADIENTS, "--captured", "seen"], "either --gradients or --captured"),
    "a data set": ([*MODEL, *GRADIENTS, "--dataset", "digits"], "--dataset applies to a data set"),
    "a run": (["run", *MODEL, *GRADIENTS], "[RUN] applies to a data set or run"),
    "another model": (
        ["--model", "net_of_mine:wide", "--input-shape", "1,8,8", "--gradients", "gradients.safetensors"],
        "model and gradients do not belong together",
    ),
    "weights of another model": (
        ["--model", "net_of_mine:wide", "--input-shape", "1,8,8", *GRADIENTS],
        "weights do not belong to this model",
    ),
    "NaN": ([*MODEL, "--gradients", "nan.safetensors"], "not finite"),
    "no such function": (
        ["--model", "net_of_mine:mkae", "--input-shape", "1,8,8", "--gradients", "gradients.safetensors"],
        "Did you mean 'make'",
    ),
    "no such module": (
        ["--model", "nowhere:make", "--input-shape", "1,8,8", "--gradients", "gradients.safetensors"],
        "cannot be found",
    ),
    "not a model": (
        ["--model", "net_of_mine:number", "--input-shape", "1,8,8", "--gradients", "gradients.safetensors"],
        "not a torch.nn.Module",
    ),
    "a missing file": ([*MODEL, "--gradients", "nowhere.safetensors"], "does not exist"),
    "a missing record": ([*MODEL, "--captured", "nowhere"], "does not exist"),
    "not safetensors": ([*MODEL, "--gradients", "pickle.pt"], "not a safetensors file"),
    "an unknown attack": ([*MODEL, *GRADIENTS, "--attack", "telepathy"], "telepathy"),
    "noise without a scale": ([*MODEL, *GRADIENTS, "--sigma", "1"], "sensitivity"),
    "another shape": (
        ["--model", "net_of_mine:make", "--input-shape", "1,9,9", *GRADIENTS],
        "does not take inputs of shape",
    ),
    "a truth of another shape": ([*MODEL, *GRADIENTS, "--truth", "public.safetensors"], "(1, 1, 1, 8, 8)"),
    "a step of no record": ([*MODEL, *GRADIENTS, "--step", "1"], "--step applies to --captured"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_does_not_fit_exits_2_and_writes_nothing(gradveil: Callable[..., Any], here: Path, name: str) -> None:
    arguments, words = WRONG[name]
    outcome = gradveil("attack", *arguments, "--out", "out")
    assert outcome.code == 2
    assert words in outcome.message
    assert "Traceback" not in outcome.err
    assert not (here / "out").exists()


INSPECT = ("inspect", "net_of_mine:make", "--input-shape", "1,8,8", "--seconds", 1)


def test_inspect_says_what_leaks_in_words(gradveil: Callable[..., Any], here: Path) -> None:
    outcome = gradveil(*INSPECT, "--clip", 1, "--sigma", 4, "--batch-size", 8)
    assert outcome.code == 0
    for words in ("rank-one", "input", "undefended", "analytic", "It can be trained privately", "divided by that of"):
        assert words in outcome.out
    assert list(here.glob("attacks")) == []


def test_inspect_json(gradveil: Callable[..., Any], here: Path) -> None:
    found = json.loads(gradveil(*INSPECT, "--json").out)
    assert found["can_be_trained"] is True and found["anatomy"]["groups"] == 2
    assert found["tried"][0] == found["tried"][0] | {"attack": "analytic", "success": 1.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["net_of_mine:mkae", "--input-shape", "1,8,8"], "Did you mean 'make'"),
        (["net_of_mine:number", "--input-shape", "1,8,8"], "not a torch.nn.Module"),
        (["net_of_mine:make", "--input-shape", "3,8,8"], "does not take inputs"),
        (["net_of_mine:make", "--input-shape", "0"], "1,28,28"),
        (["net_of_mine:make"], "--input-shape"),
        (["net_of_mine:make", "--input-shape", "1,8,8", "--sigma", "1"], "Give clip too"),
    ],
)
def test_inspect_refuses_what_it_cannot_look_at(
    gradveil: Callable[..., Any], here: Path, arguments: list[str], words: str
) -> None:
    outcome = gradveil("inspect", *arguments)
    assert outcome.code == 2
    assert words in outcome.message
    assert "Traceback" not in outcome.err


def test_weights_before_and_after_local_steps(gradveil: Callable[..., Any], here: Path) -> None:
    digits, model = data.load("digits"), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(digits.x_train[:1]), digits.y_train[:1]).backward()
        optimizer.step()
    save_file(model.state_dict(), here / "after.safetensors")
    update = ("--before", "weights.safetensors", "--after", "after.safetensors")
    known = ("--local-steps", "1,3", "--local-lr", "0.1", "--iterations", "12", "--truth", "truth.safetensors")
    outcome = gradveil("attack", *MODEL, *update, *known, "--out", "out")
    assert outcome.code == 0, outcome.message
    (attacked,) = json.loads((here / "out" / "result.json").read_text())["attacked"]
    assert attacked["local"] == {"steps": 3, "lr": 0.1, "momentum": 0.0, "batch": None}
    assert attacked["result"]["psnr_median"] > 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--after", "weights.safetensors"], "needs the weights --before"),
        (["--before", "weights.safetensors", *GRADIENTS], "--before is of local steps"),
        (["--before", "weights.safetensors", "--after", "weights.safetensors"], "--after needs --local-steps"),
        (["--before", "w", "--after", "w", "--local-steps", "x"], "separated by commas"),
        (
            [
                "--before",
                "weights.safetensors",
                "--after",
                "gradients.safetensors",
                "--local-steps",
                "0",
                "--local-lr",
                "1",
            ],
            "give at least 1",
        ),
    ],
)
def test_local_steps_that_are_not_told_are_refused(
    gradveil: Callable[..., Any], here: Path, arguments: list[str], words: str
) -> None:
    outcome = gradveil("attack", *MODEL, *arguments)
    assert outcome.code == 2 and words in outcome.message and "Traceback" not in outcome.err


def test_inspect_names_a_layer_that_a_server_has_prepared(gradveil: Callable[..., Any], here: Path) -> None:
    model = make()
    with torch.no_grad():
        model[1].weight.copy_(model[1].weight[:1].expand(16, 64))
        model[1].bias.copy_(torch.linspace(-1, 1, 16))
    save_file(model.state_dict(), here / "sent.safetensors")
    outcome = gradveil(*INSPECT, "--weights", "sent.safetensors")
    assert outcome.code == 0 and "This model was made to leak: layer '1' (imprint)" in outcome.out
    assert "made to leak" not in gradveil(*INSPECT, "--weights", "weights.safetensors").out


TABLE = ("--model", "rows_of_mine:rows", "--table", "rows.csv", "--gradients", "rows.safetensors")


@pytest.fixture
def rows(here: Path) -> Path:
    from gradveil.attacks.tables import read_csv

    generator = torch.Generator().manual_seed(0)
    cells = torch.randint(1000, (200, 4), generator=generator).tolist()
    lines = [f"{a},{'xyz'[b % 3]},{'uv'[c % 2]},{'no' if d % 2 else 'yes'}" for a, b, c, d in cells]
    (here / "rows.csv").write_text("\n".join(["size,kind,side,sold", *lines]) + "\n")
    found = read_csv(here / "rows.csv", "sold")
    layers = f"nn.Linear({found.features}, 16), nn.Sigmoid(), nn.Linear(16, 2)"
    (here / "rows_of_mine.py").write_text(f"from torch import nn\ndef rows():\n    return nn.Sequential({layers})\n")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(found.features, 16), nn.Sigmoid(), nn.Linear(16, 2))
    F.cross_entropy(model(found.x[:1]), found.y[:1]).backward()
    save_file({n: p.grad for n, p in model.named_parameters()}, here / "rows.safetensors")
    save_file(model.state_dict(), here / "rows_weights.safetensors")
    save_file({"x": found.x[:1], "y": found.y[:1]}, here / "rows_truth.safetensors")
    return here


def test_a_table_of_ones_own_comes_back_in_words(gradveil: Callable[..., Any], rows: Path) -> None:
    known = ("--label", "sold", "--weights", "rows_weights.safetensors", "--truth", "rows_truth.safetensors")
    outcome = gradveil("attack", *TABLE, *known, "--iterations", "150", "--out", "out")
    assert outcome.code == 0, outcome.message
    assert "whole rows" in outcome.out and "100.0%" in outcome.out
    assert (rows / "rows.csv").read_text().splitlines()[1].split(",")[1] in outcome.out


@pytest.mark.parametrize(
    ("extra", "words"),
    [([], "--table and --label go together"), (["--label", "price"], "no column 'price'")],
)
def test_a_table_that_is_not_told_is_refused(
    gradveil: Callable[..., Any], rows: Path, extra: list[str], words: str
) -> None:
    outcome = gradveil("attack", *TABLE, *extra)
    assert outcome.code == 2 and words in outcome.message
