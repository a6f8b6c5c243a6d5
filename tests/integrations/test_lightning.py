"""Lightning's Trainer takes the same private run as a plain loop, and what would break the bound is refused.

pip install "gradveil[lightning]" && pytest tests/integrations/test_lightning.py
"""

from __future__ import annotations

import warnings

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradveil
from gradveil.errors import BudgetExhausted, ConfigError, PrivacyViolation, RunDirectoryError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations of what Lightning itself imports
    lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'gradveil[lightning]'")

from gradveil.integrations.lightning import PrivateTraining

# What Lightning advises (a validation loader), and a deprecation of torch's inside it: nothing of ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

EPOCHS, BATCH, KEPT = 3, 64, 320


def data(shuffle: bool = True) -> DataLoader:
    digits = load_digits()
    x = torch.tensor(digits.images[:KEPT], dtype=torch.float32).unsqueeze(1) / 16
    return DataLoader(TensorDataset(x, torch.tensor(digits.target[:KEPT])), batch_size=BATCH, shuffle=shuffle)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


class Digits(lightning.LightningModule):
    """A module as its users write it; knows nothing of gradveil."""

    def __init__(self, lr: float = 0.5, momentum: float = 0.9):
        super().__init__()
        self.net, self.lr, self.momentum = network(), lr, momentum

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, batch_size=max(len(x), 1))
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def engine_for(**settings) -> gradveil.PrivacyEngine:
    given = {"clip": 1.0, "sigma": 2.0, "steps": EPOCHS * KEPT // BATCH, "delta": 1e-4, "seed": 5, **settings}
    return gradveil.PrivacyEngine(**given)


def trainer_for(*callbacks, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False, "max_epochs": EPOCHS}
    return lightning.Trainer(callbacks=list(callbacks), **(quiet | settings))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_run(module, **settings):
    """The same run in a loop of one's own."""
    engine, optimizer = engine_for(**settings), module.configure_optimizers()
    _, optimizer, loader = engine.make_private(module=module, optimizer=optimizer, data_loader=data())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    engine.detach()
    return engine


def fit(module, engine, *callbacks, val=False, model=None, **settings):
    private = PrivateTraining(engine, model=model)
    trainer = trainer_for(private, *callbacks, **settings)
    trainer.fit(module, private.loader(data()), data(shuffle=False) if val else None)
    return trainer


@pytest.mark.parametrize("strategy", ["baseline", "dyn-s-decay", "quantile-clip"])
def test_the_trainer_takes_the_plain_loops_run(strategy):
    mine, theirs = Digits(), Digits()
    plain, engine = plain_run(mine, strategy=strategy), engine_for(strategy=strategy)
    start = weights(theirs)
    fit(theirs, engine, val=True)
    assert [r.step for r in engine.releases] == list(range(15))
    assert engine.releases == plain.releases  # digests of every noised gradient among them
    assert torch.equal(weights(mine), weights(theirs))
    assert not torch.equal(weights(theirs), start)
    assert engine.statement().proved == plain.statement().proved
    assert engine.statement().proved.epsilon < 20


def test_nothing_is_left_on_the_module_and_the_ledger_is_ended(tmp_path):
    module, engine = Digits(), engine_for(run_dir=tmp_path / "run")
    keys = list(module.state_dict())
    trainer = fit(module, engine)
    assert list(module.state_dict()) == keys
    assert all("forward" not in vars(m) for m in module.modules())
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    ledger = gradveil.accounting.ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert ledger.ended == "finished"
    assert len(ledger.releases) == 15


def test_a_release_is_on_disk_before_any_callback_or_logger_can_tell_of_it(tmp_path):
    seen, private = [], PrivateTraining(engine_for(run_dir=tmp_path / "run"))

    class Looks(lightning.Callback):
        def on_train_batch_end(self, *args):
            seen.append(len(gradveil.accounting.ledger.read(tmp_path / "run" / "ledger.jsonl").releases))

    trainer_for(Looks(), private).fit(Digits(), private.loader(data()))
    assert seen == list(range(1, 16))


def test_the_epsilon_is_logged_by_its_kind():
    trainer = fit(Digits(), engine_for())
    assert 0 < float(trainer.callback_metrics["epsilon/proved-RDP"]) < 20
    trainer = fit(Digits(), engine_for(strategy="dyn-s"))
    assert "epsilon/proved-RDP" not in trainer.callback_metrics
    assert "epsilon/as-published" in trainer.callback_metrics


def test_manual_optimization():
    class Manual(Digits):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            x, y = batch
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(x), y))
            optimizer.step()

    mine, theirs = Digits(), Manual()
    plain, engine = plain_run(mine), engine_for()
    fit(theirs, engine)
    assert engine.releases == plain.releases
    assert torch.equal(weights(mine), weights(theirs))


def test_a_schedule_that_asks_how_long_the_run_is():
    class Scheduled(Digits):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            assert self.trainer.estimated_stepping_batches == 15
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=15)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    engine = engine_for()
    fit(Scheduled(), engine)
    assert len(engine.releases) == 15


def test_max_steps_and_a_loader_from_the_module():
    engine = engine_for(steps=7)
    private = PrivateTraining(engine)

    class WithData(Digits):
        def train_dataloader(self):
            return private.loader(data())

    trainer_for(private, max_epochs=None, max_steps=7).fit(WithData())
    assert len(engine.releases) == 7


def test_a_module_without_forward_that_calls_its_one_part():
    class Bare(Digits):
        forward = lightning.LightningModule.forward

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

    engine = engine_for()
    fit(Bare(), engine)
    assert len(engine.releases) == 15
    assert engine.statement().proved.epsilon < 20


def test_a_part_called_past_the_modules_forward_is_refused_unless_it_is_named():
    class Past(Digits):
        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

    with pytest.raises(PrivacyViolation, match="outside the model's forward"):
        fit(Past(), engine_for())
    engine = engine_for()
    fit(Past(), engine, model="net")
    assert len(engine.releases) == 15


def test_bfloat16_works():
    engine = engine_for(seed=None)
    fit(Digits(), engine, precision="bf16-mixed")
    assert len(engine.releases) == 15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches is 2"),
        ({"max_epochs": 4}, r"20 steps \(4 epochs of 5\), and the engine declares 15"),
        ({"max_epochs": -1}, "steps without end"),
        ({"limit_train_batches": 2}, "6 steps"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    engine = engine_for()
    with pytest.raises(ConfigError, match=message):
        fit(Digits(), engine, **settings)
    assert not engine.is_set_up


def test_a_scaled_loss_is_refused():
    trainer = trainer_for()
    private = PrivateTraining(engine_for())
    trainer.strategy._lightning_module = Digits()
    trainer.strategy.optimizers = [Digits().configure_optimizers()]
    trainer.strategy.precision_plugin.precision = "16-mixed"
    with pytest.raises(ConfigError, match="precision is 16-mixed"):
        private._check(trainer)


@pytest.mark.parametrize("stopping", ["none", "private"])
def test_early_stopping_is_charged_for_all_declared_steps(stopping):
    from lightning.pytorch.callbacks import EarlyStopping

    engine = engine_for(stopping=stopping)
    fit(Digits(), engine, EarlyStopping("val_loss", patience=1, stopping_threshold=1e9), val=True)
    assert len(engine.releases) == 5
    assert engine.statement().proved.steps_charged == 15


def test_a_learning_rate_that_follows_a_metric_is_refused():
    class Plateau(Digits):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"}}

    with pytest.raises(ConfigError, match="follows a metric"):
        fit(Plateau(), engine_for())


def test_two_optimizers_are_refused():
    class Two(Digits):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[3])]

    with pytest.raises(ConfigError, match="2 optimizers"):
        fit(Two(), engine_for())


class ClipsItself(Digits):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


@pytest.mark.parametrize(
    ("module", "settings"),
    [(ClipsItself, {}), (Digits, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "norm"})],
)
def test_clipping_by_the_trainer_is_post_processing(module, settings):
    """What it clips is released and noised already: the same releases as in a plain loop that does it."""
    mine, plain = Digits(), engine_for()
    optimizer = mine.configure_optimizers()
    _, optimizer, loader = plain.make_private(module=mine, optimizer=optimizer, data_loader=data())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(mine(x), y).backward()
        nn.utils.clip_grad_norm_(mine.parameters(), 0.01)
        optimizer.step()
    theirs, engine = module(), engine_for()
    fit(theirs, engine, **settings)
    assert engine.releases == plain.releases
    assert torch.equal(weights(mine), weights(theirs))


@pytest.mark.parametrize("wrapped_before", [False, True])
def test_another_loader_is_refused(wrapped_before):
    private = PrivateTraining(engine_for())
    if wrapped_before:
        private.loader(data())
    with pytest.raises(ConfigError, match=r"private\.loader"):
        trainer_for(private).fit(Digits(), data())


def test_a_budget_holds():
    engine = engine_for(budget=1.0)
    with pytest.raises(BudgetExhausted):
        fit(Digits(), engine)
    assert engine.statement().proved.epsilon <= 1.0


class Breaks(lightning.Callback):
    """Saves a checkpoint after some steps, takes one more, and dies."""

    def __init__(self, path, after):
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.after + 1:
            raise ZeroDivisionError

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.after and self.after % 5:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, module):
        if trainer.global_step == self.after:
            trainer.save_checkpoint(self.path)


def go_on(engine, checkpoint, module):
    private = PrivateTraining(engine)
    trainer_for(private).fit(module, private.loader(data()), ckpt_path=checkpoint)


def test_a_checkpoint_goes_on_and_everything_is_charged(tmp_path):
    whole, module, checkpoint = Digits(), Digits(), tmp_path / "saved.ckpt"
    plain_run(whole)
    with pytest.raises(ZeroDivisionError):
        fit(Digits(), engine_for(run_dir=tmp_path / "run"), Breaks(checkpoint, 10))
    elsewhere = engine_for()  # with a ledger of its own, which takes over what the checkpoint has spent
    go_on(elsewhere, checkpoint, Digits())
    assert elsewhere.step == 15 and elsewhere.statement().proved.steps_charged == 15
    forgetful = torch.load(checkpoint, weights_only=False)
    del forgetful["callbacks"]["PrivateTraining"]["spent"]
    torch.save(forgetful, tmp_path / "forgetful.ckpt")
    with pytest.raises(RunDirectoryError, match="would not be charged"):
        go_on(engine_for(), tmp_path / "forgetful.ckpt", Digits())
    engine = engine_for(run_dir=tmp_path / "run", resume=True)
    go_on(engine, checkpoint, module)
    assert torch.equal(weights(module), weights(whole))
    assert [r.step for r in engine.releases] == [*range(11), *range(10, 15)]  # step 10 was released twice
    assert engine.statement().proved.steps_charged == 16
