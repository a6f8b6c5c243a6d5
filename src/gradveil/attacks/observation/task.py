"""What a model takes and gives: numbers or token ids, a row of class logits or one row for every token.

Found by running it on zeros, not by its names. Models of transformers return an object that holds ``logits``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradveil.errors import ConfigError, UnsupportedModelError

_REFUSED = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, NotImplementedError)


@dataclass(frozen=True)
class Task:
    """``tokens``: inputs are ids below ``vocabulary``. ``per_token``: logits (n, T, classes) and not (n, classes)."""

    tokens: bool
    per_token: bool
    classes: int
    vocabulary: int = 0


def logits_of(output: Any) -> Any:
    """The logits in what a model returns: the output itself, or what it holds under that name."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    found = getattr(output, "logits", None)
    return output if found is None else found


def find_task(module: nn.Module, input_shape: tuple[int, ...]) -> Task:
    """Run the model on two inputs of zeros; refused where it takes neither numbers nor token ids of that shape."""
    first = next(iter(module.parameters()), None)
    if first is None:
        raise ConfigError("the model has no parameter: there is no gradient, and nothing to attack.")
    numbers = torch.zeros(2, *input_shape, dtype=first.dtype, device=first.device)
    tables = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in module.modules())
    training, vocabulary = module.training, 0
    module.eval()
    try:
        if tables and len(input_shape) == 1:
            vocabulary = _vocabulary(module, numbers.long())
        out = _run(module, numbers.long() if vocabulary else numbers)
    finally:
        module.train(training)
    if isinstance(out, Exception):
        why = (str(out).splitlines() or [type(out).__name__])[0]
        raise UnsupportedModelError(
            f"the model does not take inputs of shape {input_shape} ({why}). Give the shape of one example, without "
            "the batch: 1,28,28 of an image with values in [0, 1]; of token ids their number, such as 16."
        )
    return _task(out, tokens=bool(vocabulary), vocabulary=vocabulary, length=input_shape[0])


def _run(module: nn.Module, x: Tensor) -> Any:
    try:
        with torch.no_grad():
            return logits_of(module(x))
    except _REFUSED as error:
        return error


def _task(out: Any, *, tokens: bool, vocabulary: int, length: int) -> Task:
    if isinstance(out, Tensor) and out.dim() == 2 and len(out) == 2:
        return Task(tokens, False, int(out.shape[1]), vocabulary)
    if tokens and isinstance(out, Tensor) and out.dim() == 3 and tuple(out.shape[:2]) == (2, length):
        return Task(True, True, int(out.shape[2]), vocabulary)
    shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    wanted = "(examples, classes), or (examples, tokens, vocabulary)" if tokens else "(examples, classes)"
    raise UnsupportedModelError(
        f"the model gives {shape} for two inputs, not one row of logits for each: the attacks are on "
        f"classification by cross entropy. Wrap the model so that it returns {wanted}."
    )


def _vocabulary(module: nn.Module, ids: Tensor) -> int:
    """The size of the table that the ids themselves are looked up in (others are of positions or segments); 0: none."""
    sizes: list[int] = []
    marked = ids.clone()
    marked[:, -1] = 1  # positions and segments are not like this in both rows

    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fed = args[0] if args else kwargs.get("input")
        if isinstance(fed, Tensor) and fed.numel() == marked.numel() and torch.equal(fed.reshape_as(marked), marked):
            sizes.append(int(layer.num_embeddings))

    layers = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in layers]
    try:
        failed = isinstance(_run(module, marked), Exception)
    finally:
        for handle in handles:
            handle.remove()
    return 0 if failed or not sizes else min(sizes)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by its formula: fused kernels and the fast path of nn.TransformerEncoder have no second derivatives."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def loss_of(task: Task, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy of examples: of classes y (n,), or of every next token of the ids x (n, T) themselves.

    A model with other outputs for each token than the vocabulary (tagging) is given labels y (n,) for all its tokens.
    """
    if not task.per_token:
        return F.cross_entropy(logits, y)
    labels = x if task.classes == task.vocabulary else y.unsqueeze(1).expand(x.shape)
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return each.mean(1).mean()
