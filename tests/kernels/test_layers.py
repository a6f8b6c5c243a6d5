"""Layers whose autograd node is in C++ do what the same layers do in Python, and refuse what they refuse."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradveil.clipping import Clipper, make_groups
from gradveil.clipping.backends import build, layers, native
from gradveil.clipping.reference import clipped_sums
from gradveil.errors import PrivacyViolation, UnsupportedModelError

pytestmark = pytest.mark.skipif(layers.layers() is None, reason=f"no C++ layers here: {layers.status()}")


@pytest.fixture(params=["C++", "Python"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, so that a test says of each what it says of one."""
    if request.param == "Python":
        monkeypatch.setattr(layers, "_load", lambda: (None, "Python (chosen by a test)"))
    return str(request.param)


class Sequence_(nn.Module):
    """A linear layer on several positions, then one on one."""

    def __init__(self) -> None:
        super().__init__()
        self.of_positions, self.head = nn.Linear(6, 5), nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.of_positions(x)).mean(1))


def _images(*layers_: nn.Module) -> nn.Module:
    return nn.Sequential(*layers_, nn.Flatten(), nn.LazyLinear(4))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)), (6,)),
    "sequence": (Sequence_, (3, 6)),
    "conv": (lambda: _images(nn.Conv2d(2, 5, 3, stride=2, padding=1), nn.ReLU()), (2, 9, 8)),
    "conv, groups and dilation": (lambda: _images(nn.Conv2d(4, 6, 3, dilation=2, groups=2, bias=False)), (4, 9, 8)),
    "conv, same and reflect": (
        lambda: _images(nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect"), nn.ReLU()),
        (2, 6, 7),
    ),
    "norms": (lambda: _images(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(2), nn.LayerNorm(24)), (2, 6, 8)),
}


def _made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    make, shape = MODELS[name]
    model, x, y = make(), torch.randn(7, *shape), torch.randint(0, 4, (7,))
    model(x)
    return model, x, y


def _clipper(model: nn.Module, clipping: Any = "per-layer", bound: float = 0.05) -> Clipper:
    groups = make_groups(model, clipping)
    return Clipper(model, groups, bounds=[bound] * len(groups), loss_reduction="mean")


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_one_example_at_a_time(name: str, clipping: Any, where: str) -> None:
    model, x, y = _made(name)
    groups = make_groups(model, clipping)
    exact = copy.deepcopy(model).double()
    bounds = [0.05] * len(groups)
    wanted = clipped_sums(exact, F.cross_entropy, x.double(), y, groups=groups, bounds=bounds).sums
    clipper = _clipper(model, clipping)
    F.cross_entropy(model(x), y).backward()
    assert any(unit.native is not None for unit in clipper.units) == (where == "C++")
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), wanted[parameter_name], rtol=1e-4, atol=1e-6)
    assert clipper.clip_stats.largest(0) <= 0.05
    assert clipper.clip_stats.examples == 7 and clipper.clip_stats.passes == 1


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_the_same_in_both(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for load in (layers._load, lambda: (None, "")):
        monkeypatch.setattr(layers, "_load", load)
        model, x, y = _made(name)
        clipper = _clipper(model)
        F.cross_entropy(model(x), y).backward()
        found.append([p.grad for p in model.parameters()] + [torch.tensor(clipper.clip_stats.largest(0))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Twice(nn.Module):
    """The same layer twice, a part without gradients, and a part that is run again by a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.last(x).mean(1, keepdim=True)
        x = checkpoint(lambda h: torch.tanh(self.first(h)), x.requires_grad_(), use_reentrant=self.reentrant)
        return self.last(self.shared(self.shared(x)) * scale)


@pytest.mark.parametrize("reentrant", [False, True])
def test_used_twice_without_gradients_and_in_a_checkpoint(reentrant: bool, where: str) -> None:
    torch.manual_seed(0)
    model, x, y = Twice(reentrant), torch.randn(5, 6), torch.randint(0, 4, (5,))
    plain = copy.deepcopy(model).double()
    plain.reentrant = False
    groups = make_groups(model, "per-layer")
    bounds = [0.05] * len(groups)
    wanted = clipped_sums(plain, F.cross_entropy, x.double(), y, groups=groups, bounds=bounds).sums
    _clipper(model)
    F.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), wanted[name], rtol=1e-4, atol=1e-6)


def test_an_example_that_is_not_finite_counts_for_nothing(where: str) -> None:
    model, x, y = _made("mlp")
    groups = make_groups(model, "per-layer")
    clipper = Clipper(model, groups, bounds=[0.05] * len(groups), loss_reduction="sum")
    F.cross_entropy(model(x[1:]), y[1:], reduction="sum").backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    clipper.start_step()
    x[0, 2] = float("inf")
    F.cross_entropy(model(x), y, reduction="sum").backward()
    for parameter, sums in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, sums)
    assert clipper.clip_stats.not_finite == 1


def test_a_batch_of_none_adds_nothing(where: str) -> None:
    model, x, y = _made("mlp")
    _clipper(model)
    F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_pass_is_differentiated_once(where: str) -> None:
    model, x, y = _made("mlp")
    _clipper(model)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(PrivacyViolation, match="differentiated twice"):
        loss.backward()


def test_a_layer_is_not_differentiated_through_its_gradient(where: str) -> None:
    """A penalty on the gradient of the input would reach the layers a second time, by a way that is not clipped."""
    model, x, y = _made("mlp")
    _clipper(model)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), [x], create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match="twice"):
        grad.square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_autograd_gives_the_gradient_of_no_parameter(clipping: str, where: str) -> None:
    model, x, y = _made("mlp")
    clipper = _clipper(model, clipping)
    for settings in ({}, {"create_graph": True}):
        with pytest.raises(PrivacyViolation, match=r"torch\.autograd\.grad was asked for the gradient of"):
            torch.autograd.grad(F.cross_entropy(model(x), y), [model[0].weight], **settings)  # type: ignore[index]
    assert not clipper.take_sums() and not clipper.clip_stats.passes


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_gradients_of_inputs_only_neither_clip_nor_end_a_pass(clipping: str, where: str) -> None:
    model, x, y = _made("mlp")
    free, _, _ = _made("mlp")
    clipper = _clipper(model, clipping)
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (found,) = torch.autograd.grad(loss, [x], retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(F.cross_entropy(free(x), y), [x])[0])
    assert not clipper.take_sums() and not clipper.clip_stats.passes
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert clipper.clip_stats.passes == 1 and all(p.grad is not None for p in model.parameters())


def test_a_use_outside_the_module_is_refused(where: str) -> None:
    model, x, y = _made("mlp")
    _clipper(model)
    with pytest.raises(PrivacyViolation, match=r"'0\.weight' got a gradient from a use outside"):
        (F.cross_entropy(model(x), y) + model[0].weight.square().sum()).backward()  # type: ignore[index, union-attr]


def test_sums_go_to_whoever_asked_for_them_and_nowhere_else(where: str) -> None:
    model, x, y = _made("mlp")
    clipper = _clipper(model)
    F.cross_entropy(model(x), y).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    clipper.start_step()
    taken: list[dict[str, Tensor]] = []
    clipper.on_end = lambda: taken.append(clipper.take_sums())
    F.cross_entropy(model(x), y).backward()
    (sums,) = taken
    assert all(p.grad is None for p in model.parameters())
    assert sums.keys() == wanted.keys() and all(torch.equal(sums[name], wanted[name]) for name in sums)  # type: ignore[arg-type]
    assert not clipper.take_sums()


def test_a_pass_from_before_a_new_step_is_not_differentiated(where: str) -> None:
    model, x, y = _made("mlp")
    clipper = _clipper(model)
    loss = F.cross_entropy(model(x), y)
    clipper.start_step()
    with pytest.raises(PrivacyViolation, match="from before the last release"):
        loss.backward()
    assert not clipper.take_sums() and not clipper.clip_stats.passes


def test_two_calls_of_the_model_in_one_backward_pass_are_refused(where: str) -> None:
    model, x, y = _made("mlp")
    clipper = _clipper(model)
    loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(0)), y)
    with pytest.raises(PrivacyViolation, match="reaches two calls of the model"):
        loss.backward()
    assert not clipper.take_sums() and not clipper.clip_stats.passes


def test_gradients_of_several_passes_add_up(where: str) -> None:
    model, x, y = _made("mlp")
    clipper = _clipper(model)
    for i in (0, 2, 4):
        F.cross_entropy(model(x[i : i + 2]), y[i : i + 2]).backward()
    together = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert clipper.clip_stats.passes == 3 and clipper.clip_stats.examples == 6
    model.zero_grad()
    clipper.start_step()
    F.cross_entropy(model(x[:6]), y[:6]).backward()
    for parameter, total in zip(model.parameters(), together, strict=True):
        torch.testing.assert_close(parameter.grad, total)


def test_a_layer_that_was_not_reached_through_the_output(where: str) -> None:
    """What the loss is made of must come out of the model: only there is a pass followed."""
    model, x, _ = _made("mlp")
    kept = []
    model[0].register_forward_hook(lambda module, args, out: kept.append(out))  # type: ignore[index, union-attr]
    clipper = _clipper(model)
    model(x)
    with pytest.raises(PrivacyViolation, match="other than the model's output"):
        kept[-1].sum().backward()  # the runs that check the model come first
    assert not clipper.take_sums() and all(p.grad is None for p in model.parameters())


def test_autocast_half_and_double_stay_in_python() -> None:
    model, x, y = _made("mlp")
    clipper = _clipper(model)
    model(x)
    layer = clipper.units[0].native
    assert layer is not None
    assert layer.takes(x) and not layer.takes(x.double()) and not layer.takes(x[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not layer.takes(x)
        F.cross_entropy(model(x).float(), y).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_loss_inside_the_model_that_mixes_examples_is_refused(where: str) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean(0).square().mean()  # of all examples together

    model = Inside()
    _clipper(model)
    with pytest.raises(UnsupportedModelError, match=r"computed inside the model.*changes when the other examples"):
        model(torch.randn(3, 6)).backward()


def test_copies_and_what_is_left_behind(where: str) -> None:
    model, x, y = _made("mlp")
    clipper = _clipper(model)
    F.cross_entropy(model(x), y).backward()
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    clipper.detach()
    wanted = None
    for plain in (model, copied, pickled):
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        grads = [p.grad for p in plain.parameters()]
        wanted = wanted or grads
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
    free, _, _ = _made("mlp")
    F.cross_entropy(free(x), y).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), free.parameters(), strict=True))


def test_it_is_built_once_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert layers.status() == "layers: C++"
    assert native.library() is not None
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++")
    monkeypatch.setattr(layers, "_SOURCE", broken)
    layers._load.cache_clear()
    try:
        assert layers.layers() is None
        assert layers.status().startswith("layers: Python (the C++ layers could not be built: ")
        monkeypatch.setenv("GRADVEIL_LAYERS", "0")
        layers._load.cache_clear()
        assert layers.status() == "layers: Python"
    finally:
        layers._load.cache_clear()


def test_a_library_that_ends_its_process_is_not_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "ends.cpp"
    source.write_text("#include <cstdlib>\n__attribute__((constructor)) static void end() { std::abort(); }\n")
    compiler = build.compiler()
    assert compiler is not None
    with pytest.raises(Exception, match="-c"):
        build.library(
            compiler, "ends", [source], compile_with=["-fPIC"], trial="import ctypes, sys; ctypes.CDLL(sys.argv[1])"
        )
    assert not list((tmp_path / "gradveil").glob("*.so"))
