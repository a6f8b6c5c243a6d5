"""``gradveil reproduce`` as a user types it."""

from __future__ import annotations

import json

import pytest

from gradveil import experiments


def test_the_list(gradveil):
    done = gradveil("reproduce", "--list")
    assert done.code == 0
    for name in experiments.NAMES:
        assert name in done.out


def test_a_quick_run_is_written_shown_and_not_repeated(gradveil, tmp_path):
    out = tmp_path / "out"
    done = gradveil("reproduce", "attack-frames", "--quick", "--out", out)
    assert done.code == 0, done.err
    assert "attack-frames 1/1" in done.err
    assert "within the iterations" in done.out
    assert (out / "attack-frames.png").exists()
    assert (out / "attack-frames.md").read_text().startswith("# Reconstructions")
    again = gradveil("reproduce", "attack-frames", "--quick", "--out", out, "--json")
    assert "1/1" not in again.err
    found = json.loads(again.out)["attack-frames"]
    assert found["cells"] == 1
    assert found["machines"]
    assert "/" not in json.dumps(found["plan"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no experiment is named"),
        (("sensitivty",), "sensitivity"),
        (("sensitivity", "--seeds", "0"), "at least 1"),
        (("sensitivity", "--sets", "mnits"), "mnist"),
        (("sensitivity", "--full", "--data-dir", "nowhere"), "mnist"),
        (("accounting", "--device", "tpu"), "tpu"),
    ],
)
def test_bad_input(gradveil, tmp_path, args, said):
    done = gradveil("reproduce", *args, "--out", tmp_path / "out", "--jobs", "1")
    assert done.code == 2, done.err
    assert said in done.err
    assert "Traceback" not in done.err
