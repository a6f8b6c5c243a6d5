"""``torchrun -m gradveil train``: the run of one process, and what is left when one of the processes is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from gradveil.accounting import ledger
from gradveil.training.run_directory import RunDirectory

SETTINGS = ("--dataset", "digits", "--steps", "40", "--batch-size", "64", "--checkpoint-every", "5", "--lr", "0.2")
WITHIN = 60  # seconds in which a job that has lost a process must have ended


def start(count: int, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m"] if count > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "gradveil", "train", *arguments],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str], within: float = 200) -> tuple[int, str, str]:
    try:
        out, err = job.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    return job.returncode, out, err


def weights(run: Path) -> torch.Tensor:
    opened = RunDirectory.open(run)
    checkpoint = opened.newest_checkpoint()
    assert checkpoint is not None
    tensors = safetensors.torch.load(opened.read_tensors(checkpoint))
    return torch.cat([t.flatten() for n, t in sorted(tensors.items()) if n.startswith("model.")])


def test_a_run_of_two_processes_is_that_of_one(tmp_path):
    for count in (1, 2):
        code, out, err = finish(start(count, *SETTINGS, "--seed", "3", "--run-dir", f"run{count}", cwd=tmp_path))
        assert code == 0, err
        assert out.count("run directory") == 1  # one process speaks
    assert float((weights(tmp_path / "run1") - weights(tmp_path / "run2")).abs().max()) < 1e-4
    one, two = (ledger.read(tmp_path / f"run{count}" / "ledger.jsonl") for count in (1, 2))
    assert [r.noise_std for r in one.releases] == [r.noise_std for r in two.releases]
    assert two.ended == "finished"


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun has started."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
@pytest.mark.parametrize("moment", range(int(os.environ.get("GRADVEIL_KILLS", "2"))))
def test_a_killed_process_ends_the_job_and_nothing_is_uncounted(moment, tmp_path):
    chance = random.Random(moment)
    run = tmp_path / "run"
    long = (*SETTINGS, "--steps", "800", "--checkpoint-every", "50", "--evaluate-every", "50")
    job = start(2, *long, "--run-dir", str(run), cwd=tmp_path)
    book = run / "ledger.jsonl"
    wanted = chance.randrange(1, 30_000)  # bytes of ledger to wait for: somewhere in the first steps
    deadline = time.monotonic() + 120
    while not (book.exists() and book.stat().st_size >= wanted) and time.monotonic() < deadline:
        assert job.poll() is None
        time.sleep(0.01)
    time.sleep(chance.random() * 0.2)
    found = ranks_of(job)
    assert len(found) == 2
    os.kill(found[chance.randrange(2)], signal.SIGKILL)
    killed = time.monotonic()
    code, _, _ = finish(job, within=WITHIN)
    assert code != 0
    assert time.monotonic() - killed < WITHIN
    contents = ledger.read(book)
    checkpoint = RunDirectory.open(run).newest_checkpoint()
    if checkpoint is not None:
        assert {r.step for r in contents.releases} >= set(range(checkpoint.step))  # all that it holds was counted
    before = len(contents.releases)
    code, _, err = finish(start(2, "--resume", str(run), "--new-noise", cwd=tmp_path), within=280)
    assert code == 0, err
    after = ledger.read(book)
    assert after.ended == "finished"
    assert len(after.releases) >= before
    assert {r.step for r in after.releases} == set(range(800))


ALONE = """
import gradveil
try:
    gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=3)
    print("taken")
except gradveil.errors.ConfigError as error:
    print(error)
"""


def test_processes_that_were_not_joined_are_refused(tmp_path):
    """Each would train on all the data and release a model of its own: as many times the epsilon as processes."""
    (tmp_path / "script.py").write_text(ALONE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(launcher, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torchrun has started 2 processes") == 2
    assert "init_process_group()" in done.stdout
    assert "taken" not in done.stdout
