"""Views of images: what they are, that they depend on step, example and view alone; and runs that train on them."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from gradveil.errors import ConfigError
from gradveil.training import features
from gradveil.training import loop as training
from gradveil.training.augment import _bits, fixed_views, mirrored, views_of
from gradveil.training.config import RunConfig
from gradveil.training.inputs import prepare


def images(n=6, c=2, height=5, width=7):
    return torch.rand(n, c, height, width, generator=torch.Generator().manual_seed(0))


def one_by_one(x, index, *, augment, views, seed):
    """The same, an image at a time, by padding and cutting out."""
    rows = []
    for image, number in zip(x, index.tolist(), strict=True):
        rows.append(image)
        for bits in _bits(seed, torch.tensor([number]), views - 1)[0].tolist():
            view = image
            if "shift" in augment:
                down, right = ((bits >> by & 0xFFFF) % 5 for by in (16, 40))
                view = F.pad(view, (2, 2, 2, 2), mode="reflect")
                view = view[:, down : down + image.shape[1], right : right + image.shape[2]]
            if "flip" in augment and bits & 1:
                # Mirrored places are moved: as if the mirror image were moved the other way.
                view = F.pad(image, (2, 2, 2, 2), mode="reflect") if "shift" in augment else image
                view = mirrored(view)
                if "shift" in augment:
                    left = 4 - right
                    view = view[:, down : down + image.shape[1], left : left + image.shape[2]]
            rows.append(view)
    return torch.stack(rows)


@given(st.sampled_from(["flip", "shift", "flip-shift"]), st.integers(2, 5), st.integers(0, 2**63 - 1))
def test_views_are_the_image_and_others_of_it(augment, views, seed):
    if (augment, views) == ("flip", 2):
        return
    x, index = images(), torch.tensor([3, 0, 7, 7, 100_000, 5])
    found = views_of(x, index, augment=augment, views=views, seed=seed)
    assert torch.equal(found, one_by_one(x, index, augment=augment, views=views, seed=seed))
    assert torch.equal(found[::views], x)


def test_two_views_by_flip_are_the_image_and_its_mirror_image():
    x = images()
    for seed in (1, 2):
        found = views_of(x, torch.arange(6), augment="flip", views=2, seed=seed)
        assert torch.equal(found[0::2], x)
        assert torch.equal(found[1::2], mirrored(x))


@pytest.mark.parametrize("augment", ["flip", "shift", "flip-shift"])
def test_a_view_depends_on_seed_and_example_alone(augment):
    x, index = images(), torch.tensor([4, 9, 2, 11, 0, 8])
    whole = views_of(x, index, augment=augment, views=3, seed=17)
    parts = [views_of(x[i : i + 2], index[i : i + 2], augment=augment, views=3, seed=17) for i in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, views_of(x, index, augment=augment, views=3, seed=18))
    assert views_of(x[:0], index[:0], augment=augment, views=3, seed=17).shape == (0, 2, 5, 7)


def test_draws_are_even():
    bits = _bits(5, torch.arange(20_000), 2)
    assert len(bits.unique()) == bits.numel()
    assert float((bits & 1).double().mean()) == pytest.approx(0.5, abs=0.01)
    for by in (16, 40):
        counts = torch.bincount(((bits >> by & 0xFFFF) % 5).flatten(), minlength=5).double() / bits.numel()
        assert torch.allclose(counts, torch.full((5,), 0.2).double(), atol=0.01)
    assert abs(float(torch.corrcoef((bits & 1).double().T)[0, 1])) < 0.03  # of an example's two views


def test_predictions_are_averaged_over_views_that_are_not_drawn():
    x = images()
    for augment, expected in {
        "none": [x],
        "shift": [x],
        "flip": [x, mirrored(x)],
        "flip-shift": [x, mirrored(x)],
    }.items():
        assert all(torch.equal(a, b) for a, b in zip(fixed_views(x, augment), expected, strict=True))


# ---- runs

BASE = {"dataset": "digits", "steps": 4, "batch_size": 32, "lr": 0.2}


def config(**changes):
    return RunConfig.check({**BASE, **changes})


def test_features_of_both_views_are_computed_ahead():
    inputs = prepare(config(features="scattering", model="linear", views=2, augment="flip"))
    plain = prepare(config(features="scattering", model="linear"))
    assert inputs.views == 2 and inputs.x_train.shape == (len(plain.x_train), 2, *plain.x_train.shape[1:])
    assert torch.equal(inputs.x_train[:, 0], plain.x_train)
    scattering = features.make("scattering", (1, 8, 8))
    assert torch.allclose(inputs.x_test[:5, 1], scattering(mirrored(plain.data.x_test[:5])), atol=1e-6)


def test_inputs_of_other_views_are_refused(tmp_path):
    inputs = prepare(config(features="scattering", model="linear"))
    viewed = config(features="scattering", model="linear", views=2, augment="flip")
    with pytest.raises(ConfigError, match=r"of 1 view.*of 2\. Prepare"):
        training.train(viewed, run_dir=tmp_path / "run", inputs=inputs)


@pytest.mark.parametrize("changes", [{}, {"features": "scattering", "model": "linear"}])
def test_the_accuracy_is_that_of_the_mean_prediction(tmp_path, monkeypatch, changes):
    kept = []
    fit = training.Session.fit

    def watched(self, progress):
        kept.append(self)
        return fit(self, progress)

    monkeypatch.setattr(training.Session, "fit", watched)
    result = training.train(config(views=2, augment="flip", **changes), run_dir=tmp_path / "run", seed=1)
    (session,) = kept
    assert session.engine.settings.views == 2
    x, y = session.data.x_test, session.data.y_test
    given = features.make("scattering", (1, 8, 8)) if changes else torch.nn.Identity()
    session.model.eval()
    with torch.no_grad():
        logits = (session.model(given(x)) + session.model(given(mirrored(x)))) / 2
    assert result.accuracy == pytest.approx(float((logits.argmax(1) == y).double().mean()), abs=0.003)
    assert "2 views of an example are averaged" in " ".join(str(result.statement).split())


def test_parts_of_a_batch_see_the_views_of_the_whole(tmp_path, monkeypatch):
    """Whatever the physical batch size, the rows of a step are the same."""
    seen = {}
    for physical in (None, 5):
        rows = []
        step = training.Session._eager_step

        def watched(self, x, y, step=step, rows=rows):
            if self.engine.step == 0:
                rows.append(x)
            return step(self, x, y)

        with monkeypatch.context() as patch:
            patch.setattr(training.Session, "_eager_step", watched)
            where = tmp_path / str(physical)
            changes = {} if physical is None else {"physical_batch_size": physical}
            training.train(config(views=3, augment="flip-shift", **changes), run_dir=where, seed=1)
        seen[physical] = torch.cat(rows)
    assert torch.equal(seen[None], seen[5])


@pytest.mark.parametrize("strategy", ["dyn-s-l2max", "quantile-clip", "adaclip", "non-private"])
def test_every_kind_of_strategy_trains_on_views(tmp_path, strategy):
    settings = config(strategy=strategy, views=2, augment="flip-shift", allow_unproved=True, physical_batch_size=20)
    assert training.train(settings, run_dir=tmp_path / "run").steps == 4


def test_runs_of_one_seed_on_other_views_or_features_do_not_share_their_noise(tmp_path):
    """Were they to, the difference of their releases would be free of it."""
    releases = {}
    for name, settings in {
        "shift": {"views": 2, "augment": "shift", "model": "linear"},
        "flip-shift": {"views": 2, "augment": "flip-shift", "model": "linear"},
        "scattering": {"features": "scattering", "model": "linear"},
        "balanced": {"features": "balanced-scattering", "model": "linear"},
    }.items():
        config = RunConfig.check(
            {"dataset": "digits", "steps": 1, "batch_size": 64, "lr": 1.0, "sigma": 100.0, "clip": 1.0, **settings}
        )
        training.train(config, run_dir=tmp_path / name, seed=3)
        (file,) = (tmp_path / name / "checkpoints").glob("*.safetensors")
        state = safetensors.torch.load_file(file)
        releases[name] = state["model.linear.weight"].flatten()  # from zero, by one step: nearly all noise
    for one, other in (("shift", "flip-shift"), ("scattering", "balanced")):
        assert abs(torch.corrcoef(torch.stack([releases[one], releases[other]]))[0, 1]) < 0.3
