"""What engine.record_gradients keeps of a live run: all that an adversary sees, nothing of the batch, and no change."""

from __future__ import annotations

import json
import stat

import pytest
import torch
from torch.nn import functional as F

from gradveil.attacks.methods.inversion import MAP
from gradveil.attacks.methods.matching import CPL
from gradveil.attacks.observation import views as observation
from gradveil.attacks.observation.from_capture import defence_of, load_capture
from gradveil.attacks.observation.gradients import VictimGradients
from gradveil.engine import cuda_graph as captured
from gradveil.engine import record_gradients as recording
from gradveil.errors import ConfigError, DataError, RunDirectoryError, UnknownNameError
from gradveil.mechanism import strategies
from loops import CLASSES, network, run, start, weights

SHAPE = (1, 5, 5)


def train(tmp_path, *, view="batch", steps=12, where="seen", **settings):
    """A run that is recorded; the batches it was fed with, by step."""
    physical = None if view == "batch" else 1
    engine, model, opt, loader = start(physical=physical, **settings)
    recorder = engine.record_gradients(tmp_path / where, steps=steps, view=view)
    fed: dict[int, list] = {}
    for x, y in loader:
        opt.zero_grad()
        fed.setdefault(engine.step, []).append((x, y))
        F.cross_entropy(model(x), y).backward()
        opt.step()
    batches = {t: tuple(torch.cat(c) for c in zip(*parts, strict=True)) for t, parts in fed.items()}
    return engine, model, recorder, batches


def test_the_views_are_those_of_the_attacks():
    assert recording.VIEWS == observation.VIEWS


@pytest.mark.parametrize("strategy", strategies.names())
@pytest.mark.parametrize(("view", "physical"), [("batch", None), ("batch", 3), ("per-example-noised", 1)])
def test_training_and_ledger_are_the_same_with_and_without(tmp_path, strategy, view, physical):
    found = []
    for recorded in (False, True):
        engine, model, opt, loader = start(
            strategy=strategy,
            seed=3,
            physical=physical,
            optimizer="momentum",
            run_dir=tmp_path / f"run-{recorded}",
            spot_checks=0.0,  # which batches are checked is noted in the ledger, and differs
        )
        if recorded:
            engine.record_gradients(tmp_path / "seen", steps=[0, 4, 5, 11], view=view)
        torch.manual_seed(9)
        run(engine, model, opt, loader)
        found.append((weights(model), torch.rand(3), engine.releases, engine.header))
        engine.detach()
        assert not opt._optimizer_step_pre_hooks
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2:] == found[1][2:]
    ledgers = [(tmp_path / f"run-{r}" / "ledger.jsonl").read_bytes() for r in (False, True)]
    assert ledgers[0] == ledgers[1]
    assert len(list((tmp_path / "seen").glob("*.json"))) == 4


def test_only_the_owner_can_read_it_and_it_holds_no_example(tmp_path):
    _, _, recorder, batches = train(tmp_path, steps=[2])
    assert recorder.recorded == [2] and not recorder.left
    assert stat.S_IMODE((tmp_path / "seen").stat().st_mode) == 0o700
    files = sorted((tmp_path / "seen").iterdir())
    assert [f.name for f in files] == ["step-00000002.json", "step-00000002.safetensors"]
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert batches[2][0][0].numpy().tobytes() not in file.read_bytes()


def test_the_update_is_made_of_what_was_recorded_at_the_weights_that_were_recorded(tmp_path):
    _, model, _, _ = train(tmp_path, steps=12, lr=0.1)
    records = recording.read(tmp_path / "seen")
    assert [r.step for r in records] == list(range(12))
    names = [n for n, _ in model.named_parameters()]
    after = [r.weights for r in records[1:]] + [model.state_dict()]
    for record, later in zip(records, after, strict=True):
        for name in names:
            moved = record.weights[name].add(record.gradients[name][0], alpha=-0.1)
            assert torch.equal(moved, later[name])


@pytest.mark.parametrize("strategy", strategies.names())
def test_an_attacker_who_computes_the_release_of_the_true_examples_gets_what_was_recorded(tmp_path, strategy):
    """Bounds, groups, weights and adaclip's coordinates are those of the step, for every strategy."""
    settings = {"strategy": strategy, "clip": 0.3, "model": network()}
    _, _, _, batches = train(tmp_path, view="per-example", **settings)
    records = recording.read(tmp_path / "seen")
    assert len(records) >= 10
    for record in records:
        x, y = (t.unsqueeze(1) for t in batches[record.step])
        model = VictimGradients(network(), record.weights)
        with torch.no_grad():
            expected = model.released(x, y, defence_of(record))
        for name, gradient in record.gradients.items():
            assert torch.allclose(gradient, expected[name], atol=1e-5), (record.step, name)


@pytest.mark.parametrize("strategy", ["baseline", "dyn-s-sigma", "quantile-clip", "adaclip"])
@pytest.mark.parametrize("view", ["batch", "per-example-noised"])
def test_what_is_left_when_the_true_examples_are_taken_off_is_noise_of_the_recorded_strength(tmp_path, strategy, view):
    _, _, _, batches = train(tmp_path, strategy=strategy, view=view)
    left = []
    for record in recording.read(tmp_path / "seen"):
        defence = defence_of(record)
        x, y = (t.unsqueeze(0 if view == "batch" else 1) for t in batches[record.step])
        with torch.no_grad():
            expected = VictimGradients(network(), record.weights).released(x, y, defence)
        stds = defence.noise_of_parameter()
        left += [((record.gradients[n] - expected[n]) / stds[n]).flatten() for n in record.gradients]
    spread = float(torch.cat(left).std())
    assert spread == pytest.approx(1.0, rel=0.12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_plain_training_is_seen_as_the_mean_gradient(tmp_path, reduction):
    settings = {"strategy": "non-private", "sampling": "without-replacement", "loss_reduction": reduction}
    engine, model, opt, loader = start(**settings)
    engine.record_gradients(tmp_path / "seen")
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt.step()
    (seen,) = load_capture(tmp_path / "seen", network(), input_shape=SHAPE)
    expected = VictimGradients(network(), before).of_batch(x.unsqueeze(0), y.unsqueeze(0))
    assert seen.batch == 10 and seen.classes == CLASSES and seen.sights[0].defence.noise_std is None
    for name, gradient in seen.sights[0].gradients.items():
        assert torch.allclose(gradient, expected[name], atol=1e-6)


def test_attacks_take_it(tmp_path):
    train(tmp_path, steps=[0, 3], where="batch")
    train(tmp_path, steps=1, view="per-example", where="single", strategy="non-private")
    each = load_capture(tmp_path / "batch", network(), input_shape=SHAPE, batch=2)
    assert [o.sights[0].step for o in each] == [0, 3]
    assert MAP(restarts=1).run(each[1], iterations=2, seed=0).x.shape == (1, 2, *SHAPE)
    (joint,) = load_capture(tmp_path / "batch", network(), input_shape=SHAPE, batch=2, joint=True)
    assert len(joint.sights) == 2
    (single,) = load_capture(tmp_path / "single" / "step-00000000.json", network(), input_shape=SHAPE)
    assert single.batch == 1 and single.victims > 1
    assert CPL().run(single, iterations=2, seed=0).x.shape == (single.victims, 1, *SHAPE)


def test_what_is_frozen_in_the_run_is_frozen_for_the_attacker(tmp_path):
    model = network()
    model[0].requires_grad_(False)
    train(tmp_path, steps=1, model=model)
    (seen,) = load_capture(tmp_path / "seen", network(), input_shape=SHAPE)
    assert set(seen.sights[0].gradients) == {"3.weight", "3.bias"}


def test_what_cannot_be_recorded_is_refused(tmp_path):
    engine, *_ = start()
    with pytest.raises(UnknownNameError, match="everything"):
        engine.record_gradients(tmp_path / "a", view="everything")
    with pytest.raises(ConfigError, match="physical_batch_size=1"):
        engine.record_gradients(tmp_path / "a", view="per-example")
    for steps in (0, [], [12], [-1], 13):
        with pytest.raises(ConfigError, match="steps"):
            engine.record_gradients(tmp_path / "a", steps=steps)
    assert not (tmp_path / "a").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for taken in ("full", "file"):
        with pytest.raises(RunDirectoryError, match="never written over"):
            engine.record_gradients(tmp_path / taken)
    with pytest.raises(RunDirectoryError, match="cannot be made"):
        engine.record_gradients(tmp_path / "file" / "below")
    recorder = engine.record_gradients(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"stop\(\)"):
        engine.record_gradients(tmp_path / "b")
    recorder.stop()
    engine.record_gradients(tmp_path / "b")
    with pytest.raises(ConfigError, match="make_private"):
        type(engine)(steps=1, clip=1.0, sigma=1.0).record_gradients(tmp_path / "c")


def test_a_per_example_view_is_of_the_loaders_batches_only(tmp_path):
    engine, model, _, _ = start(physical=1)
    engine.record_gradients(tmp_path / "seen", view="per-example")
    x, y = torch.randn(4, *SHAPE), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ConfigError, match="another batch"):
        F.cross_entropy(model(x), y).backward()
    assert not engine.releases
    assert all(p.grad is None for p in model.parameters())


def test_steps_in_cuda_graphs_and_their_record_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(captured, "_ON", "cpu")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    engine, *_ = start()
    recorder = engine.record_gradients(tmp_path / "a")
    with pytest.raises(ConfigError, match="Train eagerly"):
        captured.cuda_graph_step(engine, F.cross_entropy)
    recorder.stop()
    captured.cuda_graph_step(engine, F.cross_entropy)
    with pytest.raises(ConfigError, match="CUDA graphs"):
        engine.record_gradients(tmp_path / "b")


def _edit(path, change):
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


def test_a_record_that_is_damaged_or_not_there_is_refused(tmp_path):
    train(tmp_path, steps=2)
    folder = tmp_path / "seen"
    first = folder / "step-00000000.json"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no recorded step"):
        recording.read(tmp_path / "empty")
    with pytest.raises(DataError, match="does not exist"):
        recording.read(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"step 5 is not recorded.*\[0, 1\]"):
        load_capture(folder, network(), input_shape=SHAPE, step=5)
    tensors = first.with_suffix(".safetensors")
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="hash does not fit"):
        recording.read(folder)
    tensors.unlink()
    with pytest.raises(DataError, match="missing"):
        recording.read(folder)
    tensors.write_bytes(whole)
    _edit(first, lambda facts: facts.pop("groups"))
    with pytest.raises(DataError, match=r"not what engine\.record_gradients wrote"):
        recording.read(folder)
    _edit(first, lambda facts: facts.update(format="another"))
    with pytest.raises(DataError, match="another version"):
        recording.read(folder)


def test_a_record_of_another_model_is_refused(tmp_path):
    train(tmp_path, steps=1)
    with pytest.raises(ConfigError, match="do not belong to this model"):
        load_capture(tmp_path / "seen", torch.nn.Linear(25, 3), input_shape=(25,))
