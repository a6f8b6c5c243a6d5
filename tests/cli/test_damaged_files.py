"""Files of a run that were cut, overwritten or made up: a failed gate and a sentence, never a pass or a traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from gradveil.accounting import files as _files
from gradveil.errors import DataError, RunDirectoryError
from gradveil.reports.facts import read_run
from gradveil.training.run_directory import RunDirectory
from small_runs import interrupted, trained, with_attack

GATES = ("--max-epsilon", "1000", "--max-attack-psnr", "40", "--min-accuracy", "0")
AUDIT = {"unit": "one step", "epsilon_lower_bound": 9.5, "epsilon_proved": 1.0, "delta": 1e-5}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = with_attack(trained(tmp_path_factory.mktemp("runs") / "run", seed=7), psnr=12.0)
    (run / "audit.json").write_text(json.dumps(AUDIT | {"epsilon_lower_bound": 0.1}))
    return run


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def test_a_whole_run_passes(gradveil, run):
    assert gradveil("check", run, *GATES).code == 0


@pytest.mark.parametrize("file", ["audit.json", "attacks/map-made-up/result.json", "metrics.jsonl", "environment.json"])
@pytest.mark.parametrize("how", ["five bytes less", "empty", "not UTF-8", "another shape", "deep", "a directory"])
def test_a_gate_that_failed_does_not_pass_because_a_file_was_damaged(gradveil, run, file, how):
    (run / "audit.json").write_text(json.dumps(AUDIT))
    with_attack(run, psnr=60.0, attack="cpl")
    if file.startswith("attacks"):
        file = "attacks/cpl-made-up/result.json"
    assert gradveil("check", run, *GATES).code == 1
    path = run / file
    whole = path.read_bytes()
    if how == "a directory":
        path.unlink()
        path.mkdir()
    else:
        damage = {"five bytes less": whole[:-5], "empty": b"", "not UTF-8": whole.replace(b'"', b"\xff", 1)}
        damage |= {"another shape": b"[]\n", "deep": b"[" * 100_000}
        path.write_bytes(damage[how])
    done = gradveil("check", run, *GATES)
    if file == "metrics.jsonl" and how == "empty":
        assert "no test accuracy was recorded" in done.out  # nothing is there that could not be read
    else:
        assert any(path.name in line for line in done.out.splitlines() if line.startswith("FAIL")), done.out
    assert done.code in (1, 4)  # 4 where the ledger names the file with another hash
    for command in ("compare", "report"):
        assert gradveil(command, run).code == 0


@pytest.mark.parametrize(
    "audit", ["[]", "3", "null", '{"epsilon_lower_bound": "much"}', '{"epsilon_proved": [1]}', "{}"]
)
def test_an_audit_of_another_shape_is_no_audit(gradveil, run, audit):
    (run / "audit.json").write_text(audit)
    assert gradveil("check", run, *GATES).code == 1
    done = gradveil("statement", run)
    assert done.code == (0 if audit == "{}" else 2)
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "change",
    [
        {"trials": {}},
        {"trials": [3]},
        {"trials": [{"settings": [], "result": {}}]},
        {"trials": [{"settings": {"attack": "map"}, "result": {}}]},
        {"trials": [{"settings": {"attack": "map", "strategy": "x"}, "result": {"psnr_median": "12"}}]},
        {"trials": [{"settings": {"attack": "map", "strategy": "x"}, "result": {"psnr_median": float("nan")}}]},
        {"dataset": None},
    ],
)
def test_an_attack_of_another_shape_fails_with_its_file(gradveil, run, change):
    path = run / "attacks" / "map-made-up" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    done = gradveil("check", run, *GATES)
    assert done.code == 1 and "result.json cannot be read" in done.out
    assert gradveil("report", run).code == 0


def test_an_attack_without_a_result_fails(gradveil, run):
    (run / "attacks" / "half").mkdir()
    done = gradveil("check", run, *GATES)
    assert done.code == 1 and "attacks/half has no result.json" in done.out


def test_metrics_that_a_crash_cut_off_and_a_later_record_follows_are_whole(run):
    path, found = run / "metrics.jsonl", []
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole[0] + whole[1][:20] + b"\n" + b"".join(whole[1:]))
    records = RunDirectory(run).read_metrics(found)
    assert [r["step"] for r in records] == [json.loads(line)["step"] for line in whole] and not found
    path.write_bytes(b"".join(whole) + whole[1][:20])
    assert RunDirectory(run).read_metrics(found) == records and "cut off" in found[0]
    assert RunDirectory(run).read_metrics(again := [], running=True) == records and not again


def test_very_many_metrics_are_thinned_and_the_last_is_kept(run, monkeypatch):
    monkeypatch.setattr("gradveil.training.run_directory._MOST_LOOKS", 8)
    (run / "metrics.jsonl").write_text("".join(f'{{"step":{i},"accuracy":0.5}}\n' for i in range(1, 101)))
    steps = [record["step"] for record in RunDirectory(run).read_metrics()]
    assert len(steps) <= 9 and steps == sorted(steps) and steps[-1] == 100


# ---- what a run is resumed from


@pytest.mark.parametrize(
    "secret", ["", "{", "[]", "3", '{"seed": "x"}', '{"seed": true}', "{}", '{"seed":' + "9" * 5000]
)
def test_a_damaged_secret_is_said_and_new_noise_goes_on_without_it(gradveil, run, secret):
    (run / "secret.json").write_text(secret)
    done = gradveil("train", "--resume", run)
    assert done.code == 2 and "secret.json" in done.message and "--new-noise" in done.message
    assert gradveil("train", "--resume", run, "--new-noise").code == 0


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_truncated_checkpoint_is_said(gradveil, run, suffix, cut):
    interrupted(run, after=6)  # without its end
    path = RunDirectory(run).list_checkpoints()[-1].with_suffix(f".{suffix}")
    path.write_bytes(path.read_bytes()[:cut])
    done = gradveil("train", "--resume", run)
    assert done.code == 2 and "is damaged" in done.message and path.name in done.message


def test_a_checkpoint_of_another_size_is_not_read(run, monkeypatch):
    directory = RunDirectory(run)
    checkpoint = directory.newest_checkpoint()
    os.truncate(checkpoint.tensors, 1 << 40)  # a sparse file: reading it would take all memory
    with pytest.raises(RunDirectoryError, match="is damaged"):
        directory.read_tensors(checkpoint)


@pytest.mark.parametrize(
    "text",
    [
        "steps = " + "9" * 5000,
        "steps = 0x" + "f" * 90_000,
        "x = " + "[" * 50_000,
        "\xff",
        "a." * 50_000,
        "= 1",
        "x=1" * 90_000,
    ],
    ids=range(7),
)
def test_a_configuration_of_nonsense_is_one_sentence(gradveil, tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="latin-1")
    done = gradveil("train", "--config", path)
    assert done.code == 2 and "c.toml" in done.message and len(done.message) < 1000


# ---- the reader itself


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="cannot be read"):
            _files.read_json(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    for read in (_files.read_json, _files.read_toml, _files.read_arrays, lambda p: list(_files.read_lines(p))):
        with pytest.raises(DataError, match="bytes"):
            read(path)


def test_arrays_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    images = np.random.default_rng(0).random((2, 1, 8, 8))
    np.savez_compressed(path, **{"0/found": images, "1/found": images[:1]})
    assert np.array_equal(_files.read_arrays(path, beginning="0/")["0/found"], images)
    whole = path.read_bytes()
    for data in (whole[:-30], whole[:50], b"", b"PK\x03\x04"):
        path.write_bytes(data)
        with pytest.raises(DataError):
            _files.read_arrays(path)
    path.write_bytes(b"")
    np.savez_compressed(path, big=np.zeros(1 << 28, dtype=np.uint8))
    with pytest.raises(DataError, match="larger than expected"):
        _files.read_arrays(path)


def test_pictures_that_are_no_images_are_said_on_the_page(gradveil, run):
    np.savez(
        run / "attacks" / "map-made-up" / "pictures.npz", **{"0/found": np.zeros(3), "0/original": np.zeros((1, 1))}
    )
    assert gradveil("report", run, "--examples", "1").code == 0
    assert "Its images cannot be read" in (run / "report.html").read_text()
    assert not read_run(run).problems
