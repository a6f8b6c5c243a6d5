"""Scattering features: what they are, that they belong to one example alone, and that they agree with kymatio."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.training import features
from gradveil.training.features import BalancedScattering, Scattering
from gradveil.training.features.balanced import opponent
from gradveil.training.features.drawings import draw

SHAPES = {(1, 28, 28): (81, 7, 7), (3, 32, 32): (243, 8, 8), (1, 8, 8): (81, 2, 2), (2, 30, 17): (162, 7, 4)}


def images(shape: tuple[int, ...], count: int = 4) -> torch.Tensor:
    """Blobs rather than noise: their energy is where images have it."""
    coarse = torch.rand(count, shape[0], 5, 5)
    return F.interpolate(coarse, size=shape[1:], mode="bicubic", align_corners=False).clamp(0, 1)


@pytest.mark.parametrize(("shape", "expected"), SHAPES.items())
def test_a_channel_becomes_81_maps_of_a_quarter_of_its_size(shape, expected):
    scattering = Scattering(shape)
    assert scattering.output_shape == expected
    assert scattering(images(shape)).shape == (4, *expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_kymatio_computes_the_same(shape):
    frontend = pytest.importorskip(
        "kymatio.scattering2d.frontend.torch_frontend", reason="kymatio 0.3.0 is not installed", exc_type=ImportError
    )
    x = torch.cat([images(shape), torch.rand(4, *shape)])
    theirs = frontend.ScatteringTorch2D(2, shape[1:])(x).flatten(1, 2)
    ours = Scattering(shape).coefficients(x)
    # Theirs has pi = 3.1415 in the norm of each filter, up to three of them in a row: 9e-5.
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_features_have_nothing_to_learn_and_nothing_to_save():
    scattering = Scattering((1, 28, 28))
    assert not list(scattering.parameters())
    assert scattering.state_dict() == {}


def test_the_features_of_an_example_depend_on_that_example_alone():
    x = images((3, 32, 32), 6)
    scattering = Scattering((3, 32, 32))
    together = scattering(x)
    alone = torch.cat([scattering(one[None]) for one in x])
    assert torch.allclose(together, alone, atol=1e-5)
    others = torch.cat([x[:1], torch.rand(5, 3, 32, 32)])
    assert torch.allclose(scattering(others)[0], together[0], atol=1e-5)


def test_of_a_blank_image_only_its_brightness_is_left():
    found = Scattering((1, 28, 28)).coefficients(torch.full((1, 1, 28, 28), 0.7))
    assert torch.allclose(found[0, 0], torch.tensor(0.7), atol=1e-5)
    assert found[0, 1:].abs().max() < 1e-6


def test_every_group_is_normalised_by_itself():
    found = Scattering((1, 28, 28))(images((1, 28, 28))).unflatten(1, (27, 3)).flatten(2)
    assert found.mean(2).abs().max() < 1e-5
    assert (found.square().mean(2) < 1.001).all()


def test_a_small_shift_changes_features_less_than_pixels():
    x = F.pad(images((1, 20, 20), 8), (4, 4, 4, 4))
    moved = x.roll(1, dims=3)
    scattering = Scattering((1, 28, 28))

    def change(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / a.norm())

    assert change(scattering.coefficients(x), scattering.coefficients(moved)) < 0.7 * change(x, moved)


def test_a_wave_is_seen_at_its_angle_and_octave():
    axis = torch.arange(32.0)
    for octave, frequency in enumerate((0.75, 0.375)):
        for angle, wave in ((7, axis[None, :]), (3, axis[:, None])):  # along columns: -pi/2; along rows: 0
            x = torch.cos(torch.pi * frequency * wave).expand(1, 1, 32, 32)
            first = Scattering((1, 32, 32)).coefficients(x)[0, 1:17].mean((1, 2)).view(2, 8)
            assert divmod(int(first.argmax()), 8) == (octave, angle)


def test_features_can_be_attacked_their_gradients_are_finite():
    scattering = Scattering((1, 8, 8))
    for x in (torch.zeros(1, 1, 8, 8), torch.rand(1, 1, 8, 8)):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(scattering(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        assert grad.isfinite().all()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(600,), (1, 4, 28), (28, 28), ()])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(ConfigError, match="Leave the features out"):
        Scattering(shape)


def test_other_refusals():
    with pytest.raises(UnknownNameError, match=r"unknown features 'scatering'\. Did you mean 'scattering'"):
        features.make("scatering", (1, 28, 28))
    with pytest.raises(ConfigError, match=r"were made for \(1, 28, 28\)"):
        Scattering((1, 28, 28))(torch.rand(2, 1, 32, 32))


def test_extraction_in_pieces_is_extraction():
    x = images((3, 8, 8), 40)  # more than one piece
    scattering = Scattering((3, 8, 8))
    found = features.extract(scattering, x, torch.device("cpu"))
    assert not found.requires_grad
    assert torch.allclose(found, scattering(x), atol=1e-5)


@pytest.mark.parametrize(("shape", "expected"), SHAPES.items())
def test_balanced_features_have_one_shape_and_one_length(shape, expected):
    balanced = features.make("balanced-scattering", shape)
    assert balanced.output_shape == expected
    found = balanced(images(shape))
    assert found.shape == (4, *expected)
    assert torch.allclose(found.flatten(1).norm(dim=1), torch.tensor(70.0))
    assert not list(balanced.parameters()) and balanced.state_dict() == {}


def test_balanced_features_depend_on_their_example_alone_and_on_no_data_set():
    x = images((3, 16, 16), 6)
    together = BalancedScattering((3, 16, 16))(x)
    alone = torch.cat([BalancedScattering((3, 16, 16))(one[None]) for one in x])
    assert torch.allclose(together, alone, atol=1e-3)
    assert torch.equal(draw(3, (3, 9, 12), seed=5), draw(3, (3, 9, 12), seed=5))
    assert not torch.equal(draw(3, (3, 9, 12), seed=5), draw(3, (3, 9, 12), seed=6))


def test_balancing_brings_the_directions_of_the_channels_closer_to_one_size():
    shape = (3, 32, 32)
    x = draw(64, shape, seed=1)  # others than those the balance was measured on

    def spread(found: torch.Tensor) -> float:
        """Of all directions that vary, the share of the variance that is in the largest."""
        rows = found.transpose(0, 1).flatten(1).double()
        variances = torch.linalg.eigvalsh(torch.cov(rows))
        return float(variances[-1] / variances.sum())

    assert spread(BalancedScattering(shape)(x)) < 0.6 * spread(Scattering(shape)(x))


def test_grey_pictures_in_colour_leave_the_colour_channels_empty():
    grey = images((1, 16, 16)).expand(-1, 3, -1, -1)
    found = Scattering((3, 16, 16)).coefficients(opponent(grey))
    assert found[:, 81:].abs().max() < 1e-5 < found[:, :81].abs().max()


def test_drawings_are_pictures():
    x = draw(200, (3, 32, 32), seed=0)
    assert x.shape == (200, 3, 32, 32)
    assert float(x.min()) >= 0 and float(x.max()) <= 1
    steps = (x[..., 1:] - x[..., :-1]).abs()
    assert (steps < 0.01).float().mean() > 0.5 and (steps > 0.2).float().mean() > 0.01  # flat parts, and edges


def test_balanced_features_of_a_blank_image_are_finite():
    found = BalancedScattering((1, 8, 8))(torch.zeros(2, 1, 8, 8))
    assert found.isfinite().all()


def test_centred_features_have_none_of_what_all_drawings_share():
    """The mean takes a large part of a balanced vector's length, and next to nothing of a centred one's."""
    shape = (3, 16, 16)
    x = draw(256, shape, seed=3)  # others than those whose mean is taken off

    def shared(name: str) -> float:
        found = features.make(name, shape)(x).flatten(1)
        assert torch.allclose(found.norm(dim=1), torch.tensor(70.0))
        return float(found.mean(0).square().sum() / found.square().sum(1).mean())

    assert shared("centred-scattering") < 0.05 < 0.1 < shared("balanced-scattering")
    assert features.make("centred-scattering", shape).state_dict() == {}
