"""A whole trial, and the command around it."""

import json

import pytest

from gradveil.attacks.trial import AttackConfig, run
from gradveil.cli import cli
from gradveil.errors import ConfigError, LedgerError, UnknownNameError
from gradveil.training import data


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def test_a_plain_gradient_gives_digits_away_and_guessing_does_not(digits):
    outcome = run(AttackConfig(victims=5, iterations=40), digits)
    found = outcome.to_dict()
    assert found["result"]["success_rate"] >= 0.8
    assert all(guess["success_rate"] == 0.0 for guess in found["controls"].values())
    assert found["success_bound"] is None
    json.dumps(found)


def test_the_bound_is_of_what_is_seen(digits):
    """One example's gradient with the noise of a batch of 600 is hardly protected; the mean of the batch is."""
    settings = {"strategy": "baseline", "victims": 2, "iterations": 1, "attack": "map", "sigma": 6.0}
    alone = run(AttackConfig(view="per-example-noised", training_batch=600, **settings), digits).bound
    batch = run(AttackConfig(view="batch", batch=4, training_batch=600, **settings), digits)
    assert alone == pytest.approx(1.0)
    assert batch.bound is not None and batch.kappa < batch.bound < 0.2
    assert run(AttackConfig(view="per-example", **settings), digits).bound is None
    assert run(AttackConfig(view="batch", **(settings | {"strategy": "dyn-s-l2max"})), digits).bound is None


def test_the_attacker_with_a_list_is_held_to_the_best_guess_from_it(digits):
    """By the same measure as its success: a candidate that is near enough to others succeeds for them too."""
    outcome = run(AttackConfig(attack="prior", strategy="baseline", view="per-example", victims=5), digits)
    assert 0.001 < outcome.kappa < 0.05
    assert outcome.to_dict()["result"]["retrieved_first"] == 1.0  # no noise


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attack": "telepathy"}, "telepathy"),
        ({"view": "everything"}, "everything"),
        ({"victims": 0}, "victims"),
        ({"step": 1000}, "step 1000"),
        ({"steps_seen": 0}, "steps seen"),
        ({"step": 998, "steps_seen": 3}, "3 steps from step 998"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, words):
    with pytest.raises((ConfigError, UnknownNameError), match=words):
        AttackConfig(**settings)


def test_too_many_victims_are_refused(digits):
    with pytest.raises(ConfigError, match="Take fewer"):
        run(AttackConfig(victims=1300), digits)


def test_the_command(tmp_path, capsys):
    out = tmp_path / "attack"
    arguments = [
        "attack",
        "--compare",
        "non-private,baseline",
        "--victims",
        "3",
        "--iterations",
        "5",
        "--out",
        str(out),
    ]
    cli(arguments, standalone_mode=False)
    printed = capsys.readouterr().out
    assert "baseline" in printed and "(guess) mean training image" in printed
    results = json.loads((out / "result.json").read_text())
    assert [t["settings"]["strategy"] for t in results["trials"]] == ["non-private", "baseline"]
    assert (out / "frames.png").read_bytes()[:4] == b"\x89PNG"
    cli([*arguments[:1], "--victims", "2", "--iterations", "2", "--out", str(out), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["dataset"] == "digits"


def test_a_run_is_attacked_as_it_releases(tmp_path, capsys):
    where, out = tmp_path / "run", str(tmp_path / "attack")
    train = [
        "train",
        "--strategy",
        "dyn-s-decay",
        "--steps",
        "4",
        "--clip",
        "2",
        "--seed",
        "1",
        "--run-dir",
        str(where),
    ]
    cli(train, standalone_mode=False)
    few = ["--attack", "map", "--victims", "2", "--iterations", "3", "--out", out, "--json"]
    capsys.readouterr()
    cli(["attack", str(where), *few], standalone_mode=False)
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert trial["settings"]["strategy"] == "dyn-s-decay" and trial["settings"]["step"] == 3
    with pytest.raises(ConfigError, match="ledger"):  # a run is attacked as it released, and as nothing else
        cli(["attack", str(where), "--compare", "non-private,baseline", *few], standalone_mode=False)
    for checkpoint in (where / "checkpoints").iterdir():
        checkpoint.unlink()
    with pytest.raises(LedgerError, match="missing"):
        cli(["attack", str(where), *few], standalone_mode=False)
