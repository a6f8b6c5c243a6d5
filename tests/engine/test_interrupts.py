"""Broken off anywhere, a step is charged and perhaps unused; never used and not charged, and no noise comes twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import gradveil
from gradveil.accounting import ledger as ledgers
from gradveil.engine.guards import fingerprint
from gradveil.engine.step import PrivateStep
from loops import start

HOME = Path(gradveil.__file__).parent
FILES = {
    str(HOME / name)
    for name in (
        "engine/engine.py", "engine/backward.py", "engine/step.py", "engine/batches.py", "engine/guards.py",
        "engine/release_log.py", "mechanism/release.py", "mechanism/noise/streams.py", "mechanism/clip_bounds.py",
        "mechanism/records.py", "accounting/ledger.py", "accounting/_ledger_file.py", "accounting/_ledger_lines.py",
        "clipping/clipper.py", "clipping/backward_pass.py", "clipping/clip_factors.py",
    )
}  # fmt: skip


def check_refusal(error):
    """What an earlier interrupt has left is refused, and mended."""
    assert "interrupted" in str(error) or "examples" in str(error)


class Tracer:
    """Raises an error at the k-th line of the step's own files."""

    def __init__(self, k: int, error: type[BaseException]) -> None:
        self.left, self.error, self.fired = k, error, False

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and not self.fired:
            self.left -= 1
            if self.left == 0:
                self.fired = True
                raise self.error
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


class Published:
    """What was handed out: the step, the nonce of its record, and a hash of its gradients."""

    def __init__(self, monkeypatch, engine) -> None:
        self.found: list[tuple[int, str | None, str]] = []
        hand_out = PrivateStep._hand_out

        def noted(step, noised):
            release = engine.ledger.releases[-1]
            assert release.step == step.index - 1  # recorded and counted before it is handed out
            self.found.append((release.step, release.nonce, fingerprint(noised.values())))
            hand_out(step, noised)

        monkeypatch.setattr(PrivateStep, "_hand_out", noted)


@pytest.mark.parametrize(
    ("strategy", "seed", "error"),
    [
        ("baseline", None, KeyboardInterrupt),
        ("baseline", 7, MemoryError),
        ("quantile-clip", None, MemoryError),
        ("quantile-clip", 7, KeyboardInterrupt),
        ("dyn-s-l2max", None, KeyboardInterrupt),
    ],
)
def test_a_step_broken_off_at_any_line(strategy, seed, error, monkeypatch, tmp_path):
    engine, model, optimizer, loader = start(
        strategy=strategy, steps=100_000, seed=seed, spot_checks=0.0, batch_size=4, run_dir=tmp_path / "run",
        allow_unproved=True,
    )  # fmt: skip
    published = Published(monkeypatch, engine)

    def step(tracer=None):
        x, y = next(iter(loader))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if tracer is None:
            loss.backward()
        else:
            with tracer:
                loss.backward()
        optimizer.step()

    for _ in range(6):
        step()
    injected = 0
    for k in range(1, 3000):
        tracer = Tracer(k, error)
        before = len(published.found)
        try:
            step(tracer)
        except error:
            injected += 1
        except gradveil.PrivacyViolation as refused:
            check_refusal(refused)
        if not tracer.fired:
            break
        step()  # training goes on
        assert len(published.found) > before
    assert injected > 300, "the step has more lines than that"
    check_published(published.found, seeded=seed is not None)
    engine.close()
    contents = gradveil.accounting.ledger.read(tmp_path / "run" / "ledger.jsonl")
    recorded = [(r.step, r.nonce) for r in contents.releases]
    assert all((s, n) in recorded for s, n, _ in published.found)


def check_published(found, *, seeded):
    """No noise on two different gradients."""
    if seeded:
        of_step: dict[int, set[str]] = {}
        for step, _, digest in found:
            of_step.setdefault(step, set()).add(digest)
        assert all(len(digests) == 1 for digests in of_step.values())
    else:
        nonces = [nonce for _, nonce, _ in found]
        assert len(set(nonces)) == len(nonces)


KILLED = textwrap.dedent(
    """
    import os, random, signal, sys, time
    sys.path.insert(0, sys.argv[1])
    import torch
    from torch.nn import functional as F
    from loops import start

    torch.set_num_threads(1)
    start()  # loads what the children need
    draw = random.Random(4)
    for trial in range(int(sys.argv[3])):
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(out)
            engine, model, optimizer, loader = start(run_dir=f"{sys.argv[2]}/{trial}", steps=100_000, spot_checks=0.0)
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                os.write(into, b"w")  # the weights are sent away
        os.close(into)
        os.read(out, 1)
        time.sleep(draw.expovariate(1 / 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        sent = 1
        while more := os.read(out, 65536):
            sent += len(more)
        os.close(out)
        print(trial, sent, flush=True)
    """
)


def test_a_killed_process_has_spent_what_its_ledger_says(tmp_path):
    kills = 200
    here = Path(__file__).parent.parent
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, "-c", KILLED, str(here), str(tmp_path), str(kills)],
        capture_output=True, text=True, timeout=280, env=environment, check=True,
    )  # fmt: skip
    rows = [tuple(map(int, row.split())) for row in told.stdout.splitlines()]
    assert len(rows) == kills and max(sent for _, sent in rows) > 3
    for trial, sent in rows:
        contents = gradveil.accounting.ledger.read(tmp_path / str(trial) / "ledger.jsonl")
        assert len(contents.charged()) >= sent, (trial, sent)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a destructor
def test_sigint_during_backward_leaves_a_loop_that_goes_on(tmp_path):
    engine, model, optimizer, loader = start(steps=100_000, run_dir=tmp_path / "run", spot_checks=0.0)
    interrupted = 0

    def train():
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def press_ctrl_c(_, frame):
        """Only while train() runs, and not in pytest's own hooks."""
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        inner = codes[: codes.index(train.__code__)] if train.__code__ in codes else None
        if inner is not None and not any("_pytest" in code.co_filename for code in inner):
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGALRM, press_ctrl_c)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever other tests have made of it
    try:
        while engine.step < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.004, 0.004)  # Python drops one that hits a destructor
                train()
            except KeyboardInterrupt:
                interrupted += 1
            except gradveil.PrivacyViolation as refused:
                check_refusal(refused)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                torch.set_grad_enabled(True)  # torch.no_grad is not safe against an interrupt on its way out
            x, y = next(iter(loader))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, before)
    engine.commit()
    nonces = [release.nonce for release in ledgers.read(tmp_path / "run" / "ledger.jsonl").releases]
    assert interrupted > 10 and len(set(nonces)) == len(nonces) >= engine.step
    assert torch.isfinite(torch.cat([p.detach().flatten() for p in model.parameters()])).all()
