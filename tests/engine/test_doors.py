"""Ordinary code cannot get a false epsilon: whatever a loop does, it is within what is charged, or refused."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradveil
from gradveil.clipping import clipped_sums, make_groups
from gradveil.errors import BudgetExhausted, ConfigError, PrivacyViolation, UnsupportedModelError
from loops import N, dataset, network, run, start, weights


def released(engine, model):
    """What .grad holds after one backward pass, and the clipped sums it was made from."""
    torch.manual_seed(1)
    x, y = dataset().tensors
    groups = make_groups(model, engine.settings.clipping)
    return clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=(1.0,) * len(groups)).sums


def one_batch(loader):
    return next(iter(loader))


def feed(model, loader, when=lambda i: True, then=lambda: None):
    """Forward and backward for the batches that are wanted."""
    for i, (x, y) in enumerate(loader):
        if when(i):
            F.cross_entropy(model(x), y).backward()
        then()


# ---- what stands in .grad is noised, whoever uses it


def test_before_the_release_there_is_no_gradient_and_after_it_a_noised_one():
    engine, model, _, loader = start(batch_size=N, sampling="without-replacement", sigma=2.0)
    sums = released(engine, model)
    x, y = one_batch(loader)
    loss = F.cross_entropy(model(x), y)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    noise = torch.cat([(p.grad * N - sums[n]).flatten() for n, p in model.named_parameters()])
    assert 1.0 < float(noise.std()) < 3.0  # sigma C = 2, not 0
    assert len(engine.releases) == 1


@pytest.mark.parametrize("how", ["made anew", "a second one", "by hand", "functional"])
def test_any_optimizer_updates_with_what_was_released(how):
    """The same seeded release gives the same weights, whichever way they are updated."""
    engine, model, optimizer, loader = start(seed=5, steps=4, lr=0.1)
    expected = copy.deepcopy(model)
    for x, y in loader:
        before = [p.detach().clone() for p in model.parameters()]
        F.cross_entropy(model(x), y).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        if how == "made anew":
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        elif how == "a second one":
            half = list(model.parameters())
            torch.optim.SGD(half[:2], lr=0.1).step()
            torch.optim.SGD(half[2:], lr=0.1).step()
        elif how == "by hand":
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        else:
            optimizer.step()
        for p, b, g in zip(model.parameters(), before, grads, strict=True):
            assert torch.allclose(p, b - 0.1 * g, atol=1e-7)
        for p in model.parameters():
            p.grad = None
    assert len(engine.releases) == 4
    engine, expected, optimizer, loader = start(seed=5, steps=4, lr=0.1, model=network())
    run(engine, expected, optimizer, loader)
    assert torch.allclose(weights(model), weights(expected), atol=1e-6)


def test_what_is_done_to_a_released_gradient_is_post_processing():
    engine, model, optimizer, loader = start(steps=3)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        next(model.parameters()).grad.data.mul_(100)
        next(model.parameters()).grad.numpy()[...] *= 100
        optimizer.step()
    assert len(engine.releases) == 3 and engine.epsilon < float("inf")


def test_a_closure_is_a_step_like_any_other():
    engine, model, optimizer, loader = start(steps=3, optimizer="adam")
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert len(engine.releases) == 3


def test_an_optimizer_that_evaluates_twice_is_refused():
    engine, model, _, loader = start()
    x, y = one_batch(loader)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyViolation, match="again after the batch of step 0 was released"):
        F.cross_entropy(model(x), y).backward()
    assert len(engine.releases) == 1


# ---- no un-noised sum can be had


def tensors_reachable(thing, depth=6):
    """Every tensor that attributes and containers lead to."""
    seen, found, todo = set(), [], [(thing, 0)]
    while todo:
        at, level = todo.pop()
        if id(at) in seen or level > depth or isinstance(at, type):
            continue
        seen.add(id(at))
        if isinstance(at, torch.Tensor):
            found.append(at)
        elif isinstance(at, dict):
            todo += [(v, level + 1) for v in at.values()]
        elif isinstance(at, list | tuple | set):
            todo += [(v, level + 1) for v in at]
        elif hasattr(at, "__dict__") and not isinstance(at, type(os)):
            todo += [(v, level + 1) for v in vars(at).values()]
    return found


@pytest.mark.parametrize("native", ["1", "0"])
def test_no_attribute_of_the_engine_or_the_model_leads_to_a_sum(native, monkeypatch):
    monkeypatch.setenv("GRADVEIL_LAYERS", native)
    engine, model, optimizer, loader = start(batch_size=N, sampling="without-replacement", physical=20)
    sums = released(engine, model)
    for part, (x, y) in zip(range(2), loader, strict=False):  # not the last part: nothing is released yet
        F.cross_entropy(model(x), y).backward()
        assert all(p.grad is None for p in model.parameters()), part
        optimizer.step()
    gc.collect()
    parts = [  # of the first part, and of the first two
        clipped_sums(
            model, F.cross_entropy, *(t[:k] for t in (torch.cat([x]), y)), groups=engine.groups, bounds=(1.0, 1.0)
        ).sums
        for k in (20,)
    ]
    shapes = {tuple(p.shape) for p in model.parameters()}
    known = {id(p) for p in model.parameters()}
    for t in (*tensors_reachable(engine), *tensors_reachable(model)):
        if tuple(t.shape) in shapes and id(t) not in known and t.is_floating_point():
            for of in (sums, *parts):
                for total in of.values():
                    assert total.shape != t.shape or not torch.allclose(t.float(), total, atol=1e-5)
    assert not engine.releases


@pytest.mark.parametrize("native", ["1", "0"])
def test_autograd_hands_out_no_gradient_of_a_parameter(native, monkeypatch):
    monkeypatch.setenv("GRADVEIL_LAYERS", native)
    engine, model, _, loader = start()
    x, y = one_batch(loader)
    with pytest.raises(PrivacyViolation, match=r"autograd\.grad was asked"):
        torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    with pytest.raises(PrivacyViolation, match=r"autograd\.grad was asked"):
        torch.autograd.grad(F.cross_entropy(model(x), y), next(model.parameters()), create_graph=True)
    assert not engine.releases and all(p.grad is None for p in model.parameters())
    F.cross_entropy(model(x), y).backward()
    assert len(engine.releases) == 1


def test_the_gradient_of_an_input_neither_clips_nor_releases():
    engine, model, _, loader = start()
    x, y = one_batch(loader)
    x = x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert grad.abs().sum() > 0 and not engine.releases
    loss.backward()
    assert len(engine.releases) == 1


def test_hooks_on_parameters_see_nothing():
    _, model, _, loader = start()
    x, y = one_batch(loader)
    loss = F.cross_entropy(model(x), y)
    seen = []
    for p in model.parameters():
        p.register_hook(seen.append)
        p.register_post_accumulate_grad_hook(seen.append)
    loss.backward()
    assert not [s for s in seen if s is not None and s.grad is None]
    with pytest.raises(PrivacyViolation, match="hook"):
        model(x)


# ---- batches


def test_two_loops_over_the_loader_at_once_are_refused():
    engine, model, _, loader = start()
    older, newer = iter(loader), iter(loader)
    x, y = next(newer)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyViolation, match="newer loop"):
        next(older)
    assert len(engine.releases) == 1


def test_going_back_inside_the_loop_ends_it():
    engine, model, _, loader = start()
    state = engine.state_dict()
    with pytest.raises(PrivacyViolation, match=r"newer loop.*or the engine went back"):
        feed(model, loader, then=lambda: engine.load_state_dict(state) if engine.step == 3 else None)
    assert len(engine.releases) == 3 and engine.step == 0


def test_samples_after_going_back_are_independent_of_those_before():
    engine, _, _, loader = start(batch_size=30)
    before = [x.clone() for x, _ in [one_batch(loader)]]
    engine.load_state_dict(engine.state_dict())
    after = [x for x, _ in [one_batch(loader)]]
    assert before[0].shape != after[0].shape or not torch.equal(before[0], after[0])


def test_a_batch_that_is_skipped_is_refused_at_the_next_draw():
    engine, model, _, loader = start()
    with pytest.raises(PrivacyViolation, match="was not released before the next one"):
        feed(model, loader, when=lambda i: i != 2)
    assert len(engine.releases) == 2


def test_a_batch_that_is_skipped_at_the_end_is_refused_too():
    engine, model, _, loader = start(steps=3)
    with pytest.raises(PrivacyViolation, match="step 2"):
        feed(model, loader, when=lambda i: i < 2)
    assert len(engine.releases) == 2


def test_examples_that_are_left_out_must_be_declared():
    def feed(**settings):
        engine, model, _, loader = start(steps=2, **settings)
        for x, y in loader:
            keep = y != 0
            F.cross_entropy(model(x[keep]), y[keep]).backward()
        return engine

    with pytest.raises(PrivacyViolation, match="drops_examples=True"):
        feed()
    assert len(feed(drops_examples=True).releases) == 2


def test_a_batch_in_pieces_of_the_users_own_is_released_when_it_is_whole():
    engine, model, _, loader = start(steps=3, batch_size=20)
    for x, y in loader:
        for rows in (slice(0, 7), slice(7, None)):
            assert all(p.grad is None for p in model.parameters()) or engine.step
            F.cross_entropy(model(x[rows]), y[rows]).backward()
    assert len(engine.releases) == 3


def test_a_sequence_first_batch_is_refused():
    """(T, N, ...) with T < N: the rows that the model gets are not the examples."""

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)

    data = TensorDataset(torch.randn(60, 12, 4), torch.randint(0, 3, (60, 12)))
    model = Sequence()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=5, delta=1e-3)
    _, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=30))

    def train():
        for x, y in loader:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    with pytest.raises((PrivacyViolation, UnsupportedModelError)):
        train()
    assert not engine.releases


@pytest.mark.parametrize("sampling", ["poisson", "without-replacement"])
def test_a_loader_that_puts_the_sequence_first_is_refused_where_it_has_as_many_steps_as_examples(sampling):
    length = 10
    data = [(torch.randn(length, 4), torch.randint(0, 3, (length,))) for _ in range(60)]

    def collate(examples):
        x, y = zip(*examples, strict=True)
        return nn.utils.rnn.pad_sequence(x), nn.utils.rnn.pad_sequence(y)

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=20, delta=1e-3, sampling=sampling)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=length, collate_fn=collate)
    )
    x, y = one_batch(loader)
    with pytest.raises(gradveil.GradveilError):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert not engine.releases


def test_a_loop_after_the_declared_end_raises():
    engine, model, optimizer, loader = start(steps=2)
    run(engine, model, optimizer, loader)
    with pytest.raises(BudgetExhausted, match="has taken them all"):
        run(engine, model, optimizer, loader)


# ---- what trains


def test_a_layer_that_is_unfrozen_or_added_later_is_refused():
    backbone = nn.Linear(25, 18).requires_grad_(False)
    model = nn.Sequential(nn.Flatten(), backbone, nn.ReLU(), nn.Linear(18, 3))
    _, model, _, loader = start(model=model)
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    backbone.requires_grad_(True)
    x, y = next(batches)
    with pytest.raises(PrivacyViolation, match=r"'1\.weight' was made trainable"):
        model(x)
    backbone.requires_grad_(False)
    model.append(nn.Linear(3, 3))
    with pytest.raises(PrivacyViolation, match=r"'4\.weight' was made trainable, or added"):
        model(x)


def test_a_replaced_weight_is_refused():
    _, model, _, loader = start()
    x, _ = one_batch(loader)
    model[3].weight = nn.Parameter(torch.zeros(3, 18))
    with pytest.raises(PrivacyViolation, match="is not the parameter that it had"):
        model(x)


def test_a_separate_head_is_refused():
    engine, model, _, loader = start()
    head = nn.Linear(3, 3)
    x, y = one_batch(loader)
    with pytest.raises(PrivacyViolation, match="not part of the private model"):
        F.cross_entropy(head(model(x)), y).backward()
    assert head.weight.grad is None and not engine.releases


def test_a_copy_of_the_model_cannot_be_trained_with_the_private_loader():
    _, model, _, loader = start()
    other = copy.deepcopy(model)
    with pytest.raises(PrivacyViolation, match="was not released"):
        feed(other, loader)


def test_after_detach_the_loader_hands_out_nothing():
    engine, model, _, loader = start()
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    engine.detach()
    for again in (batches, loader):
        with pytest.raises(PrivacyViolation, match="was detached"):
            next(iter(again))


def test_a_loss_scale_is_refused_by_name():
    engine, model, _, loader = start()
    x, y = one_batch(loader)
    with pytest.raises(PrivacyViolation, match=r"GradScaler.*bfloat16"):
        torch.amp.GradScaler("cpu").scale(F.cross_entropy(model(x), y)).backward()
    assert not engine.releases


def test_two_calls_of_the_model_in_one_backward_are_refused():
    engine, model, _, loader = start(batch_size=20)
    x, y = one_batch(loader)
    first, second = model(x[:9]), model(x[9:])
    with pytest.raises(PrivacyViolation, match="two calls of the model"):
        (F.cross_entropy(first, y[:9]) + F.cross_entropy(second, y[9:])).backward()
    assert not engine.releases


def test_a_forward_from_before_the_release_cannot_be_differentiated():
    engine, model, _, loader = start()
    x, y = one_batch(loader)
    stale = F.cross_entropy(model(x), y)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyViolation, match="before the last release"):
        stale.backward()
    assert len(engine.releases) == 1


# ---- processes


def test_a_fork_is_refused_in_the_child():
    engine, model, _, loader = start()
    x, y = one_batch(loader)

    def child(answers):
        try:
            F.cross_entropy(model(x), y).backward()
        except PrivacyViolation as error:
            answers.put(str(error))
        else:
            answers.put("released")

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    told = answers.get(timeout=60)
    process.join()
    assert "was forked" in told
    F.cross_entropy(model(x), y).backward()  # the parent goes on
    assert len(engine.releases) == 1


def test_every_release_has_a_nonce_of_its_own():
    engine, model, optimizer, loader = start(steps=12)
    state = engine.state_dict()
    run(engine, model, optimizer, loader)
    engine.load_state_dict(state)
    run(engine, model, optimizer, loader)
    nonces = [r.nonce for r in engine.releases]
    assert len(nonces) == 24 and None not in nonces and len(set(nonces)) == 24


# ---- public data


def test_public_data_is_noted_and_not_charged():
    engine, model, optimizer, loader = start(steps=2)
    public = torch.randn(8, 1, 5, 5), torch.randint(0, 3, (8,))
    for x, y in loader:
        optimizer.zero_grad()
        with engine.public_data("made up"):
            F.cross_entropy(model(public[0]), public[1]).backward()
        plain = [p.grad.clone() for p in model.parameters()]
        F.cross_entropy(model(x), y).backward()
        assert all(not torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
        optimizer.step()
    notes = [body for kind, body in engine.ledger.notes if kind == "public"]
    assert [n["note"] for n in notes] == ["made up"] * 2 and len(engine.releases) == 2
    reference = copy.deepcopy(network())
    F.cross_entropy(reference(public[0]), public[1]).backward()


def test_a_private_pass_does_not_become_public_by_being_differentiated_in_the_context():
    engine, model, _, loader = start()
    x, y = one_batch(loader)
    loss = F.cross_entropy(model(x), y)
    with engine.public_data(), pytest.raises(PrivacyViolation, match="reaches a call of the model on private data"):
        (loss + model(x).square().mean()).backward()
    assert not engine.releases and all(p.grad is None for p in model.parameters())


# ---- going on elsewhere


def test_a_fresh_engine_takes_over_what_a_checkpoint_has_spent():
    engine, model, optimizer, loader = start(steps=12, stopping="public")
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if i == 5:
            break
    state, spent = engine.state_dict(), engine.epsilon
    other, model, optimizer, loader = start(steps=12, stopping="public")
    other.load_state_dict(state)
    assert other.epsilon == pytest.approx(spent) and other.step == 6
    run(other, model, optimizer, loader)
    assert len(other.releases) == 12
    whole, model, optimizer, loader = start(steps=12, stopping="public")
    run(whole, model, optimizer, loader)
    assert other.epsilon == pytest.approx(whole.epsilon)


def test_a_checkpoint_of_another_run_is_refused_where_this_one_has_released():
    engine, model, optimizer, loader = start()
    run(engine, model, optimizer, loader)
    state = engine.state_dict()
    other, model, _, loader = start()
    x, y = one_batch(loader)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(gradveil.RunDirectoryError, match="would not be charged"):
        other.load_state_dict(state)


def test_a_budget_counts_what_a_checkpoint_brings_along():
    engine, model, optimizer, loader = start(steps=12, sigma=3.0, stopping="public")
    run(engine, model, optimizer, loader)
    state = engine.state_dict() | {"step": 0}
    other, model, optimizer, loader = start(steps=12, sigma=3.0, budget=engine.epsilon * 1.01, stopping="public")
    other.load_state_dict(state)
    with pytest.raises(BudgetExhausted):
        run(other, model, optimizer, loader)
    assert len(other.releases) == 12


# ---- stopping


def test_stopping_on_released_values_is_charged_for_all_declared_steps():
    def stop_after(k, **settings):
        engine, model, _, loader = start(**settings)
        for i, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if i + 1 == k:
                break
        return engine.epsilon

    assert stop_after(3) == pytest.approx(stop_after(12))
    assert stop_after(3, stopping="public") < stop_after(12)


def test_lbfgs_is_refused_by_name():
    model = network()
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=2, delta=1e-3)
    with pytest.raises(ConfigError, match="LBFGS"):
        engine.make_private(
            module=model,
            optimizer=torch.optim.LBFGS(model.parameters()),
            data_loader=DataLoader(dataset(), batch_size=5),
        )
