"""What people expect of the engine: a target epsilon, epochs, and what it says of itself."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradveil
from gradveil.errors import BudgetExhausted, ConfigError
from loops import N, run, start


def digits_model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(),
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip


def test_a_target_epsilon_on_digits_with_six_groups_is_met():
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    loader = DataLoader(TensorDataset(x, torch.tensor(digits.target)), batch_size=200)
    model = digits_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = gradveil.PrivacyEngine(epsilon=2.0, delta=1e-5, epochs=3, clip=1.0)
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader)
    assert len(engine.groups) == 6 and len(loader) == 9
    for _ in range(3):
        run(engine, model, optimizer, loader)
    assert len(engine.releases) == 27
    assert 1.95 < engine.epsilon <= 2.0 and engine.delta == 1e-5


@pytest.mark.parametrize(
    "strategy", ["baseline", "dyn-s-decay", "dyn-sigma", "dyn-sigma-decay", "quantile-clip", "adaclip", "dyn-private"]
)
def test_a_target_epsilon_is_met_by_every_proved_strategy(strategy):
    engine, model, optimizer, loader = start(strategy=strategy, sigma=None, epsilon=3.0, steps=8, **no_clip(strategy))
    run(engine, model, optimizer, loader)
    assert 2.95 < engine.epsilon <= 3.0


def no_clip(strategy):
    return {"clip": None} if strategy == "adaclip" else {}


def test_each_pass_is_an_epoch_and_one_after_the_last_raises():
    engine, model, optimizer, loader = start(steps=None, epochs=2, batch_size=25)
    assert len(loader) == -(-N // 25)
    run(engine, model, optimizer, loader)
    assert engine.step == 3
    run(engine, model, optimizer, loader)
    assert engine.step == 6
    with pytest.raises(BudgetExhausted, match="declared 6 steps"):
        run(engine, model, optimizer, loader)


def test_a_pass_that_was_left_is_gone_on_with():
    engine, model, _, loader = start(steps=None, epochs=2, batch_size=20)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        break
    assert len(loader) == 2
    assert sum(1 for x, y in loader if F.cross_entropy(model(x), y).backward() is None) == 2
    assert engine.step == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 5, "epochs": 2}, "give one of the two"),
        ({"steps": None}, "give one of the two"),
        ({"epsilon": 2.0}, "both given"),
        ({"epsilon": 2.0, "sigma": None, "strategy": "dyn-s-l2max"}, "scales its noise to the data"),
        ({"epsilon": -1.0, "sigma": None}, "positive number"),
        ({"steps": None, "epochs": 0}, "at least 1"),
        ({"spot_checks": 2.0}, "from 0 to 1"),
        ({"drops_examples": True, "views": 2}, "cannot be known"),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(ConfigError, match=words):
        start(**settings)


def test_what_the_engine_says_of_itself():
    engine = gradveil.PrivacyEngine(epsilon=1.0, epochs=1, clip=1.0, delta=1e-3)
    assert repr(engine) == "PrivacyEngine(baseline, not set up)" and engine.epsilon == 0.0
    with pytest.raises(ConfigError, match="call make_private first"):
        _ = engine.plan
    engine, model, optimizer, loader = start(steps=2)
    assert engine.epsilon == 0.0 and "not set up" in gradveil.PrivacyEngine(clip=1, sigma=1, steps=1)._repr_html_()
    run(engine, model, optimizer, loader)
    assert repr(engine) == "PrivacyEngine(baseline, step 2 of 2, delta=0.001)"
    assert "Proved:" in engine._repr_html_() and engine._repr_html_().startswith("<pre>")


def test_the_public_methods_are_few():
    public = {name for name in dir(gradveil.PrivacyEngine) if not name.startswith("_")}
    methods = {name for name in public if callable(getattr(gradveil.PrivacyEngine, name))}
    assert methods == {
        "close", "commit", "detach", "load_state_dict", "log", "make_private", "public_data", "record_gradients",
        "run_step",
        "state_dict", "statement", "stop",
    }  # fmt: skip


# ---- the closed step


def closed(loss_fn, steps=6, **settings):
    engine, model, _, loader = start(steps=steps, spot_checks=1.0, **settings)
    for batch in loader:
        engine.run_step(lambda x, y: loss_fn(model, x, y), *batch)
    return engine


def test_a_closed_step_is_the_open_one():
    engine, model, optimizer, loader = start(seed=4, steps=6)
    run(engine, model, optimizer, loader)
    other, same, _, loader = start(seed=4, steps=6)
    for batch in loader:
        other.run_step(lambda x, y: F.cross_entropy(same(x), y), *batch)
    for a, b in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "(whole step)" in " ".join(str(other.statement()).split())


def dropout_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda m, x, y: F.cross_entropy(m(x), y),
        lambda m, x, y: F.cross_entropy(m(x * 2 - 1), y, label_smoothing=0.1),
        lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * (y + 1)).sum() / max(len(y), 1),
    ],
)
@pytest.mark.parametrize("make", [None, dropout_model])
def test_closed_steps_that_are_fine(loss_fn, make):
    engine = closed(loss_fn, model=make() if make else None)
    assert len(engine.releases) == 6 and any("whole_step" in body for _, body in engine.ledger.notes)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda m, x, y: F.cross_entropy(m(x - x.mean(0)), y),
        lambda m, x, y: F.cross_entropy(m(0.7 * x + 0.3 * x.roll(1, 0)), y),
        lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
        lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.bincount(y, minlength=3).float() + 1),
        lambda m, x, y: F.cross_entropy(m(x), y) * len(y),
        lambda m, x, y: F.cross_entropy(m(x) / m(x).detach().std(), y),
    ],
    ids=["centring", "mixup", "mask", "class weights", "sum declared a mean", "scale of the batch"],
)
@pytest.mark.parametrize("make", [None, dropout_model])
def test_closed_steps_that_mix_are_refused_before_anything_is_released(loss_fn, make):
    with pytest.raises(gradveil.GradveilError) as refused:
        closed(loss_fn, model=make() if make else None)
    assert "mixes examples" in str(refused.value) or "depends on" in str(refused.value) or "mean" in str(refused.value)


def test_a_check_of_the_whole_step_leaves_nothing_behind():
    engine, model, optimizer, loader = start(seed=9, steps=5, model=dropout_model(), spot_checks=1.0)
    torch.manual_seed(3)
    for batch in loader:
        engine.run_step(lambda x, y: F.cross_entropy(model(x), y), *batch)
    other, same, optimizer, loader = start(seed=9, steps=5, model=copy_of(dropout_model, model), spot_checks=0.0)
    torch.manual_seed(3)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(same(x), y).backward()
        optimizer.step()
    assert len(engine.releases) == len(other.releases) == 5


def copy_of(make, _):
    torch.manual_seed(0)
    return make()
