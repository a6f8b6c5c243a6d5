"""transformers.Trainer, trained privately.

    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=300, delta=1e-5)
    trainer = PrivateTrainer(engine=engine, model=model, args=TrainingArguments(...), ...)
    trainer.train()
    print(engine.statement())

The model, its adapters, collator, optimizer and schedule are the Trainer's own. The loss is computed from the logits
outside the model, each example's by itself: a mean over the tokens of a whole batch would let one example's labels move
the gradients of the others.

Refused, with the fix: accumulation by the Trainer, fp16 with a loss scale, several devices, sampling by length, label
smoothing (its normaliser counts the batch's labels), a learning rate that follows a metric, another number of steps
than declared, resuming, hyper-parameter search. The Trainer may clip gradients (max_grad_norm): those are noised.
Early stopping is charged for all declared steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
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
    import accelerate  # noqa: F401 - without it, transformers has no Trainer that can be made
    from transformers import Trainer
except ImportError:  # named when a PrivateTrainer is made
    Trainer = object

_SAMPLINGS = ("random", "sequential")  # of the Trainer's loader, replaced by the engine's in either case
_FOLLOW_METRICS = ("reduce_lr_on_plateau", "greedy")


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose steps are the engine's.

    engine                not yet set up; one engine is one run, and ``train`` begins and ends it
    physical_batch_size   forward and backward take the batch in parts of this size, with the same result

    All other arguments are the Trainer's. ``per_device_train_batch_size`` is the expected size of a drawn batch.
    ``compute_loss_func(outputs, labels, num_items_in_batch=None)`` must be a mean over examples of losses that look
    at one example each; by default, cross-entropy of classes, or of tokens averaged within each example.
    """

    def __init__(
        self, *args: Any, engine: PrivacyEngine, physical_batch_size: int | None = None, **settings: Any
    ) -> None:
        require("accelerate", "huggingface")
        require("transformers", "huggingface")
        if engine.is_set_up:
            raise ConfigError("the engine has a run already: one engine is one run. Make a new PrivacyEngine.")
        if physical_batch_size is not None and physical_batch_size < 1:
            raise ConfigError(f"physical_batch_size is {physical_batch_size}; give at least 1, or leave it out.")
        self.engine, self.physical_batch_size = engine, physical_batch_size
        self._private_loader: EpochLoader | None = None
        super().__init__(*args, **settings)
        self._check()

    # ---- the Trainer's methods

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **settings: Any) -> Any:
        if resume_from_checkpoint:
            raise ConfigError(
                "a checkpoint of the Trainer's holds neither the engine's state nor its ledger, so resuming from it is "
                "not supported: what was released before would not be counted. Train without a break, or in a loop of "
                "your own (PrivacyEngine(resume=True))."
            )
        if trial is not None:
            raise ConfigError(
                "hyperparameter_search trains several models on the same data, and each spends an epsilon of its own. "
                "Make an engine and a PrivateTrainer for each, and add up."
            )
        if self.engine.is_set_up:
            raise ConfigError("train() was called already: one engine is one run. Make a new engine and trainer.")
        self._check()  # callbacks may have been added
        try:
            result = super().train(**settings)
        except BaseException:
            self.engine.detach()
            raise
        self.engine.close(ending(self.engine))
        return result

    def get_train_dataloader(self) -> Any:
        # The Trainer's loader has the data set and collator; its iterator, Accelerate's, is always a batch ahead.
        theirs = super().get_train_dataloader()
        workers = {
            name: getattr(theirs, name)
            for name in ("num_workers", "pin_memory", "worker_init_fn", "persistent_workers", "prefetch_factor")
        }
        loader: DataLoader[Any] = DataLoader(
            theirs.dataset,
            batch_size=self.args.train_batch_size,
            drop_last=self.args.dataloader_drop_last,
            collate_fn=theirs.collate_fn,
            **workers,
        )
        private, epochs, most = EpochLoader(self.engine, loader), self.args.num_train_epochs, self.args.max_steps
        planned = most if most > 0 else math.ceil(epochs * len(private))
        check_steps(self.engine, planned, epochs=None if most > 0 else epochs, batches=len(private))
        self._private_loader = private
        return private

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._private_loader is None:
            raise ConfigError("the optimizer was made before training began. Let train() make it, or give optimizers=.")
        if not self.engine.is_set_up:
            self._private_loader.make_private(self.model, optimizer)
        return optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise refuse_metric_scheduler(type(scheduler).__name__)
        return scheduler

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward, in parts where they were asked for; the mean loss over the batch."""
        size = _batch_size(inputs)
        total = torch.zeros((), device=self.args.device)
        for part in _parts(inputs, size, self.physical_batch_size or max(size, 1)):
            total += super().training_step(model, part, None) * (_batch_size(part) / max(size, 1))
        return total

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        given = {name: value for name, value in inputs.items() if name != "labels"}
        labels = inputs.get("labels")
        outputs = model(**given)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        else:
            logits = getattr(outputs, "logits", None)
            losses = example_losses(logits, labels, shift=self._predicts_next_token())
            loss = losses.sum() / max(len(losses), 1)  # a batch may be empty
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.engine.is_set_up:
            self.engine.commit()  # before anything computed from the releases leaves
            if self.is_in_train and "loss" in logs:
                logs |= epsilon_so_far(self.engine)
        super().log(logs, *args, **kwargs)

    # ----

    def _predicts_next_token(self) -> bool:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _check(self) -> None:
        """Settings of the Trainer that would break the bound, or that mean something else than they seem to."""
        args = self.args
        if args.world_size > 1 or args.n_gpu > 1 or args.deepspeed or args.fsdp:
            raise ConfigError(
                f"training is spread over {max(args.world_size, args.n_gpu)} devices, or sharded: each part would draw "
                "and release batches of its own. Use one device (CUDA_VISIBLE_DEVICES=0), without deepspeed or fsdp."
            )
        if args.gradient_accumulation_steps != 1 or args.auto_find_batch_size:
            raise ConfigError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps} and auto_find_batch_size "
                f"{args.auto_find_batch_size}: each step is accounted for one drawn batch of a known expected size. "
                "Set per_device_train_batch_size to the whole batch, and PrivateTrainer(physical_batch_size=...) to "
                "what fits into memory."
            )
        if args.fp16:
            raise ConfigError(
                "fp16 scales the loss, so gradients are scaled when they are clipped, and the bound would move with "
                "the scale. Use bf16=True, or neither."
            )
        sampling = getattr(args, "train_sampling_strategy", "random")
        if getattr(args, "group_by_length", False) or sampling not in _SAMPLINGS:
            raise ConfigError(
                f"batches are to be grouped by length (train_sampling_strategy={sampling!r}): who is in a batch would "
                "depend on the examples, and the sampling rate that is accounted for would not hold. Leave it out."
            )
        if args.label_smoothing_factor:
            raise ConfigError(
                f"label_smoothing_factor is {args.label_smoothing_factor}: the Trainer's smoothed loss is divided by "
                "how many labels the whole batch has. Smooth within each example: give a compute_loss_func."
            )
        if str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) in _FOLLOW_METRICS:
            raise refuse_metric_scheduler(str(args.lr_scheduler_type))
        if self.engine.settings.loss_reduction != "mean":
            raise ConfigError("the Trainer's losses are means: make the engine with loss_reduction='mean'.")


def example_losses(logits: Tensor | None, labels: Tensor | None, *, shift: bool) -> Tensor:
    """One loss for each example, from nothing but its own logits and labels; labels of -100 do not count.

    logits (B, C) and labels (B): cross-entropy. logits (B, T, C) and labels (B, T): its mean over the example's own
    tokens; with ``shift``, of the next token. An example without any label has loss 0.

    >>> example_losses(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [0, -100, -100]]), shift=True)
    tensor([1.3863, 0.0000])
    """
    if logits is None or labels is None or labels.is_floating_point() or logits.dim() != labels.dim() + 1:
        found = ["none" if t is None else f"{tuple(t.shape)} {t.dtype}" for t in (logits, labels)]
        raise ConfigError(
            f"the model's logits are {found[0]} and 'labels' {found[1]}: neither a class for each example nor one for "
            "each token, so the loss is not known. Give a compute_loss_func(outputs, labels, num_items_in_batch=None) "
            "that is a mean over examples of losses that look at one example each."
        )
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return each.sum(1) / (labels != -100).sum(1).clamp(min=1)


def _batch_size(inputs: Mapping[str, Any]) -> int:
    return next(len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim())


def _parts(inputs: Mapping[str, Any], size: int, part: int) -> Iterator[dict[str, Any]]:
    """The batch in parts; what is not one row for each example goes into all of them."""
    for start in range(0, max(size, 1), part):
        rows = slice(start, start + part)
        yield {
            name: value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == size else value
            for name, value in inputs.items()
        }
