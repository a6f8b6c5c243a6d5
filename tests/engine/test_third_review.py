"""Doors that a third review found: each is refused, or is not counted as checked."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradveil
from gradveil.accounting.evidence import checks_of
from gradveil.errors import BudgetExhausted, UnsupportedModelError
from loops import start

MIXES = "mixes examples"


def data(n=32):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)


class Net(nn.Module):
    """Two layers, and what is done with the logits."""

    def __init__(self, after=None, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.dropout = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(dropout)
        self.after = after

    def forward(self, x):
        z = self.second(self.dropout(torch.relu(self.first(x))))
        return z if self.after is None else self.after(z)


def made(model, **settings):
    engine = gradveil.PrivacyEngine(
        **{"clip": 1.0, "sigma": 1.0, "steps": 6, "delta": 1e-5, "spot_checks": 1.0} | settings
    )
    loader = DataLoader(TensorDataset(*data()), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader)
    return engine, model, optimizer, loader


def take(model, loader, loss):
    for x, y in loader:
        loss(model, x, y).backward()


@pytest.mark.parametrize("size", [1e5, 1e6, 1e9])
@pytest.mark.parametrize(
    "mix",
    [
        lambda z: z - z.detach().mean(0),
        lambda z: z + z.mean(0),
        lambda z: z.cumsum(0),
        lambda z: z / (1 + z.abs().mean(0)),
    ],
)
def test_a_mask_does_not_hide_that_logits_are_mixed(mix, size):
    mask = torch.tensor([0.0, 0.0, -size])
    _, model, _, loader = made(Net(lambda z: mix(z) + mask))
    with pytest.raises(UnsupportedModelError, match=MIXES):
        take(model, loader, lambda model, x, y: F.cross_entropy(model(x), y.clamp(max=1)))


@pytest.mark.parametrize("size", [1e5, 1e9])
def test_a_mask_by_itself_is_no_reason_to_refuse(size):
    engine, model, _, loader = made(Net(lambda z: z + torch.tensor([0.0, 0.0, -size]), dropout=0.2))
    take(model, loader, lambda model, x, y: F.cross_entropy(model(x), y.clamp(max=1)))
    assert checks_of(engine.ledger.notes, batches=6)["model"] == 6


def test_statistics_of_an_output_without_gradient_are_seen_in_the_loss():
    _, model, _, loader = made(Net(lambda z: (z, z.detach())))

    def loss(model, x, y):
        z, kept = model(x)
        return F.cross_entropy(z - kept.mean(0), y)

    with pytest.raises(UnsupportedModelError, match=MIXES):
        take(model, loader, loss)


def test_an_output_without_gradient_may_be_used_example_by_example():
    engine, model, _, loader = made(Net(lambda z: (z, z.detach())))

    def loss(model, x, y):
        z, kept = model(x)
        return (F.cross_entropy(z, y, reduction="none") * kept.softmax(1)[:, 0]).mean()

    take(model, loader, loss)
    assert checks_of(engine.ledger.notes, batches=6)["loss"] == 6


def centred_by_own_noise(model):
    draw = torch.Generator().manual_seed(0)

    def loss(x, y):
        noise = torch.randn(x.shape, generator=draw)
        return F.cross_entropy(model(x - x.mean(0) + 0.1 * noise), y)

    return loss


def honest_with_own_noise(model):
    draw = torch.Generator().manual_seed(0)
    return lambda x, y: F.cross_entropy(model(x + 0.1 * torch.randn(x.shape, generator=draw)), y)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("step", [centred_by_own_noise, honest_with_own_noise])
def test_a_step_that_is_never_twice_the_same_does_not_count_as_checked(step, dropout):
    engine, model, _, loader = made(Net(dropout=dropout))
    loss = step(model)
    for batch in loader:
        engine.run_step(loss, *batch)
    found = checks_of(engine.ledger.notes, batches=6)
    assert found["whole_step"] == 0 and found["of"] == 6


def test_a_batch_in_the_closure_of_a_step_does_not_count_as_checked():
    engine, model, _, loader = made(Net())

    def loop():
        for x, y in loader:
            w = x.abs().sum(1)
            engine.run_step(
                lambda x, y=y, w=w: (F.cross_entropy(model(x), y, reduction="none") * w / w.mean()).mean(), x
            )

    with pytest.warns(UserWarning, match="pass it as an argument"):
        loop()
    assert checks_of(engine.ledger.notes, batches=6)["whole_step"] == 0


def test_arguments_alone_count_as_before():
    engine, model, _, loader = made(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader:
            engine.run_step(lambda x, y: F.cross_entropy(model(x), y), *batch)
    assert checks_of(engine.ledger.notes, batches=6)["whole_step"] == 6


class Remembers(Net):
    def __init__(self, how):
        super().__init__()
        self.how, self.mean, self.bank, self.calls = how, torch.zeros(6), [torch.zeros(6)], 0
        self.register_buffer("kept", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        if self.how == "attribute":
            before, self.mean = self.mean, 0.9 * self.mean + 0.1 * x.detach().mean(0)
        elif self.how == "list":
            before = torch.stack(self.bank[-4:]).mean(0)
            self.bank.append(x.detach().mean(0))
        elif self.how == "late buffer":
            if self.calls % 5 == 0:
                self.kept.copy_(x.detach().mean(0))
            before = self.kept
        return super().forward(x - before)


@pytest.mark.parametrize("how", ["attribute", "list"])
def test_a_model_that_remembers_a_batch_is_refused(how):
    _, model, _, loader = made(Remembers(how))
    with pytest.raises(UnsupportedModelError, match="the model remembers"):
        take(model, loader, lambda model, x, y: F.cross_entropy(model(x), y))


def test_a_buffer_that_is_written_late_is_refused():
    engine, model, _, loader = made(Remembers("late buffer"), spot_checks=0.0)
    with pytest.raises(UnsupportedModelError, match="has written to buffer 'kept'"):
        take(model, loader, lambda model, x, y: F.cross_entropy(model(x), y))
    assert len(engine.releases) < 5


class Keeps(Net):
    """What it keeps of a batch, it never looks at."""

    def forward(self, x):
        self.seen = super().forward(x)
        self.calls = getattr(self, "calls", 0) + 1
        return self.seen


def test_what_is_kept_and_not_used_is_no_memory():
    engine, model, _, loader = made(Keeps())
    take(model, loader, lambda model, x, y: F.cross_entropy(model(x), y))
    assert len(engine.releases) == 6


def test_spectral_norm_may_start_in_eval_mode():
    net = Net()
    net.first = nn.utils.parametrizations.spectral_norm(net.first)
    engine, model, _, loader = made(net.eval())
    for i, (x, y) in enumerate(loader):
        model.train(i > 1)
        F.cross_entropy(model(x), y).backward()
    assert len(engine.releases) == 6


def test_an_error_carries_no_sums_without_noise():
    _, model, _, loader = start(budget=0.5, sigma=2.0, steps=400, spot_checks=0.0)
    found = []
    try:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
    except BudgetExhausted as error:
        at = error.__traceback__.tb_next  # of the loop itself: x and y
        while at is not None:
            found += [
                (at.tb_frame.f_code.co_name, v)
                for v in at.tb_frame.f_locals.values()
                if isinstance(v, dict | torch.Tensor)
            ]
            at = at.tb_next
    shapes = {p.shape for p in model.parameters()}
    held = [(name, t) for name, v in found for t in (v.values() if isinstance(v, dict) else [v])]
    kept = [(n, t) for n, t in held if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter)]
    assert found and not [(n, t) for n, t in kept if t.shape in shapes]
