"""The benchmarks run, and their results have the shape that figures and documents are made from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def run(script, *args):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_row(row):
    assert row["n"] >= 5
    assert 0 < row["quartiles_ms"][0] <= row["median_ms"] <= row["quartiles_ms"][1]


def test_speed_and_its_figure(tmp_path):
    out = tmp_path / "speed_cpu.json"
    modes = ("sgd", "gradveil per-layer")
    run("speed.py", "--workloads", "W4", "--modes", *modes, "--seconds", 0.1, "--threads", 1, "--out", out)
    results = json.loads(out.read_text())
    assert {"what", "memory", "machine", "clipping", "versions", "command", "workloads"} <= results.keys()
    assert "/" not in results["command"]
    (workload,) = results["workloads"].values()
    assert workload["batch"] == 100
    assert workload["failed"] == {}
    assert list(workload["rows"]) == list(modes)
    for row in workload["rows"].values():
        check_row(row)
        assert row["ratio"] > 0
        assert row["peak_bytes"] is None if results["memory"].startswith("not measured") else row["peak_bytes"] > 0
    assert workload["rows"]["sgd"]["ratio"] == 1.0
    assert "speed_cpu.svg" in run("figures.py", "--results", tmp_path, "--out", tmp_path)
    assert "<svg" in (tmp_path / "speed_cpu.svg").read_text()


def test_scaling_and_its_figure(tmp_path):
    out = tmp_path / "scaling_cpu.json"
    run("scaling.py", "--series", "batch, MLP", "--largest", 4, "--seconds", 0.05, "--threads", 1, "--out", out)
    (series,) = json.loads(out.read_text())["series"].values()
    assert [point["at"] for point in series["points"]] == [1, 4]
    for point in series["points"]:
        assert list(point["modes"]) == list(series["slopes"]) == ["sgd", "gradveil per-layer", "gradveil flat"]
        for row in point["modes"].values():
            check_row(row)
    assert "scaling_cpu.svg" in run("figures.py", "--results", tmp_path, "--out", tmp_path)
    assert "<svg" in (tmp_path / "scaling_cpu.svg").read_text()


def test_features_are_tried_and_every_rate_is_written_down(tmp_path):
    out = tmp_path / "tried.jsonl"
    run("try_features.py", "--dataset", "digits", "--most", 2, "--out", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["features"] for line in lines] == ["scattering", "balanced 0.25"]
    for line in lines:
        assert len(line["accuracy"]) == 3 * 6
        assert line["accuracy"][line["best"]] == max(line["accuracy"].values()) > 0.5
