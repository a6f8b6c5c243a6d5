"""What a second reviewer got past the engine, or was turned away with, and why it no longer is so."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

import gradveil
from gradveil.errors import ConfigError, GradveilError, LedgerError, PrivacyViolation, RunDirectoryError
from loops import dataset, network, run, start


def take(model, loader, steps):
    for i, (x, y) in enumerate(loader, start=1):
        F.cross_entropy(model(x), y).backward()
        if i == steps:
            break


def stopped(at=3, **settings):
    """An engine that has stopped early."""
    engine, model, _, loader = start(**settings)
    take(model, loader, at)
    return engine


# ---- what a run declared goes with its checkpoint


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 3},
        {"steps": 11},
        {"stopping": "public"},
        {"sigma": 3.0},
        {"strategy": "dyn-sigma-decay", "sigma": 4.0, "sigma_end": 2.0},
        {"budget": 1.2},
    ],
    ids=str,
)
def test_a_checkpoint_is_not_loaded_where_less_would_be_charged(settings):
    state = stopped().state_dict()
    other, *_ = start(**settings)
    with pytest.raises(LedgerError, match=r"declared 12 steps.*released 3.*would charge less.*Declare at least"):
        other.load_state_dict(state)
    assert not other.releases and other.step == 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"steps": 20}, {"sigma": 1.5}, {"stopping": "private"}, {"budget": 50.0}],
    ids=str,
)
def test_a_checkpoint_is_loaded_where_at_least_as_much_is_charged(settings):
    origin = stopped()
    other, *_ = start(**settings)
    other.load_state_dict(origin.state_dict())
    assert other.epsilon >= origin.epsilon * (1 - 1e-9)
    assert other.statement().proved.steps_charged == settings.get("steps", 12)


def test_the_charge_goes_along_from_one_engine_to_the_next():
    first = stopped()
    second, *_ = start(steps=20)
    second.load_state_dict(first.state_dict())
    third, *_ = start(steps=12)
    with pytest.raises(LedgerError, match="declared 20 steps"):
        third.load_state_dict(second.state_dict())


@pytest.mark.parametrize("origin", [{"steps": 3}, {"stopping": "public"}], ids=str)
def test_a_run_that_has_nothing_left_to_charge_may_be_followed_by_any_plan(origin):
    engine = stopped(**origin)
    other, model, optimizer, loader = start(steps=5, sigma=8.0, stopping="public")
    other.load_state_dict(engine.state_dict())
    assert other.epsilon == pytest.approx(engine.epsilon)
    run(other, model, optimizer, loader)
    assert len(other.releases) == 5


def test_a_checkpoint_that_does_not_say_how_it_stops_is_charged_as_by_default():
    from gradveil.accounting import _spent

    state = stopped(stopping="public").state_dict()
    del state["spent"]["header"]["stopping"]
    state["spent"]["sha256"] = _spent._checksum(state["spent"])
    other, *_ = start(stopping="public")
    with pytest.raises(LedgerError, match="would charge less"):
        other.load_state_dict(state)
    other, *_ = start()
    other.load_state_dict(state)


def test_loading_the_same_checkpoint_again_charges_it_once(tmp_path):
    state = stopped(5).state_dict()
    other, model, _, loader = start(run_dir=tmp_path / "run")
    for _ in range(2):
        other.load_state_dict(state)
        assert (other.step, len(other.releases)) == (5, 5)
    take(model, loader, 2)
    other.load_state_dict(state)
    assert (other.step, len(other.releases)) == (5, 7)
    other.detach()
    again, *_ = start(run_dir=tmp_path / "run", resume=True)
    again.load_state_dict(state)
    assert len(again.releases) == 7
    with pytest.raises(RunDirectoryError, match="would not be charged"):
        again.load_state_dict(stopped(2).state_dict())


def test_a_load_that_a_kill_cut_short_is_completed_by_loading_again(tmp_path):
    state = stopped(5).state_dict()
    other, *_ = start(run_dir=tmp_path / "run")
    other.load_state_dict(state)
    other.detach()
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-2]))
    again, model, _, loader = start(run_dir=tmp_path / "run", resume=True)
    assert len(again.releases) == 3
    with pytest.raises(LedgerError, match="Load the checkpoint again"):
        take(model, loader, 1)
    again.load_state_dict(state)
    assert len(again.releases) == 5


# ---- parts, and pieces of the user's own


def of_parts(**settings):
    return start(sampling="without-replacement", batch_size=9, physical=3, steps=2, **settings)


def loss_of(model, part):
    return F.cross_entropy(model(part[0]), part[1])


def test_a_part_twice_and_another_never_is_refused():
    engine, model, _, loader = of_parts()
    part = next(iter(loader))
    loss_of(model, part).backward()
    with pytest.raises(PrivacyViolation, match=r"6 examples went through backward\(\) for a part of.* that has 3"):
        loss_of(model, [t.clone() for t in part]).backward()
    assert not engine.releases and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("rows", [0, 2])
def test_a_part_that_is_skipped_is_refused_at_the_next_one(rows):
    engine, model, _, loader = of_parts()
    parts = iter(loader)
    loss_of(model, next(parts)).backward()
    x, y = next(parts)
    if rows:
        loss_of(model, (x[:rows], y[:rows])).backward()
    with pytest.raises(PrivacyViolation, match=f"when {rows} of the 3 examples of the last part"):
        next(parts)
    assert not engine.releases


def test_parts_in_pieces_and_parts_with_dropped_examples_are_fine():
    engine, model, _, loader = of_parts()
    for x, y in loader:
        for piece in zip(x.split(2), y.split(2), strict=True):
            loss_of(model, piece).backward()
    assert len(engine.releases) == 2
    engine, model, _, loader = of_parts(drops_examples=True)
    for x, y in loader:
        loss_of(model, (x[:2], y[:2])).backward()
    assert len(engine.releases) == 2


def test_parts_that_an_error_took_are_not_made_up_for_by_others(monkeypatch):
    engine, model, _, loader = of_parts()
    parts = iter(loader)
    loss_of(model, next(parts)).backward()
    part = next(parts)

    def fails():
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine._clipper, "take_sums", fails)
        with pytest.raises(MemoryError):
            loss_of(model, part).backward()
    with pytest.raises(PrivacyViolation, match="earlier parts of the batch of step 0 were given up"):
        loss_of(model, part).backward()
    assert not engine.releases
    for part in loader:
        loss_of(model, part).backward()
    assert len(engine.releases) == 2


def test_the_same_rows_twice_and_others_never_are_refused():
    engine, model, _, loader = start(sampling="without-replacement", batch_size=10)
    x, y = next(iter(loader))
    loss_of(model, (x[:5], y[:5])).backward()
    with pytest.raises(PrivacyViolation, match=r"row 4 of the batch went through backward\(\) twice"):
        loss_of(model, (x[4:9], y[4:9])).backward()
    assert not engine.releases and all(p.grad is None for p in model.parameters())
    for rows in (slice(0, 10, 2), slice(1, 10, 2)):  # what was summed up is gone, and all of it may come again
        loss_of(model, (x[rows], y[rows])).backward()
    assert len(engine.releases) == 1


def test_pieces_may_be_computed_before_they_are_differentiated_and_again_after_an_error():
    engine, model, _, loader = start(sampling="without-replacement", batch_size=10)
    x, y = next(iter(loader))
    first, second = loss_of(model, (x[:5], y[:5])), loss_of(model, (x[5:], y[5:]))
    model(x[2:7])  # never differentiated

    def fails(grad):
        raise MemoryError

    first.backward()
    again = second * 1.0
    again.register_hook(fails)
    with pytest.raises(MemoryError):
        again.backward()
    loss_of(model, (x[5:], y[5:])).backward()
    assert len(engine.releases) == 1


# ---- the batch that was drawn


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.flatten(1).unflatten(1, (1, 5, 5)), lambda t: t[:]])
@pytest.mark.parametrize("spot_checks", [0.0, 1.0])
def test_an_earlier_batch_in_place_of_the_one_drawn_is_refused(view, spot_checks):
    engine, model, _, loader = start(sampling="without-replacement", spot_checks=spot_checks)
    batches = iter(loader)
    x, y = next(batches)
    old = view(x)
    del x
    F.cross_entropy(model(old), y).backward()
    _, y = next(batches)
    loss = F.cross_entropy(model(old), y)
    with pytest.raises(PrivacyViolation, match=r"handed out earlier \(for step 0\).*last \(for step 1\)"):
        loss.backward()
    assert len(engine.releases) == 1


def test_an_earlier_batch_beside_the_one_drawn_is_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(25, 3)

        def forward(self, x, *, other):
            return self.layer(x.flatten(1)) + self.layer(other.flatten(1))

    engine, model, _, loader = start(model=Pair(), sampling="without-replacement")
    batches = iter(loader)
    old, y = next(batches)
    F.cross_entropy(model(old, other=old), y).backward()
    x, y = next(batches)
    with pytest.raises(PrivacyViolation, match="handed out earlier"):
        F.cross_entropy(model(x, other=old), y).backward()
    assert len(engine.releases) == 1


def test_an_earlier_part_in_place_of_the_one_handed_out_is_refused():
    engine, model, _, loader = of_parts()
    parts = iter(loader)
    first = next(parts)
    loss_of(model, first).backward()
    next(parts)
    with pytest.raises(PrivacyViolation, match="of a part of one, that the loader had handed out earlier"):
        loss_of(model, first).backward()
    assert not engine.releases


def test_batches_in_mappings_are_known_too():
    data = [{"x": x, "y": y} for x, y in zip(*dataset().tensors, strict=True)]
    loader = DataLoader(data, batch_size=10, collate_fn=lambda examples: UserDict(default_collate(examples)))
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=2.0, steps=4, delta=1e-3, sampling="without-replacement")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader)
    batches = iter(loader)
    old = next(batches)
    F.cross_entropy(model(old["x"]), old["y"]).backward()
    next(batches)
    with pytest.raises(PrivacyViolation, match="handed out earlier"):
        F.cross_entropy(model(old["x"]), old["y"]).backward()


def test_looking_at_an_earlier_batch_is_fine():
    engine, model, _, loader = start(steps=4)
    old, _ = next(iter(loader))
    for x, y in loader:
        model(old)  # without backward()
        with torch.no_grad():
            model(old)
        F.cross_entropy(model(x), y).backward()
    assert len(engine.releases) == 4


def test_a_collate_fn_may_use_the_same_memory_again():
    buffers = [torch.empty(60, 1, 5, 5) for _ in range(2)]
    made = []

    def collate(examples):
        made.append(None)
        x, y = default_collate(examples)
        buffer = buffers[len(made) % 2]
        buffer[: len(x)] = x
        return buffer[: len(x)], y

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=2.0, steps=6, delta=1e-3)
    loader = DataLoader(dataset(), batch_size=10, collate_fn=collate)
    model, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader)
    take(model, loader, 6)
    assert len(engine.releases) == 6


def test_the_statement_assumes_that_each_step_is_on_its_own_batch():
    notes = " / ".join(stopped().statement().assumptions)
    assert "each step is taken on the batch that was drawn for it" in notes and "run_step" not in notes
    engine, model, _, loader = start(steps=2)
    for batch in loader:
        engine.run_step(lambda x, y: F.cross_entropy(model(x), y), *batch)
    assert any("from run_step's arguments on" in note for note in engine.statement().assumptions)


# ---- examples that are there several times


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: Subset(d, [0] * 10 + list(range(60))), r"example 0 of the TensorDataset is 11 times.*Subset"),
        (lambda d: Subset(d, [*range(59), -1, 59]), "example 59 of the TensorDataset is 2 times"),
        (lambda d: Subset(Subset(d, [5, 6, 5]), [0, 1, 2]), "example 5"),
        (lambda d: Subset(d, torch.tensor([3, 4, 4])), "example 4"),
        (lambda d: ConcatDataset([d, d]), "is 2 times in the training set .a ConcatDataset"),
        (lambda d: ConcatDataset([Subset(d, range(30)), Subset(d, range(29, 60))]), "example 29"),
        (lambda d: Subset(ConcatDataset([d, d]), [1, 61, 7]), "example 1 "),
    ],
)
def test_a_data_set_that_repeats_examples_is_refused(make, words):
    with pytest.raises(ConfigError, match=words) as refused:
        private(make(dataset()))
    assert "views=K" in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: Subset(d, range(0, 60, 2)),
        lambda d: Subset(Subset(d, [5, 6, 5, 7]), [0, 1, 3]),
        lambda d: ConcatDataset([d, dataset(seed=1)]),
        lambda d: Subset(ConcatDataset([d, d]), [1, 60, 7]),
    ],
)
def test_a_data_set_that_holds_each_example_once_is_fine(make):
    engine, model, loader = private(make(dataset()))
    take(model, loader, 2)
    assert len(engine.releases) == 2


def private(data, *, collate=None, batch_size=3, model=None, run_dir=None):
    model = network() if model is None else model
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=2.0, steps=4, delta=1e-3, run_dir=run_dir)
    loader = DataLoader(data, batch_size=batch_size, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader)
    return engine, model, loader


# ---- what a collate_fn does


def mixup(examples):
    x, y = default_collate(examples)
    y, weight = F.one_hot(y, 3).float(), np.random.beta(1.0, 1.0)  # noqa: NPY002
    return weight * x + (1 - weight) * x.roll(1, 0), weight * y + (1 - weight) * y.roll(1, 0)


def centred(examples):
    x, y = default_collate(examples)
    return x - x.mean(0), y


def first_in_all_rows(examples):
    x, y = default_collate(examples)
    return x[:1].expand_as(x).clone(), y[:1].expand_as(y).clone()


def labels_of_others(examples):
    x, y = default_collate(examples)
    return x, y.roll(1)


def with_negatives(examples):
    x, y = default_collate(examples)
    return UserDict(x=x, negatives=x.flip(0), y=y)


@pytest.mark.parametrize("collate", [mixup, centred, first_in_all_rows, labels_of_others, with_negatives])
def test_a_collate_fn_that_mixes_examples_is_refused(collate, tmp_path):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 1, 5, 5), torch.arange(60) % 3)
    model = network()
    state = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    with pytest.raises(PrivacyViolation, match="collate_fn mixes examples"):
        private(data, collate=collate, model=model, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert torch.equal(torch.get_rng_state(), state[0]) and (np.random.get_state()[1] == state[1]).all()  # noqa: NPY002


class Words(Dataset):
    """Sequences of different lengths."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        return torch.randn(1 + i % 5, 4, generator=draw), i % 3


def padded(examples):
    x, y = zip(*examples, strict=True)
    return nn.utils.rnn.pad_sequence(x, batch_first=True), torch.tensor(y)


def sorted_by_length(examples):
    """With the order, and labels that keep theirs."""
    lengths, order = torch.tensor([len(x) for x, _ in examples]).sort(descending=True)
    x, _ = padded([examples[i] for i in order])
    return x, torch.tensor([y for _, y in examples]), lengths, order


def sorted_and_noised(examples):
    x, y, *_ = sorted_by_length(examples)
    return x + 0.1 * torch.randn_like(x), y


def with_offsets(examples):
    x, y = zip(*examples, strict=True)
    return padded(examples)[0], torch.tensor([0, *map(len, x[:-1])]).cumsum(0), torch.tensor(y)


def not_repeatable(examples):
    x, y = default_collate(examples)
    return x + torch.from_numpy(np.random.default_rng().normal(size=x.shape)).float(), y


def flipped_by_draws(examples):
    return default_collate([(x.flip(-1) if torch.rand(()) < 0.5 else x, y) for x, y in examples])


def taken_apart(examples):
    x = torch.stack([example.pop("x") for example in examples])
    return x, torch.tensor([example.pop("y") for example in examples])


@pytest.mark.parametrize(
    ("data", "collate"),
    [
        (Words(), padded),
        (Words(), sorted_by_length),
        (Words(), sorted_and_noised),
        (Words(), with_offsets),
        (dataset(), not_repeatable),
        (dataset(), flipped_by_draws),
        ([{"x": torch.randn(4), "y": i % 3} for i in range(40)], taken_apart),
        ([(torch.full((3,), torch.nan), 0.0)] * 40, default_collate),
        ([(torch.full((3,), torch.nan), 0.0)] * 40, lambda examples: default_collate(examples)),
    ],
)
def test_a_collate_fn_that_keeps_examples_apart_is_fine(data, collate):
    private(data, collate=collate, model=nn.Linear(4, 3))


def test_padding_does_not_hide_that_examples_are_mixed():
    def mixed(examples):
        x, y = padded(examples)
        return x - x.mean((0, 1)), y

    with pytest.raises(PrivacyViolation, match="collate_fn mixes examples"):
        private(Words(), collate=mixed, model=nn.Linear(4, 3))


# ---- copies, and numbers that are not Python's own


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_engines_and_loaders_are_not_copied(copied):
    engine, model, _, loader = start()
    for thing, words in ((engine, r"same secret key.*engine.state_dict\(\)"), (loader, "Use the loader itself")):
        with pytest.raises(GradveilError, match=words):
            copied(thing)
    assert type(copied(model)) in (type(model), bytes)


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor, np.array])
def test_numbers_of_numpy_and_torch_are_numbers(number):
    engine, model, optimizer, loader = start(
        clip=number(1.0),
        sigma=number(2.0),
        delta=number(0.0009765625),
        steps=np.int64(3),
        views=np.int32(1),
        spot_checks=number(0.5),
        budget=number(50.0),
        physical=np.int64(8),
        seed=np.int64(4),
        strategy="quantile-clip",
        options={"quantile": number(0.5)},
    )
    run(engine, model, optimizer, loader)
    plain, model, optimizer, loader = start(
        steps=3,
        delta=0.0009765625,
        seed=4,
        physical=8,
        budget=50.0,
        strategy="quantile-clip",
        options={"quantile": 0.5},
    )
    run(plain, model, optimizer, loader)
    assert engine.releases == plain.releases and type(engine.header.delta) is float


def test_what_is_not_one_number_is_refused_by_name():
    for value in (torch.tensor([2.0]), np.ones((1, 2))):
        with pytest.raises(ConfigError, match=r"sigma is an array of shape .1,.*give one number"):
            start(sigma=value)
    for value in (True, "2"):
        with pytest.raises(ConfigError, match="not a finite number"):
            start(sigma=value)
