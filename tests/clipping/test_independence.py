"""Models and losses that mix examples are found, in the mode training runs in; those that do not are left alone."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from gradveil.clipping.validation.loss_replay import Tape
from gradveil.clipping.validation.loss_watch import LossWatch, _Recorded
from gradveil.clipping.validation.mixing import SharedArguments, Verdict, check_model, model_refusal
from gradveil.clipping.validation.row_differences import Split, largest_difference
from gradveil.errors import PrivacyViolation, UnsupportedModelError

ROWS, FEATURES, CLASSES = 8, 6, 3


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(params=["float32", "bf16 autocast"])
def precision(request):
    with torch.autocast("cpu", torch.bfloat16, enabled=request.param != "float32"):
        yield request.param


class Net(nn.Module):
    """Two layers around a function of the hidden features."""

    def __init__(self, between, dropout=0.0):
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.dropout, self.between, self.calls = nn.Dropout(dropout), between, 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.between(self, self.dropout(torch.tanh(self.first(x)))))


def check(model, *args, rows=ROWS, **settings):
    """A check, after which everything must be as it was."""
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    modes, attributes = [m.training for m in model.modules()], [dict(vars(m)) for m in model.modules()]
    verdict = check_model(model, args, {}, rows, seed=1, **settings)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert torch.equal(before[1], torch.get_rng_state()) and before[2] == random.getstate()
    assert before[3] == np.random.get_state()[2]  # noqa: NPY002
    assert modes == [m.training for m in model.modules()]
    for module, then in zip(model.modules(), attributes, strict=True):
        assert vars(module).keys() == then.keys() and all(vars(module)[k] is v for k, v in then.items())
    return verdict


# ---- models that mix


def batch_norm_in_training(m, h):
    return (h - h.mean(0)) / (h.std(0) + 1e-3) if m.training else h


def attention_along_the_batch(m, h):
    return F.scaled_dot_product_attention(h[None], h[None], h[None])[0]


def mix_style(m, h):
    order = torch.randperm(len(h))
    share = torch.distributions.Beta(0.5, 0.5).sample((len(h), 1))
    return share * h + (1 - share) * h[order]


def only_the_neighbour(m, h):
    return h + torch.cat([h[:1] * 0, h[:-1]])


def fixed_pairs(m, h):
    return h.view(-1, 2, h.shape[1]).flip(1).reshape_as(h) if m.training else h


MIXING = {
    "batch norm in training": batch_norm_in_training,
    "attention": attention_along_the_batch,
    "cumsum": lambda m, h: h.cumsum(0),
    "sort": lambda m, h: h.sort(0).values,
    "MixStyle": mix_style,
    "neighbour": only_the_neighbour,
    "pairs": fixed_pairs,
    "max": lambda m, h: h / h.abs().max(),
    "gate on the batch": lambda m, h: h * (h.mean() > m.first.bias.mean()) + h * h.abs().sum(),
    "mean 1": lambda m, h: h - h.mean(0),
    "mean 0.1": lambda m, h: h - 0.1 * h.mean(0),
    "mean 0.01": lambda m, h: h - 0.01 * h.mean(0),
    "mean 0.01, in training": lambda m, h: h - 0.01 * h.mean(0) * m.training,
    "batch size": lambda m, h: h * len(h),
    "batch size, in training": lambda m, h: h * len(h) if m.training else h,
}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_examples_is_found(name, dropout, precision):
    verdict = check(Net(MIXING[name], dropout).train(), torch.randn(ROWS, FEATURES))
    assert verdict.mixes, verdict
    assert "mixes examples" in str(model_refusal(verdict))


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("name", ["mean 0.1", "cumsum", "attention", "batch norm in training", "batch size"])
def test_small_and_odd_batches(name, rows):
    assert check(Net(MIXING[name]).train(), torch.randn(rows, FEATURES), rows=rows).mixes
    clean = check(Net(lambda m, h: h, dropout=0.5), torch.randn(rows, FEATURES), rows=rows)
    assert clean == Verdict(False, True, "")


def test_a_gate_that_opens_after_some_calls_is_found_once_it_is_open():
    model = Net(lambda m, h: h - h.mean(0) if m.calls > 5 else h, dropout=0.1)
    found = []
    for _ in range(8):
        found.append(check(model, torch.randn(ROWS, FEATURES)).mixes)
        model(torch.randn(ROWS, FEATURES))
    assert found == [False] * 5 + [True] * 3


def test_batch_norm_itself():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2), nn.Flatten(), nn.Linear(36, 3))
    assert check(model, torch.randn(ROWS, 1, 5, 5)).mixes
    assert not check(model.eval(), torch.randn(ROWS, 1, 5, 5)).mixes


# ---- models that do not


class Words(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.embed = kind, nn.Embedding(50, 16)
        self.positions = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens, positions=None, mask=None, padding=None):
        h = self.embed(tokens)
        if positions is not None:
            h = h + self.positions(positions)
        if self.kind == "lstm":
            h, (state, _) = self.lstm(h)
            return {"logits": self.head(h[:, -1]), "state": state}
        h = self.block(h, src_mask=mask, src_key_padding_mask=padding)
        return {"logits": self.head(h.mean(1)), "extra": (h, h.argmax(2), h.sum())}


def tokens(rows=ROWS, length=5):
    return torch.randint(0, 50, (rows, length))


class Augmented(nn.Module):
    """Draws from every generator there is."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(FEATURES, CLASSES), torch.Generator().manual_seed(3)
        self.rng, self.history = np.random.default_rng(0), []

    def forward(self, x):
        self.history.append(x.mean())
        x = x + 0.1 * torch.randn(x.shape, generator=self.own) + 0.1 * torch.randn_like(x)
        flips = torch.tensor([[random.choice([-1.0, 1.0])] for _ in x])
        return self.layer(x * flips + torch.tensor(self.rng.normal(size=x.shape), dtype=x.dtype))


class Experts(nn.Module):
    """Rows go to one of two layers: matrices of other sizes when other rows change."""

    def __init__(self):
        super().__init__()
        self.gate, self.layers = nn.Linear(FEATURES, 2), nn.ModuleList(nn.Linear(FEATURES, 32) for _ in range(2))

    def forward(self, x):
        chosen = self.gate(x).argmax(1)
        out = torch.zeros(len(x), 32, dtype=self.layers[0](x).dtype)
        for i, layer in enumerate(self.layers):
            out[chosen == i] = layer(x[chosen == i])
        return out


def causal(n):
    return torch.full((n, n), -torch.inf).triu(1)


CLEAN = {
    "MLP": lambda: (Net(lambda m, h: h, 0.5), torch.randn(ROWS, FEATURES)),
    "CNN": lambda: (  # channels_last: another kernel
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Dropout2d(), nn.Flatten(), nn.Linear(36, 3)),
        torch.randn(ROWS, 1, 5, 5).to(memory_format=torch.channels_last),
    ),
    "transformer": lambda: (Words("transformer"), tokens()),
    "LSTM": lambda: (Words("lstm"), tokens()),
    "positions that have as many rows": lambda: (Words("transformer"), tokens(length=ROWS), torch.arange(ROWS)),
    "mask that has as many rows": lambda: (Words("transformer"), tokens(length=ROWS), None, causal(ROWS)),
    "padding": lambda: (Words("transformer"), tokens(), None, None, torch.rand(ROWS, 5) > 2),
    "spectral norm": lambda: (
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, 16)), nn.Dropout(), nn.Linear(16, 3)),
        torch.randn(ROWS, FEATURES),
    ),
    "weight norm": lambda: (parametrizations.weight_norm(nn.Linear(FEATURES, 3)), torch.randn(ROWS, FEATURES)),
    "augmentation": lambda: (Augmented(), torch.randn(ROWS, FEATURES)),
    "experts": lambda: (Experts(), torch.randn(ROWS, FEATURES)),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_model_that_keeps_examples_apart_is_left_alone(name, precision):
    if name == "LSTM" and precision != "float32":
        pytest.skip("oneDNN has no LSTM in bfloat16 on every CPU")
    model, *args = CLEAN[name]()
    verdict = check(model.train(), *args)
    assert not verdict.mixes, verdict
    # Augmented draws in eval mode too, from generators of its own: sizes cannot be compared.
    assert verdict.comparable or name == "augmentation", verdict


def test_the_state_of_two_layers_is_not_taken_for_two_examples():
    assert not check(Words("lstm"), tokens(rows=2), rows=2).mixes


def test_a_shared_argument_is_known_by_calls_of_other_sizes():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, FEATURES)

        def forward(self, x, bias):
            return F.scaled_dot_product_attention(self.layer(x), x, x, attn_mask=bias)

    shared, bias, model = SharedArguments(), torch.randn(5, 5), Biased()
    shared.note((torch.randn(4, 5, FEATURES), bias), {}, 4)
    assert shared.positions == {1}
    x = torch.randn(5, 5, FEATURES)
    assert check(model, x, bias, rows=5).mixes
    assert not check(model, x, bias, rows=5, shared=shared.positions).mixes


def test_views_are_replaced_with_their_example():
    class OfViews(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, 3)

        def forward(self, x):
            return self.layer(x - x.view(-1, 2, FEATURES).mean(1).repeat_interleave(2, 0))

    x = torch.randn(ROWS, FEATURES)
    assert check(OfViews(), x, views=2) == Verdict(False, True, "")
    assert check(OfViews(), x).mixes
    assert check(Net(MIXING["mean 0.1"]), x, views=2).mixes


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    other: object = None


def test_outputs_of_every_form():
    for form in (lambda t: (t, [t.sum()]), lambda t: {"a": {"b": t}}, lambda t: Output(t, Output(t))):
        for between, mixes in ((lambda m, h: h, False), (MIXING["mean 0.1"], True)):
            net = Net(between)
            net.register_forward_hook(lambda m, args, out, form=form: form(out))
            assert check(net, torch.randn(ROWS, FEATURES)).mixes is mixes


@pytest.mark.parametrize(
    ("between", "x", "words"),
    [
        (lambda m, h: h.mean(0), torch.randn(ROWS, FEATURES), "first dimension"),
        (lambda m, h: h, torch.ones(ROWS, FEATURES), "all the same"),
        (lambda m, h: h[h.new_tensor([float(h.sum() == m.expected)]).argmax() :], torch.randn(ROWS, FEATURES), ""),
        (lambda m, h: h, torch.randn(1, FEATURES), "one example"),
    ],
)
def test_what_cannot_be_compared_is_reported(between, x, words):
    net = Net(between)
    net.expected = 0.0
    verdict = check(net, x, rows=len(x))
    assert not verdict.mixes and words in verdict.reason and verdict.comparable is (not words)


def test_a_model_that_fails_on_other_rows_does_not_fail_the_check():
    def particular(m, h):
        if not torch.equal(h[:, 0], m.expected):
            raise ValueError("unknown rows")
        return h

    net, x = Net(particular), torch.randn(ROWS, FEATURES)
    net.expected = torch.tanh(net.first(x))[:, 0].detach()
    verdict = check(net, x)
    assert not verdict.mixes and not verdict.comparable and "unknown rows" in verdict.reason


def test_draws_that_depend_on_the_examples_are_no_mixing():
    net = Net(lambda m, h: h + torch.stack([torch.randn(int(r.abs().sum() * 3) + 1).sum() for r in h])[:, None])
    verdict = check(net, torch.randn(ROWS, FEATURES))
    assert not verdict.mixes and not verdict.comparable


def test_a_model_that_is_not_reproducible_is_no_mixing():
    hidden = [random.Random(5)]  # out of reach
    verdict = check(Net(lambda m, h: h * hidden[0].random()), torch.randn(ROWS, FEATURES))
    assert not verdict.mixes and not verdict.comparable and "same rows" in verdict.reason


# ---- losses

Y, T = (
    torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1)),
    torch.linspace(-1, 1, 24).view(8, 3),
)
TEACHER = T.flip(0).softmax(1)


def per_example(out):
    return F.cross_entropy(out, Y, reduction="none")


def focal(out):
    losses = per_example(out)
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def own_weights(out):
    losses = per_example(out)
    return (losses * losses.detach()).mean()


def in_place(out):
    out.mul_(2.0)
    out[:, 0] = 0.0
    out[:, 1:].sub_(T[:, 1:])
    return out.square().mean()


def read_for_the_log(out):
    assert torch.isfinite(out).all()
    (out.argmax(1) == Y).float().mean().item()
    return F.cross_entropy(out, Y)


def over_rows(out):
    return sum((row.square().sum() for row in out), start=torch.zeros(())) / len(out)


CLEAN_LOSSES = {
    "cross entropy": lambda out: F.cross_entropy(out, Y),
    "sum": lambda out: F.cross_entropy(out, Y, reduction="sum"),
    "label smoothing": lambda out: nn.CrossEntropyLoss(label_smoothing=0.1)(out, Y),
    "mse": lambda out: F.mse_loss(out, T),
    "pos_weight": lambda out: F.binary_cross_entropy_with_logits(out, (T > 0).float(), pos_weight=torch.ones(3) * 2),
    "huber": lambda out: F.huber_loss(out, T, delta=0.3),
    "hinge": lambda out: F.multi_margin_loss(out, Y),
    "focal": focal,
    "teacher": lambda out: F.kl_div(F.log_softmax(out / 2.0, 1), TEACHER, reduction="batchmean") * 4.0,
    "dropout": lambda out: F.mse_loss(F.dropout(out, 0.5), T),
    "noise": lambda out: (out + torch.randn_like(out)).square().mean(),
    "tokens": lambda out: F.cross_entropy(out.unsqueeze(2).expand(-1, -1, 4), Y[:, None].expand(-1, 4)),
    "own weights": own_weights,
    "in place": in_place,
    "log": read_for_the_log,
    "rows": over_rows,
    "largest": lambda out: out.max(1).values.mean() + torch.cat([out, out], 1).std(1).mean(),
    "probabilities": lambda out: F.binary_cross_entropy(out.float().sigmoid(), (T > 0).float()),
    "several": lambda out: sum(F.mse_loss(part, T[:, :1]) for part in out.split(1, 1)),
}


def standardised(out):
    return F.cross_entropy((out - out.mean(0)) / out.std(0), Y)


def normalised(out):
    losses = per_example(out)
    return (losses / losses.detach().mean()).mean()


def normalised_by_a_number(out):
    loss = F.cross_entropy(out, Y)
    return loss / loss.item()


def weighted_over_the_batch(out):
    with torch.no_grad():
        weights = per_example(out).softmax(0)
    return (weights * per_example(out)).sum()


MIXING_LOSSES = {
    "standardised": standardised,
    "normalised": normalised,
    "normalised by a number": normalised_by_a_number,
    "weights": weighted_over_the_batch,
    "pairwise hinge": lambda out: F.relu(1.0 + out[:4, 0] - out[4:, 0]).mean(),
    "pairwise l1": lambda out: (out[:, None, 0] - out[None, :, 0]).abs().mean(),
    "contrastive": lambda out: F.cross_entropy(out @ out.T, torch.arange(ROWS)),
    "softmax over the batch": lambda out: (out.softmax(0) * T).sum(),
    "positive outputs": lambda out: F.cross_entropy(out, Y, reduction="sum") / (out > 0).sum(),
    "hardest examples": lambda out: per_example(out).topk(4).values.mean(),
    "root of the mean": lambda out: F.mse_loss(out, T).sqrt(),
    "in place": lambda out: out.sub_(out.detach().mean(0)).square().mean(),
    "clamped": lambda out: F.mse_loss(out, T).clamp(max=0.7),
}


def watched(model=None):
    model = nn.Linear(FEATURES, CLASSES) if model is None else model
    watch = LossWatch(model, seed=1)
    return watch, watch.wrap(model(torch.randn(ROWS, FEATURES)), ROWS, scaled=False)


@pytest.mark.parametrize("name", CLEAN_LOSSES)
def test_a_loss_of_each_example_is_left_alone(name, precision):
    model = nn.Linear(FEATURES, CLASSES)
    watch = LossWatch(model)
    plain = model(torch.randn(ROWS, FEATURES))
    twin = plain.detach().clone().requires_grad_()
    generators = torch.get_rng_state()
    expected = CLEAN_LOSSES[name](twin.clone())
    advanced = torch.get_rng_state()
    torch.set_rng_state(generators)
    plain.retain_grad()
    loss = CLEAN_LOSSES[name](watch.wrap(plain, ROWS, scaled=False))
    loss.backward()
    assert watch.status == "checked", watch.reason
    assert torch.equal(torch.get_rng_state(), advanced)
    expected.backward()
    assert torch.equal(loss.detach(), expected.detach())
    if name != "in place":
        assert torch.equal(plain.grad, twin.grad)


@pytest.mark.parametrize("name", MIXING_LOSSES)
def test_a_loss_that_mixes_examples_is_found(name, precision):
    _, out = watched()
    with pytest.raises(UnsupportedModelError, match="the loss mixes examples"):
        MIXING_LOSSES[name](out).backward()


@pytest.mark.parametrize("strength", [1.0, 0.1, 0.01, 0.001])
def test_a_little_mixing_is_found(strength, precision):
    _, out = watched()
    with pytest.raises(UnsupportedModelError, match="the loss mixes examples"):
        F.cross_entropy(out - strength * out.mean(0), Y).backward()


def test_a_last_layer_that_starts_at_zero_hides_nothing():
    model = nn.Linear(FEATURES, CLASSES)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    _, out = watched(model)
    with pytest.raises(UnsupportedModelError, match="the loss mixes examples"):
        F.cross_entropy(out - out.mean(0), Y).backward()


def test_where_the_loss_cannot_be_replayed_its_curvature_is_looked_at():
    watch, out = watched()
    count = (out > 0).sum().item()
    (F.cross_entropy(out, Y, reduction="sum") / count).backward()
    assert watch.status == "not comparable" and "read into Python" in watch.reason
    watch, out = watched()
    count = (out > 0).sum().item()
    with pytest.raises(UnsupportedModelError, match="the loss mixes examples"):
        (out.sum().square() / (1 + count)).backward()


def test_a_backward_function_of_ones_own_is_not_taken_for_another():
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sign()

        @staticmethod
        def backward(ctx, g):
            return g

    watch, out = watched()
    F.mse_loss(Straight.apply(out), T).backward()
    assert watch.status != "checked"


def test_a_hook_on_the_gradient_is_not_taken_for_checked():
    watch, out = watched()
    out.register_hook(lambda g: None)
    F.cross_entropy(out, Y).backward()
    assert watch.status == "not comparable"
    _, out = watched()
    out.register_hook(lambda g: g / g.norm())
    with pytest.raises(UnsupportedModelError, match="the loss mixes examples"):
        F.cross_entropy(out, Y).backward()


def test_several_outputs_and_a_gradient_for_the_backward():
    model = nn.Linear(FEATURES, CLASSES)
    for mixes in (False, True):
        watch, h = LossWatch(model), model(torch.randn(ROWS, FEATURES))
        out = watch.wrap({"a": h * 1, "b": (h * 2, h.sum())}, ROWS, scaled=False)
        losses = (out["a"] - out["b"][0].detach().mean(0) * mixes).square().mean(1) + out["b"][0].square().sum(1)
        if mixes:
            with pytest.raises(UnsupportedModelError, match="the loss mixes examples"):
                losses.backward(torch.ones(ROWS))
        else:
            losses.backward(torch.ones(ROWS))
            assert watch.status == "checked"


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out: F.mse_loss(out[:, :1], Y.float()), "broadcast"),
        (lambda out: F.cross_entropy(out, Y, weight=torch.tensor([1.0, 2.0, 3.0])), "normaliser"),
        (lambda out: nn.CrossEntropyLoss(ignore_index=0)(out, Y), "normaliser"),
    ],
)
def test_targets_that_mix_examples_are_refused_by_name(loss, words):
    _, out = watched()
    with pytest.raises(UnsupportedModelError, match=words):
        loss(out)


def test_trainable_tensors_outside_the_model_are_refused():
    head, temperature = nn.Linear(CLASSES, CLASSES), torch.ones((), requires_grad=True)
    for loss, words in (
        (lambda out: F.cross_entropy(head(out), Y), r"parameter of shape \(3"),
        (lambda out: F.cross_entropy(out / temperature, Y), r"tensor of shape \(\)"),
        (lambda out: F.cross_entropy(out, Y) + sum(p.norm() for p in head.parameters()), "neither clipped nor noised"),
    ):
        watch, out = watched()
        with pytest.raises(PrivacyViolation, match=words):
            loss(out).backward()
    watch, out = watched()
    F.cross_entropy(F.linear(out, head.weight.detach()) / temperature.detach(), Y).backward()
    assert watch.status == "checked"
    model, x = nn.Linear(FEATURES, FEATURES), torch.randn(ROWS, FEATURES, requires_grad=True)
    watch = LossWatch(model)
    out = watch.wrap(model(x), ROWS, scaled=False)
    ((out - x) ** 2).mean().backward()  # an input is not trained
    assert watch.status == "checked"


def test_a_gradient_scaler_is_refused():
    watch, out = watched()
    scaler = torch.amp.GradScaler("cpu")
    for loss in (F.cross_entropy(out, Y), [F.cross_entropy(out, Y)]):
        with pytest.raises(PrivacyViolation, match="GradScaler"):
            scaler.scale(loss)
    torch.amp.GradScaler("cpu", enabled=False).scale(F.cross_entropy(out, Y)).backward()
    assert watch.status == "checked"


def test_a_running_mean_of_the_users_is_written_once():
    watch, out = watched()
    mean, seen = torch.zeros(CLASSES), []
    mean.mul_(0.9).add_(0.1 * out.detach().mean(0))
    expected = mean.clone()
    seen.append(out.detach())
    F.cross_entropy(out, Y).backward()
    assert watch.status == "checked" and torch.equal(mean, expected)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_marked_tensors_are_used_like_any_other():
    watch, out = watched()
    loss = F.cross_entropy(out, Y)
    assert repr(loss).startswith("tensor(") and f"{loss:.2f}" == f"{loss.item():.2f}" and float(loss) == loss.item()
    for t in (copy.deepcopy(loss.detach()), pickle.loads(pickle.dumps(out.detach()))):
        assert type(t) is torch.Tensor
    file = io.BytesIO()
    torch.save({"loss": loss.detach()}, file)
    file.seek(0)
    assert type(torch.load(file)["loss"]) is torch.Tensor
    assert np.asarray(out.detach()).shape == out.detach().numpy().shape == (ROWS, CLASSES)
    assert len(out) == ROWS and out.tolist() and bool((out == out).all())
    assert isinstance(out.detach().cpu(), torch.Tensor)
    loss.backward()
    assert watch.status == "checked"
    assert type(loss.detach() * 2) is torch.Tensor  # nothing is marked after the batch


def test_nothing_is_kept_after_the_batch():
    watch, out = watched()
    F.cross_entropy(out, Y).backward()
    kept = weakref.ref(out)
    del out
    gc.collect()
    assert kept() is None and watch.tape is None
    _, first = watched(), None
    out = watch.wrap(nn.Linear(FEATURES, CLASSES)(torch.randn(ROWS, FEATURES)), ROWS, scaled=False)
    first = weakref.ref(out.square().mean())
    assert first() is not None  # the record holds it
    assert type(watch.wrap(torch.randn(1, 3), 1, scaled=False)) is torch.Tensor
    gc.collect()
    assert first() is None and watch.status == "not seen"


def test_the_loss_of_another_model_is_not_taken_for_ones_own():
    watch, out = watched()
    other, theirs = watched()
    F.cross_entropy(theirs, Y).backward()
    assert (watch.status, other.status) == ("not seen", "checked")
    F.cross_entropy(out, Y).backward()
    assert watch.status == "checked"


# ---- the parts


@pytest.mark.parametrize(("rows", "views"), [(2, 1), (3, 1), (7, 1), (8, 2), (6, 3)])
def test_every_row_is_kept_once_and_every_other_row_replaced(rows, views):
    split = Split.random(rows, views)
    kept = torch.cat([kept for kept, _ in split.replacements()])
    assert sorted(kept.tolist()) == list(range(rows))
    for kept, index in split.replacements():
        assert torch.equal(index[kept], kept)
        others = [r for r in range(rows) if r not in kept.tolist()]
        assert all(int(index[r]) in kept.tolist() and int(index[r]) % views == r % views for r in others)
    assert Split.random(views, views) is None


def test_differences_are_those_of_the_rows_that_are_kept():
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0], [torch.nan, torch.inf]])
    b = torch.tensor([[1.0, 2.0], [3.0, 5.0], [torch.nan, torch.inf]])
    assert largest_difference(a, b, torch.tensor([0, 2])) == 0
    assert largest_difference(a, b, torch.tensor([0, 1])) == pytest.approx(0.2)
    assert largest_difference(a, a.nan_to_num(0.0), torch.tensor([2])) == float("inf")


def test_a_tape_gives_the_loss_of_other_outputs():
    out = torch.randn(ROWS, CLASSES, requires_grad=True).clone()
    watch = LossWatch()
    loss = F.cross_entropy(watch.wrap(out, ROWS, scaled=False), Y)
    assert isinstance(watch.tape, Tape) and isinstance(loss, _Recorded)
    other = torch.randn(ROWS, CLASSES, requires_grad=True)
    with torch._C.DisableTorchFunctionSubclass():
        found, (grad,) = watch.tape.replay([other], loss, None)
    expected = F.cross_entropy(other, Y)
    assert torch.equal(found, expected.detach())
    assert torch.equal(grad, torch.autograd.grad(expected, other)[0])
