"""``gradveil init``: the script it writes runs as it is, keeps to its epsilon, and leaves a full run."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import gradveil as gv
from gradveil.reports.facts import read_run

SOURCE = Path(gv.__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.random((400, 3))
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "y"])
        writer.writerows([*row, int(row[0] > row[1])] for row in x.tolist())
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, digits = tmp_path_factory.mktemp("pictures"), load_digits()
    for number, (image, label) in enumerate(zip(digits.images[:300], digits.target[:300], strict=True)):
        if label < 3:
            (folder / str(label)).mkdir(exist_ok=True)
            Image.fromarray((image * 15).astype(np.uint8)).save(folder / str(label) / f"{number}.png")
    return folder


def run_script(folder):
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "private_training.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_a_table_to_a_full_run_at_its_epsilon(gradveil, table, tmp_path, monkeypatch):
    where = tmp_path / "mine"
    assert gradveil("init", where, "--csv", table, "--label", "y", "--epsilon", "4").code == 0
    printed = run_script(where)
    facts = read_run(where / "run")
    assert 3.8 < facts.proved <= 4 and "ledger head" in printed
    assert facts.accuracy > 0.7 and len(facts.metrics) == 20
    monkeypatch.chdir(where)
    done = gradveil("check", "run", "--max-epsilon", 4, "--min-accuracy", 0.7, "--require-bound")
    assert done.code == 0, done.out


def test_from_a_folder_of_images(gradveil, pictures, tmp_path, monkeypatch):
    where = tmp_path / "mine"
    assert gradveil("init", where, "--images", pictures, "--size", "8").code == 0
    run_script(where)
    assert read_run(where / "run").proved <= 3
    monkeypatch.chdir(where)
    done = gradveil("audit", "run", "--steps", 30, "--examples", 4)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "either --csv"),
        (("--csv", "rows.csv"), "--label"),
        (("--csv", "rows.csv", "--label", "z"), "no column 'z'"),
        (("--csv", "nowhere.csv", "--label", "y"), "cannot be read"),
        (("--images", "nowhere"), "not a folder"),
        (("--csv", "rows.csv", "--label", "y", "--epsilon", "0"), "positive epsilon"),
    ],
)
def test_what_cannot_be_begun(gradveil, table, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(table.parent)
    done = gradveil("init", tmp_path / "mine", *options)
    assert done.code == 2 and said in done.message
    assert not (tmp_path / "mine").exists()


def test_a_script_is_not_written_over(gradveil, table, tmp_path):
    where = tmp_path / "mine"
    for code in (0, 2):
        assert gradveil("init", where, "--csv", table, "--label", "y").code == code
