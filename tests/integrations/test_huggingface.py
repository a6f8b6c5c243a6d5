"""transformers.Trainer takes the same private run as a plain loop, and what would break the bound is refused.

    pip install "gradveil[huggingface]" && pytest tests/integrations/test_huggingface.py

Tiny configurations made here; nothing is downloaded.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import gradveil
from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.errors import BudgetExhausted, ConfigError, UnsupportedModelError

WHY = "transformers and accelerate are not installed: pip install 'gradveil[huggingface]'"
pytest.importorskip("accelerate", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

from gradveil.integrations.huggingface import PrivateTrainer, example_losses  # noqa: E402

WORDS, LENGTH, CLASSES, N, BATCH, EPOCHS = 13, 6, 3, 60, 10, 2
STEPS = EPOCHS * N // BATCH


class Texts(Dataset):
    """Sentences whose class is that of their first word."""

    def __init__(self, n: int = N, tokens: bool = False):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randint(0, WORDS, (n, LENGTH), generator=generator)
        self.y = self.x.clone() if tokens else self.x[:, 0] % CLASSES
        if tokens:
            self.y[:, -2:] = -100

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


def bert() -> nn.Module:
    torch.manual_seed(4)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
    sizes |= {"vocab_size": WORDS, "max_position_embeddings": 8, "num_labels": CLASSES}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **quiet))


def llama() -> nn.Module:
    torch.manual_seed(4)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
    sizes |= {"vocab_size": WORDS, "max_position_embeddings": 8, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def engine_for(**settings) -> gradveil.PrivacyEngine:
    return gradveil.PrivacyEngine(**({"clip": 0.5, "sigma": 2.0, "steps": STEPS, "delta": 1e-3, "seed": 5} | settings))


@pytest.fixture
def arguments(tmp_path):
    def make(**settings):
        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
        ours = {"max_grad_norm": 0, "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS}
        ours |= {"lr_scheduler_type": "constant", "logging_steps": 3, "dataloader_pin_memory": False}
        return transformers.TrainingArguments(output_dir=str(tmp_path), **(quiet | ours | settings))

    return make


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trainer_for(model, engine, args, *, data=None, physical=None, **settings):
    given = {"train_dataset": data or Texts(), "optimizers": (sgd(model), None), **settings}
    return PrivateTrainer(engine=engine, physical_batch_size=physical, model=model, args=args, **given)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_run(model, data, loss_of, **settings):
    """The same run in a loop of one's own."""
    engine, optimizer = engine_for(**settings), sgd(model)
    loader = DataLoader(data, batch_size=BATCH)
    _, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model(input_ids=batch["input_ids"]).logits, batch["labels"]).backward()
        optimizer.step()
    engine.detach()
    return engine


@pytest.mark.parametrize("strategy", ["baseline", "dyn-s-decay", "quantile-clip"])
def test_the_trainer_takes_the_plain_loops_run(strategy, arguments):
    mine, theirs = bert(), bert()
    plain, engine = plain_run(mine, Texts(), F.cross_entropy, strategy=strategy), engine_for(strategy=strategy)
    trainer_for(theirs, engine, arguments()).train()
    assert [r.step for r in engine.releases] == list(range(STEPS))
    for ours, their in zip(plain.releases, engine.releases, strict=True):
        assert (ours.step, ours.sampler) == (their.step, their.sampler) and ours.clip == pytest.approx(their.clip)
        assert ours.noise_std == pytest.approx(their.noise_std)
    # The loss is a sum over B, theirs a mean: equal up to rounding, with the same samples and noise.
    assert torch.allclose(weights(mine), weights(theirs), atol=1e-5)
    assert not torch.allclose(weights(bert()), weights(theirs), atol=1e-2)
    assert engine.statement().proved.epsilon == plain.statement().proved.epsilon < 20


def test_the_gradient_is_the_sum_of_clipped_gradients_of_each_examples_own_loss():
    """Against the oracle, one example at a time; half of the examples have labels that do not count."""
    model, data = llama().double(), Texts(8, tokens=True)
    data.y[::2, 2:] = -100
    groups = make_groups(model, "per-layer")
    bounds = [0.05] * len(groups)

    def own(output, y):
        return example_losses(output.logits, y, shift=True).mean()

    expected = clipped_sums(model, own, data.x, data.y, groups=groups, bounds=bounds).sums
    clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean")
    own(model(data.x), data.y).backward()
    for name, p in model.named_parameters():
        assert float((p.grad - expected[name]).abs().max()) < 1e-9
    clipper.detach()


@pytest.mark.parametrize("physical", [1, 4, 100])
def test_physical_parts_give_the_same_run(physical, arguments):
    results = []
    for split in (None, physical):
        model, engine = bert().double(), engine_for(strategy="quantile-clip")
        trainer_for(model, engine, arguments(), physical=split).train()
        results.append((weights(model), engine.releases))
    (a, whole), (b, parts) = results
    assert torch.allclose(a, b, rtol=0, atol=1e-9)
    assert [r.noise_std for r in whole] == [pytest.approx(r.noise_std) for r in parts]
    assert len(parts) == STEPS


def test_a_language_model_that_predicts_the_next_token(arguments):
    mine, theirs, data = llama(), llama(), Texts(tokens=True)
    plain = plain_run(mine, data, lambda logits, y: example_losses(logits, y, shift=True).mean())
    engine = engine_for()
    trainer_for(theirs, engine, arguments(), data=data).train()
    assert torch.allclose(weights(mine), weights(theirs), atol=1e-5)
    assert len(engine.releases) == len(plain.releases) == STEPS


# peft (0.21) itself asks every model for an attribute that transformers (5) has renamed, in get_peft_model.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_the_default_optimizer_and_a_schedule(arguments):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'gradveil[transformers]'")
    model = peft.get_peft_model(
        bert(), peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["classifier"])
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = engine_for(seed=None)
    trainer_for(model, engine, arguments(lr_scheduler_type="linear", warmup_steps=2), optimizers=(None, None)).train()
    assert len(engine.releases) == STEPS
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert torch.equal(p, before[name]), name
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_trainers_clipping_is_post_processing(arguments):
    """What it clips is released and noised already: the same releases, and shorter updates."""
    runs = {}
    for bound in (0.0, 1e-3):
        model, engine = bert(), engine_for()
        trainer_for(model, engine, arguments(max_grad_norm=bound)).train()
        runs[bound] = weights(model), engine
    (free, plain), (short, clipped) = runs.values()
    start = weights(bert())
    assert 0 < float((short - start).norm()) < STEPS * 1e-2 < float((free - start).norm())
    assert clipped.statement().proved == plain.statement().proved
    assert clipped.releases[0] == plain.releases[0]  # with its digest: the second is taken at other weights


class NormsOfReleases(transformers.TrainerCallback):
    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.found.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))


def test_logs_hold_the_epsilon_by_its_kind_and_no_norm_but_that_of_the_release(arguments):
    engine, norms = engine_for(sigma=50.0), NormsOfReleases()
    args = arguments(eval_strategy="epoch", logging_steps=1, max_grad_norm=1e9)  # logged where it may be clipped
    trainer = trainer_for(bert(), engine, args, eval_dataset=Texts(20), callbacks=[norms], physical=4)
    trainer.train()
    logs = trainer.state.log_history
    size = sum(p.numel() for p in trainer.model.parameters())
    for norm in norms.found:  # next to nothing but noise, whose norm is this
        assert norm == pytest.approx(engine.releases[0].noise_std[0] / BATCH * size**0.5, rel=0.2)
    assert [entry["grad_norm"] for entry in logs if "grad_norm" in entry] == pytest.approx(norms.found, rel=1e-4)
    assert sum("epsilon/proved-RDP" in entry for entry in logs) == STEPS
    assert sum("eval_loss" in entry for entry in logs) == EPOCHS
    engine = engine_for(strategy="dyn-s")
    trainer = trainer_for(bert(), engine, arguments())
    trainer.train()
    assert any("epsilon/as-published" in entry for entry in trainer.state.log_history)
    assert not any("epsilon/proved-RDP" in entry for entry in trainer.state.log_history)


def test_saved_models_and_the_ledger(tmp_path, arguments):
    model, engine = bert(), engine_for(run_dir=tmp_path / "run", seed=None)
    keys = list(model.state_dict())
    trainer_for(model, engine, arguments(save_strategy="epoch")).train()
    assert list(model.state_dict()) == keys
    assert all("forward" not in vars(m) for m in model.modules())
    assert gradveil.accounting.ledger.read(tmp_path / "run" / "ledger.jsonl").ended == "finished"
    assert (tmp_path / f"checkpoint-{STEPS}").is_dir()


def test_max_steps_and_empty_batches(arguments):
    engine = engine_for(steps=30)
    args = arguments(max_steps=30, per_device_train_batch_size=1)
    trainer_for(bert(), engine, args).train()  # at q = 1/60, a third of all batches are empty
    assert len(engine.releases) == 30
    assert {r.sampler for r in engine.releases} == {"poisson"}


def test_bfloat16_works(arguments):
    engine = engine_for(seed=None)
    trainer_for(bert(), engine, arguments(bf16=True)).train()
    assert len(engine.releases) == STEPS


def test_a_loss_of_ones_own(arguments):
    def smoothed(outputs, labels, num_items_in_batch=None):
        assert num_items_in_batch is None
        return F.cross_entropy(outputs.logits, labels, label_smoothing=0.1)

    engine = engine_for()
    trainer_for(bert(), engine, arguments(), compute_loss_func=smoothed).train()
    assert len(engine.releases) == STEPS


def test_a_loss_of_ones_own_that_mixes_examples_is_refused(arguments):
    def contrastive(outputs, labels, num_items_in_batch=None):
        return torch.logsumexp(outputs.logits @ outputs.logits.T, 1).mean()

    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        trainer_for(bert(), engine_for(), arguments(), compute_loss_func=contrastive).train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "physical_batch_size"),
        ({"auto_find_batch_size": True}, "physical_batch_size"),
        ({"label_smoothing_factor": 0.1}, "compute_loss_func"),
        ({"train_sampling_strategy": "group_by_length"}, "grouped by length"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "follows a metric"),
    ],
)
def test_settings_that_break_the_bound_are_refused(settings, message, arguments):
    with pytest.raises(ConfigError, match=message):
        trainer_for(bert(), engine_for(), arguments(**settings), eval_dataset=Texts(10))


def test_a_scaled_loss_is_refused(arguments):
    args = arguments()
    args.fp16 = True  # cannot be asked for on a CPU
    trainer = trainer_for(bert(), engine_for(), arguments())
    trainer.args = args
    with pytest.raises(ConfigError, match="fp16 scales the loss"):
        trainer._check()


def test_another_number_of_steps_is_refused_before_anything_is_written(arguments, tmp_path):
    engine = engine_for(run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"18 steps \(3 epochs of 6\), and the engine declares 12"):
        trainer_for(bert(), engine, arguments(num_train_epochs=3)).train()
    assert not (tmp_path / "run").exists()


def test_early_stopping_is_charged_for_all_declared_steps(arguments):
    args = arguments(eval_strategy="epoch", save_strategy="epoch", metric_for_best_model="loss", num_train_epochs=4)
    args.load_best_model_at_end = True
    stop = transformers.EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e9)
    engine = engine_for(steps=2 * STEPS)
    trainer_for(bert(), engine, args, eval_dataset=Texts(10), callbacks=[stop]).train()
    assert len(engine.releases) == STEPS  # the first epoch has nothing to be compared with, the second is no better
    assert engine.statement().proved.steps_charged == 2 * STEPS


def test_resuming_and_searching_are_refused(arguments):
    trainer = trainer_for(bert(), engine_for(), arguments())
    with pytest.raises(ConfigError, match="resuming from it is not supported"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="each spends an epsilon of its own"):
        trainer.train(trial={"lr": 1})
    trainer.train()
    with pytest.raises(ConfigError, match="one engine is one run"):
        trainer.train()


def test_a_budget_holds(arguments):
    engine = engine_for(budget=0.7, clipping="flat")
    with pytest.raises(BudgetExhausted):
        trainer_for(bert(), engine, arguments()).train()
    assert 0 < engine.statement().proved.epsilon <= 0.7


def test_labels_that_are_no_classes_need_a_loss():
    with pytest.raises(ConfigError, match="compute_loss_func"):
        example_losses(torch.zeros(4, 1), torch.zeros(4), shift=False)
    with pytest.raises(ConfigError, match="compute_loss_func"):
        example_losses(torch.zeros(4, 3), None, shift=False)
