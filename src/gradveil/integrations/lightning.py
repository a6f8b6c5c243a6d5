"""A LightningModule and a Trainer, trained privately.

    engine = gradveil.PrivacyEngine(clip=1.0, sigma=2.0, steps=3 * len(loader), delta=1e-5)
    private = PrivateTraining(engine)
    trainer = lightning.Trainer(max_epochs=3, callbacks=[private])
    trainer.fit(module, private.loader(loader))
    print(engine.statement())

The module and its ``training_step`` stay as they are; the step must call the model as ``self(x)`` (or the one
sub-module that holds the parameters, where there is no ``forward``). Automatic and manual optimization both work, and
so does gradient clipping by the Trainer: what it clips is noised already.

Refused, with the fix: accumulation by the Trainer, 16-bit precision with a loss scale, several
optimizers or devices, a learning rate that follows a metric, and another number of steps than declared. Early stopping
is charged for all declared steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gradveil.engine import PrivacyEngine
from gradveil.errors import ConfigError
from gradveil.integrations._shared import (
    EpochLoader,
    check_steps,
    ending,
    epsilon_so_far,
    refuse_metric_scheduler,
    require,
)

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # named when a PrivateTraining is made
    Callback = object


class PrivateTraining(Callback):  # type: ignore[misc]
    """A callback that begins the engine's run when ``fit`` begins, and ends it when ``fit`` ends.

    engine   not yet set up; one engine is one run
    model    the name of the sub-module that training_step calls, where it is not the LightningModule itself

    Each step's release is on disk before Lightning shows or logs anything of it. A checkpoint of Lightning's holds
    what the engine needs to go on; to resume, give the same run_dir with ``resume=True``.
    """

    def __init__(self, engine: PrivacyEngine, *, model: str | None = None) -> None:
        require("lightning.pytorch", "lightning")
        if engine.is_set_up:
            raise ConfigError("the engine has a run already: one engine is one run. Make a new PrivacyEngine.")
        self.engine, self.model = engine, model
        self._loader: EpochLoader | None = None
        self._restored: Mapping[str, Any] | None = None
        self._handles: list[Any] = []

    def loader(self, data_loader: DataLoader[Any]) -> EpochLoader:
        """What to give ``trainer.fit`` in place of the training loader, or to return from ``train_dataloader``."""
        if self._loader is None:
            self._loader = EpochLoader(self.engine, data_loader)
        return self._loader

    # ---- Lightning's hooks

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer)
        trainer.fit_loop.setup_data()  # asks for the training loader, where it was not asked for yet
        if self._loader is None or trainer.train_dataloader is not self._loader:
            raise _other_loader()
        if not trainer.fast_dev_run:
            epochs = trainer.max_epochs if trainer.max_steps == -1 else None
            check_steps(self.engine, trainer.estimated_stepping_batches, epochs=epochs, batches=len(self._loader))
        optimizer: Optimizer = trainer.optimizers[0]
        self._handles = [
            optimizer.register_step_post_hook(lambda *_: self.engine.commit()),  # before any callback or logger
        ]
        self._loader.make_private(self._followed(pl_module), optimizer)
        if self._restored is not None:
            self.engine.load_state_dict(self._restored)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for name, value in epsilon_so_far(self.engine).items():
            pl_module.log(name, value)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._release_optimizer()
        self.engine.close(ending(self.engine))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._release_optimizer()
        self.engine.detach()  # not closed: a run that was broken off can be resumed

    def state_dict(self) -> dict[str, Any]:
        return self.engine.state_dict() if self.engine.is_set_up else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._restored = dict(state_dict) or None  # Lightning restores callbacks before there is an optimizer

    # ----

    def _release_optimizer(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _followed(self, module: Any) -> nn.Module:
        """What training_step calls: the module itself where it has a forward, else the one part that trains."""
        if self.model is not None:
            named: nn.Module = module.get_submodule(self.model)
            return named
        if type(module).forward is not _base_forward():
            whole: nn.Module = module
            return whole
        parts = [(n, c) for n, c in module.named_children() if any(p.requires_grad for p in c.parameters())]
        if len(parts) != 1:
            raise ConfigError(
                f"{type(module).__name__} has no forward, and {len(parts)} parts that train "
                f"({', '.join(name for name, _ in parts)}): examples are followed through one call of one model. Write "
                "forward(), call self(x) in training_step, and compute the loss from what it returns; or name the "
                "part that training_step calls: PrivateTraining(engine, model='...')."
            )
        part: nn.Module = parts[0][1]
        return part

    def _check(self, trainer: Any) -> None:
        """Settings of the Trainer that would break the bound, or that mean something else than they seem to."""
        if trainer.world_size != 1:
            raise ConfigError(
                f"the Trainer runs {trainer.world_size} processes: each would draw and release batches of its own. "
                "Use Trainer(devices=1)."
            )
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"the module has {len(trainer.optimizers)} optimizers: a step is one release of one optimizer. Return "
                "one from configure_optimizers."
            )
        accumulates = any(type(c).__name__ == "GradientAccumulationScheduler" for c in trainer.callbacks)
        if trainer.accumulate_grad_batches != 1 or accumulates:
            raise ConfigError(
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches}: the Trainer divides the loss by it "
                "before examples are clipped, so the clip bound would mean something else. Leave it at 1 and give the "
                "loader the whole batch size; for batches larger than memory use a loop of your own with "
                "physical_batch_size."
            )
        if str(trainer.precision).startswith("16"):
            raise ConfigError(
                f"precision is {trainer.precision}: the loss is scaled, so gradients are scaled when they are clipped, "
                "and the bound would move with the scale. Use precision='bf16-mixed' or '32-true'."
            )
        if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            raise refuse_metric_scheduler("ReduceLROnPlateau")


def _base_forward() -> Any:
    return require("lightning.pytorch", "lightning").LightningModule.forward


def _other_loader() -> ConfigError:
    return ConfigError(
        "trainer.fit was given a training loader that gradveil does not draw from, so nothing would be known of how "
        "its batches were sampled. Give it private.loader(your_loader), or return that from train_dataloader."
    )
