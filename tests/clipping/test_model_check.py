"""What plain runs on the first batch tell, and what they leave behind: nothing."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from made import Made, follow, like_the_reference, weight
from networks import compare
from torch import nn
from torch.nn import functional as F

from gradveil.clipping.validation.spot_checks import FIRST
from gradveil.errors import PrivacyViolation, UnsupportedModelError


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


# ---- how inputs follow the batch


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("rows", [8, 5])
def test_a_table_of_constants_is_not_taken_for_the_batch(clipping, whole, rows):
    """A layer is run on the examples and on constants, of which there may be as many: rows of them are nobody's."""
    layer = Made(lambda m, x: x @ m.w, w=weight(2, 3)) if whole else nn.Linear(2, 3, bias=False)
    model = Made(
        lambda m, x: m.encode(x) @ m.encode(m.table).T @ m.mix,
        encode=layer,
        table=torch.randn(rows, 2),
        mix=torch.randn(rows, 3),
    )
    compare(model.double(), torch.randn(8, 2).double(), torch.randint(0, 3, (8,)), clipping=clipping)


def lately(late, early):
    """A model that does something else from its second call on."""

    def forward(m, x):
        m.calls += 1
        return (late if m.calls > 1 else early)(m, x)

    return forward


@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_that_is_called_later_is_looked_at_then(whole):
    layer = Made(lambda m, x: x @ m.w, w=weight(6, 6)) if whole else nn.Linear(6, 6, bias=False)
    late = lately(
        lambda m, x: m.head(m.late(x.transpose(0, 1)).transpose(0, 1).mean(1)), lambda m, x: m.head(x.mean(1))
    )
    model = Made(late, late=layer, head=nn.Linear(6, 2))
    model.calls = 0
    follow(model, bound=1e-3)
    model(torch.randn(8, 8, 6)).square().sum().backward()
    assert model.calls == 1  # runs beside the user's own do not count
    with pytest.raises(UnsupportedModelError, match="called for the first time after the first batch"):
        model(torch.randn(8, 8, 6))


@pytest.mark.parametrize("draws", [False, True])
def test_a_layer_that_is_called_later_as_it_should_be(draws):
    late = lately(
        lambda m, x: m.head(F.dropout(m.late(x), 0.5, training=draws)), lambda m, x: m.head(F.dropout(x, 0.5, draws))
    )
    model = Made(late, late=nn.Linear(6, 6), head=nn.Linear(6, 2))
    model.calls = 0
    clipper = follow(model)
    for _ in range(3):
        model(torch.randn(8, 6)).square().sum().backward()
    assert model.calls == 3 and len(clipper.units) == 2
    assert not clipper.call.model.is_incomplete


@pytest.mark.parametrize("descending", [False, True])
def test_a_model_that_sorts_where_its_first_batch_is_in_order(descending):
    def forward(m, x):
        order = x[:, 0].argsort(descending=descending)
        return m.head(torch.tanh(m.first(x[order]))[order.argsort()])

    model = Made(forward, first=nn.Linear(3, 3), head=nn.Linear(3, 1)).double()
    plain, x = copy.deepcopy(model), torch.randn(4, 3).double()
    clipper = follow(model)
    for batch in (x[x[:, 0].argsort(descending=descending)], x, x.flip(0)):
        like_the_reference(clipper, plain, batch)


def test_a_model_that_sorts_may_be_clipped_per_layer():
    model = Made(lambda m, x: m.only(x[x[:, 0].argsort()])[x[:, 0].argsort().argsort()], only=nn.Linear(3, 1))
    follow(model, "per-layer")
    model(torch.randn(4, 3)).sum().backward()


@pytest.mark.parametrize("batch", [3, 4])
def test_arguments_that_have_the_size_of_the_batch_by_chance(batch):
    """A mask (T, T) and positions (T) are the same for all examples, also where T is the batch."""
    attend = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Made(lambda m, x, mask: m.attend(x, x, x, attn_mask=mask)[0], attend=attend)
    follow(model)
    model(torch.randn(batch, 4, 4), torch.ones(4, 4).triu(1).bool()).sum().backward()
    model = Made(lambda m, x, places: m.layer(x) + m.place(places), layer=nn.Linear(4, 4), place=nn.Embedding(9, 4))
    follow(model)
    model(torch.randn(batch, 4, 4), torch.arange(4)).sum().backward()


def test_a_model_that_mixes_its_arguments_is_still_refused():
    """What may be of the examples is not taken for a constant."""
    model = Made(lambda m, x, y: m.layer(x + y.mean(0)), layer=nn.Linear(4, 4))
    follow(model)
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        model(torch.randn(4, 4), torch.randn(4, 4))
    model = Made(lambda m, x, ids: m.layer(x + (ids * torch.arange(1, 1 + len(ids))).sum()), layer=nn.Linear(4, 4))
    follow(model)
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        model(torch.randn(4, 4), torch.tensor([3, 1, 0, 2]))


def test_a_constant_that_cannot_be_told_from_examples_is_refused_clearly():
    attend = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Made(lambda m, x, mask: m.attend(x, x, x, attn_mask=mask)[0], attend=attend)
    follow(model)
    with pytest.raises(UnsupportedModelError, match=r"with 5 or 7 of its examples.*register it as a buffer"):
        model(torch.randn(4, 4, 4), torch.randn(4, 4))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_time_first_where_the_first_batch_is_small(first):
    model = Made(lambda m, x: m.scale(x.transpose(0, 1)).transpose(0, 1), scale=Made(lambda m, x: x * m.w, w=weight(6)))
    follow(model)
    for batch in (first, 3, 1, 0):
        model(torch.randn(batch, 4, 6)).square().sum().backward()


# ---- runs beside the user's own


class Merging(nn.Linear):
    """An adapter that is merged into the weight in eval mode, as loralib has it."""

    def __init__(self):
        super().__init__(6, 3)
        self.requires_grad_(False)
        self.down, self.up, self.merged = weight(2, 6), weight(3, 2), False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down)
            self.merged = not mode
        return self

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + (0 if self.merged else x @ self.down.T @ self.up.T)


def test_a_module_that_does_more_in_its_train_method():
    model = Merging()
    before = model.weight.clone()
    follow(model)
    model(torch.randn(4, 6)).square().sum().backward()
    assert torch.equal(model.weight, before) and model.training and not model.merged
    assert float(model.down.grad.norm()) > 0


def test_buffers_that_cannot_be_written_to():
    model = Made(lambda m, x: m.layer(x * m.mask[0]), layer=nn.Linear(6, 2), mask=torch.ones(6).expand(2, 6))
    follow(model)
    model(torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_transformer_in_eval_mode_with_padding():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = Made(lambda m, x, pad: m.encode(x, src_key_padding_mask=pad), encode=nn.TransformerEncoder(layer, 1)).eval()
    follow(model)
    lengths = torch.tensor([5, 3, 4])
    model(torch.randn(3, 5, 8), torch.arange(5) >= lengths.unsqueeze(1)).square().sum().backward()
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_model_that_differentiates_inside_is_refused():
    def forces(m, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(m.layer(x).square().sum(), x, create_graph=True)[0]

    model = Made(forces, layer=nn.Linear(6, 6))
    follow(model)
    with pytest.raises(UnsupportedModelError, match="differentiates inside its own forward"):
        model(torch.randn(4, 6))


# ---- what the loss is made of


def with_a_kept_activation():
    def forward(m, x):
        z = m.first(x)
        m.kept = z.square().sum(1)
        return m.head(z)

    return Made(forward, first=nn.Linear(6, 6), head=nn.Linear(6, 2))


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_a_loss_from_beside_the_output_is_refused_where_outputs_are_scaled(clipping):
    model = with_a_kept_activation()
    follow(model, clipping, reduction="mean")
    loss = model(torch.randn(4, 6)).square().sum(1).mean() + model.kept.mean()
    with pytest.raises(PrivacyViolation, match="something beside it"):
        loss.backward()
    model = with_a_kept_activation()
    clipper = follow(model, clipping, bound=1e9)
    x = torch.randn(4, 6)
    (model(x).square().sum() + model.kept.sum()).backward()  # a sum: nothing is scaled
    found = [p.grad for p in model.parameters()]
    clipper.detach()
    expected = torch.autograd.grad(model(x).square().sum() + model.kept.sum(), list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_a_loss_from_elsewhere_than_the_output_is_refused(clipping):
    model = with_a_kept_activation()
    follow(model, clipping)
    model(torch.randn(4, 6))
    with pytest.raises(PrivacyViolation, match="other than the model's output"):
        model.kept.sum().backward()


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8])
def test_a_mean_is_one_whatever_numbers_its_operations_take(rows):
    """Dimensions and classes may be the number of rows by chance: they count nothing."""

    def loss(logits, y):
        losses = F.cross_entropy(logits.transpose(1, 2), y, reduction="none", ignore_index=2).mean(1)
        return losses.sum() / max(len(losses), 1)

    y = torch.randint(0, 8, (rows, 5))
    for wrong in (False, True):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8))
        follow(model, reduction="mean")
        out = model(torch.randint(0, 10, (rows, 5)))
        if wrong:
            with pytest.raises(UnsupportedModelError, match="its normaliser is not the number of examples"):
                (rows * loss(out, y)).backward()
        else:
            loss(out, y).backward()


# ---- checks that were refused, or never came about, are made again


def train(model, steps):
    for _ in range(steps):
        model(torch.randn(8, 6)).square().sum().backward()


def test_a_model_that_was_refused_is_refused_again():
    model = Made(lambda m, x: m.layer(x) - m.layer(x).mean(0), layer=nn.Linear(6, 3))
    follow(model)
    for _ in range(3):
        with pytest.raises(UnsupportedModelError, match="mixes examples"):
            model(torch.randn(4, 6))


def test_a_first_batch_that_fails_does_not_count():
    model = Made(lambda m, x: m.layer(x).cumsum(0), layer=nn.Linear(6, 3))
    follow(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 5))
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        model(torch.randn(4, 6))


def curved(out):
    return (out.T @ out).logdet()


def counts_labels(out):
    return F.cross_entropy(out, torch.arange(8) % 3, weight=torch.tensor([1.0, 2.0, 3.0]), reduction="mean")


@pytest.mark.parametrize("loss", [curved, counts_labels])
def test_a_loss_that_was_refused_is_refused_again(loss):
    model = nn.Linear(6, 3)
    follow(model)
    for _ in range(12):
        with pytest.raises(UnsupportedModelError, match=r"the loss mixes examples|its normaliser depends"):
            loss(model(torch.randn(8, 6))).backward()


def test_mixing_in_training_alone_is_refused_again():
    model = Made(lambda m, x: m.layer(x - x.mean(0) if m.training else x), layer=nn.Linear(6, 3))
    follow(model)
    for _ in range(12):
        with pytest.raises(UnsupportedModelError, match="mixes examples"):
            model(torch.randn(8, 6))
    model.eval()
    train(model, 2)


def test_an_output_that_was_not_differentiated_does_not_count():
    model = nn.Linear(6, 3)
    follow(model)
    for _ in range(FIRST):
        model(torch.randn(8, 6))
        assert type(model(torch.randn(8, 6))) is not torch.Tensor  # marked, until its loss was looked at
        train(model, 1)
    assert type(model(torch.randn(8, 6))) is torch.Tensor  # nothing is marked any more


def attends_over_the_batch(m, x):
    q = m.first(x).transpose(0, 1)
    return m.head(F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(0, 1)).mean(1)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("forward", [attends_over_the_batch, lambda m, x: m.head(m.first(x)).cumsum(0)])
def test_mixing_that_leaves_the_first_example_alone(forward, clipping):
    model = Made(forward, first=nn.Linear(6, 6), head=nn.Linear(6, 3))
    follow(model, clipping)
    with pytest.raises(UnsupportedModelError, match=r"mixes examples|in their order"):
        model(torch.randn(5, 3, 6))


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("in_order", [False, True])
def test_two_uses_of_a_layer_with_rows_in_another_order(clipping, in_order):
    def forward(m, a, b):
        order = b[:, 0].argsort()
        return torch.cat([m.encode(a), m.encode(b[order])[order.argsort()]], 1)

    model, b = Made(forward, encode=nn.Linear(6, 4)).double(), torch.randn(4, 6).double()
    plain = copy.deepcopy(model)
    clipper = follow(model, clipping)
    like_the_reference(clipper, plain, torch.randn(4, 6).double(), b[b[:, 0].argsort()] if in_order else b)


@pytest.mark.parametrize("right", [True, False])
def test_a_layer_that_is_called_every_other_time(right):
    """It is looked at from the state before the pass that called it, and refused where that does not reach it."""

    def forward(m, x):
        m.calls += 1
        h = m.first(x)
        if m.calls % 2 == 0:
            h = h + (m.late(x) if right else m.late(m.table).sum(0))
        return m.head(h)

    layers = {"first": nn.Linear(6, 6), "late": nn.Linear(6, 6, bias=False), "head": nn.Linear(6, 3)}
    model = Made(forward, **layers, table=torch.randn(8, 6))
    nn.init.zeros_(model.late.weight)
    model.calls = 0
    follow(model)
    if right:
        train(model, 4)
        assert model.calls == 4
    else:
        with pytest.raises(UnsupportedModelError, match="first dimension"):
            train(model, 4)
        assert model.calls <= 2


def test_a_late_layer_that_is_not_reached_once_more_is_refused():
    late = []

    def forward(m, x):  # reached in the user's own pass only
        return m.head(m.late(x)) if late and clipper.call.is_under_way else m.head(x)

    model = Made(forward, late=nn.Linear(6, 6), head=nn.Linear(6, 3))
    clipper = follow(model)
    train(model, FIRST + 1)
    late.append(True)
    with pytest.raises(UnsupportedModelError, match="could not be seen"):
        train(model, 1)


def test_layers_left_out_by_python_or_numpy_draws():
    def forward(m, x):
        h = m.first(x)
        if random.random() < 0.5:
            h = h + m.by_python(h)
        if np.random.rand() < 0.5:  # noqa: NPY002
            h = h + m.by_numpy(h)
        return m.head(h)

    names = ("first", "by_python", "by_numpy")
    for seed in range(4):
        random.seed(seed), np.random.seed(seed)  # noqa: NPY002
        model = Made(forward, **{name: nn.Linear(6, 6) for name in names}, head=nn.Linear(6, 3))
        follow(model)
        for _ in range(6):
            model(torch.randn(4, 6)).square().sum().backward()
        followed = random.random(), np.random.rand()  # noqa: NPY002
        random.seed(seed), np.random.seed(seed)  # noqa: NPY002
        for _ in range(6):
            random.random(), np.random.rand()  # noqa: NPY002
        assert followed == (random.random(), np.random.rand())  # noqa: NPY002


def test_a_model_may_be_compiled_after_it_is_followed():
    """The compiler is loaded only then, so the test has a process of its own."""
    lines = """
        import torch
        from torch import nn
        from gradveil.clipping import Clipper, make_groups
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        groups = make_groups(model, "flat")
        clipper = Clipper(model, groups, bounds=[0.5], loss_reduction="sum")
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            compiled(torch.randn(4, 6)).square().sum().backward()
        print("examples", clipper.clip_stats.examples)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(lines)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "examples 8", done.stderr
