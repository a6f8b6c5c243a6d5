"""Several views of an example in a user's own loop, eager and captured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import gradveil
from gradveil.clipping import clipped_sums
from gradveil.errors import ConfigError, PrivacyViolation
from loops import run, start, weights, without_noise
from test_captured import STRATEGIES, begin, device, of_strategy  # noqa: F401


def mirrored(x, y):
    return torch.stack([x, x.flip(-1)], dim=1).flatten(0, 1), y.repeat_interleave(2)


def run_views(engine, model, optimizer, loader):
    for batch in loader:
        x, y = mirrored(*batch)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=engine.settings.loss_reduction).backward()
        optimizer.step()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_views_are_averaged_before_they_are_clipped(reduction, clipping):
    """The release is the mean of clipped gradients, beside its noise, which is left out here."""
    engine, model, _, loader = start(loss_reduction=reduction, clipping=clipping, views=2)
    x, y = mirrored(*next(iter(loader)))
    bounds = [1.0] * len(engine.groups)
    reference = clipped_sums(model, F.cross_entropy, x, y, groups=engine.groups, bounds=bounds, views=2)
    with without_noise():
        F.cross_entropy(model(x), y, reduction=reduction).backward()
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, reference.sums[name] / 10, atol=1e-6)


def test_the_norm_of_an_example_is_that_of_the_mean_of_its_views():
    engine, model, _, loader = start(strategy="dyn-s-l2max", views=2, clip=1e3)
    x, y = mirrored(*next(iter(loader)))
    norms = clipped_sums(model, F.cross_entropy, x, y, groups=engine.groups, bounds=[1e3] * 2, views=2).norms
    F.cross_entropy(model(x), y).backward()
    assert engine.releases[0].sensitivity == pytest.approx([float(norms.max())] * 2, rel=1e-5)


def test_views_change_neither_what_is_spent_nor_what_is_recorded():
    found = []
    for views, loop in ((1, run), (2, run_views)):
        engine, *rest = start(views=views, seed=4)
        loop(engine, *rest)
        found.append(engine)
    one, two = found
    assert two.statement().proved.epsilon == one.statement().proved.epsilon
    assert [replace(r, digest=None) for r in one.releases] == [replace(r, digest=None) for r in two.releases]
    assert one.header.plan == {k: v for k, v in two.header.plan.items() if k != "views"}
    assert one.header.salt != two.header.salt  # they share no noise
    assert "2 views of an example are averaged before they are clipped" in " ".join(str(two.statement()).split())
    assert "views" not in str(one.statement())


@pytest.mark.parametrize("strategy", ["baseline", "dyn-s-l2max", "quantile-clip", "adaclip", "non-private"])
def test_physical_batches_of_views_give_the_same_run(strategy):
    found = []
    for physical in (None, 3):
        engine, model, optimizer, loader = start(strategy=strategy, physical=physical, seed=2, views=2, batch_size=7)
        run_views(engine, model, optimizer, loader)
        found.append(weights(model))
    assert torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 10])  # also empty batches
def test_views_and_empty_batches(batch_size):
    engine, *rest = start(views=2, batch_size=batch_size, seed=1)
    run_views(engine, *rest)
    assert engine.step == 12
    assert engine.non_finite_examples == 0


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_one_view_that_is_not_finite_drops_its_example():
    engine, model, optimizer, loader = start(views=2, sampling="without-replacement")
    for i, batch in enumerate(loader):
        x, y = mirrored(*batch)
        if i == 0:
            x[3] = math.nan
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        optimizer.step()
    assert engine.non_finite_examples == 1


def test_rows_that_are_not_all_views_of_the_batch_are_refused():
    engine, model, _, loader = start(views=2, sampling="without-replacement")
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    assert not engine.releases
    with pytest.raises(PrivacyViolation, match=r"was not released.*all 20 rows, 2 for each example"):
        next(batches)
    _, model, _, loader = start(views=3, sampling="without-replacement")
    x, _ = next(iter(loader))
    with pytest.raises(ConfigError, match=r"10 rows, and views is 3.*torch\.stack"):
        model(x)


# ---- captured


def one_run(where, *, graphs, **settings):
    # A small rate: what rounding does to a ReLU or a maximum would grow where bounds are wide, or there are none.
    engine, model, optimizer, loader = begin(where, views=2, lr=1e-3, **settings)
    if not graphs:
        run_views(engine, model, optimizer, loader)
    else:
        step = gradveil.cuda_graph_step(engine, F.cross_entropy)
        losses = [step(*mirrored(*batch)) for batch in loader]
        assert all(bool(torch.isfinite(loss)) for loss in losses)
    return weights(model), [replace(r, digest=None) for r in engine.releases]


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_captured_run_with_views_is_the_eager_one(strategy, clipping, device):  # noqa: F811
    settings, within = of_strategy(strategy, device)
    (eager, releases), (graphed, recorded) = (
        one_run(device, graphs=graphs, clipping=clipping, **settings) for graphs in (False, True)
    )
    assert float((eager - graphed).abs().max()) < within
    if "l2max" not in strategy:
        assert recorded == releases


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 2},
        {"batch_size": 2, "strategy": "non-private"},
        {"physical": 8},
        {"physical": 8, "strategy": "non-private"},
    ],
)
def test_captured_views_in_parts_and_in_empty_batches(settings, device):  # noqa: F811
    (eager, _), (graphed, _) = (one_run(device, graphs=graphs, **settings) for graphs in (False, True))
    assert float((eager - graphed).abs().max()) < 1e-5


def test_a_captured_step_gives_the_mean_loss_and_counts_examples(device):  # noqa: F811
    engine, model, _, loader = begin(device, views=2)
    step = gradveil.cuda_graph_step(engine, F.cross_entropy)
    for i, batch in enumerate(loader):
        x, y = mirrored(*batch)
        if i == 1:
            x[1] = math.nan  # a view of the first example
        with torch.no_grad():
            expected = F.cross_entropy(model(x), y)
        found = step(x, y)
        if i != 1:
            assert float(found) == pytest.approx(float(expected), rel=1e-4)
        if i == 6:
            break
    with pytest.warns(UserWarning, match="not finite"):
        assert engine.non_finite_examples == 1
    with pytest.raises(ConfigError, match="3 rows came, and views is 2"):
        step(x[:3], y[:3])
