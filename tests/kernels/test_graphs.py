"""Nothing of an earlier run is freed while a graph is captured."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import gradveil
from gradveil.clipping.backends import graphs

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Cycle:
    """What only the garbage collector frees."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def captured(monkeypatch):
    """Stands in for a capture: notes what of an older object is left inside, and whether the collector may run."""
    seen = {}
    old = weakref.ref(Cycle())

    @contextmanager
    def graph(which, pool=None):
        seen.update(collects=gc.isenabled(), old=old() is not None, pool=pool)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return seen


def test_what_is_old_is_freed_before_and_nothing_within(captured):
    gc.disable()  # or it might be gone by chance
    try:
        with graphs.capturing(None, pool="a pool"):
            pass
        assert captured == {"collects": False, "old": False, "pool": "a pool"}
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_the_collector_goes_on_after_a_capture_that_failed(captured):
    with pytest.raises(RuntimeError, match="on purpose"), graphs.capturing(None):
        raise RuntimeError("on purpose")
    assert gc.isenabled()


def train_captured(strategy, seed=None):
    """A run that leaves a cycle with its graphs."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8).cuda(), torch.randint(3, (64,)).cuda())
    engine = gradveil.PrivacyEngine(strategy=strategy, steps=12, clip=1.0, sigma=1.0, delta=1e-5, seed=seed)
    plain = torch.utils.data.DataLoader(data, batch_size=16)
    _, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=plain)
    step = gradveil.cuda_graph_step(engine, nn.functional.cross_entropy)
    step.itself = step
    for x, y in loader:
        assert torch.isfinite(step(x, y))
    assert len(engine.releases) == 12


@needs_gpu
def test_one_captured_run_after_the_other_in_a_process():
    """A collector that runs at every allocation would free the graphs of the earlier ones anywhere."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for strategy in ("baseline", "dyn-s-l2max", "quantile-clip") * 2:
            train_captured(strategy)
    finally:
        gc.set_threshold(*before)


@needs_gpu
def test_rounds_before_a_capture_may_run_on_the_stream_that_captures(monkeypatch):
    """PyTorch hands out 32 streams in turn, the one that captures among them: in every 32nd run they are one."""
    train_captured("baseline", seed=0)
    shared = torch.cuda.graph.default_capture_stream
    assert shared is not None
    made = torch.cuda.Stream
    monkeypatch.setattr(torch.cuda, "Stream", lambda *a, **k: made(*a, **k) if "stream_id" in k else shared)
    train_captured("baseline", seed=1)  # seeded: each step asks for pinned memory
