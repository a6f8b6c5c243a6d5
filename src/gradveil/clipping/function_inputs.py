"""Inputs of a module that is followed as a whole: where the batch stands in each, and that they stay as they were."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradveil.clipping.units import Unit
from gradveil.errors import UnsupportedModelError


def refuse_joined_examples(unit: Unit, args: Any, kwargs: Any) -> None:
    """Refuse, by name, inputs in which examples lie one behind the other: which part is whose cannot be told."""
    if any(isinstance(given, PackedSequence) for given in (*args, *kwargs.values())):
        raise UnsupportedModelError(
            f"{unit.label} was called with a packed sequence: the steps of all examples lie one behind the other, so "
            "they cannot be told apart. Give it padded sequences, (batch, time, features) with batch_first=True, and "
            "take each example's last real step from the output."
        )
    if isinstance(unit.module, nn.EmbeddingBag):
        bags = _given(args, kwargs, 0, "input")
        if isinstance(bags, Tensor) and bags.dim() == 1:
            raise UnsupportedModelError(
                f"{unit.label} was called with a 1-D input and offsets: the tokens of all examples lie one behind the "
                "other, so they cannot be told apart. Give it 2-D bags, (batch, tokens), filled up with padding_idx."
            )
    if isinstance(unit.module, nn.MultiheadAttention):
        mask = _given(args, kwargs, 5, "attn_mask")
        if isinstance(mask, Tensor) and mask.dim() == 3:
            raise UnsupportedModelError(
                f"{unit.label} was called with an attn_mask of shape {tuple(mask.shape)}, (batch * heads, T, T): the "
                "heads of all examples lie one behind the other, so they cannot be told apart. Give it an attn_mask "
                "(T, T) that holds for all examples, and key_padding_mask (batch, T) for what differs between them."
            )


def batch_dims(unit: Unit, args: Any, kwargs: Any, leaves: list[Any], batch: int) -> dict[int, int]:
    """By flat input: the dimension along which its examples lie. Inputs that are the same for all are left out."""
    found: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        dim = _batch_dim(unit, args, kwargs, i, leaf, batch) if leaf.dim() else None
        if dim is not None:
            found[i] = dim
        elif leaf.requires_grad:
            raise UnsupportedModelError(
                f"{unit.label} was called with an input of shape {tuple(leaf.shape)} that needs a gradient and has no "
                f"dimension for the batch of {batch}, such as a weight: what each example adds to its gradient cannot "
                "be told apart. Use a weight in the module that owns it; give anything else a batch dimension, first."
            )
    if not found:
        shapes = [tuple(v.shape) for v in leaves if isinstance(v, Tensor)]
        raise UnsupportedModelError(
            f"{unit.label} was called with inputs of shape {shapes}, none with the batch of {batch} first, so its "
            "examples cannot be told apart. Put the batch dimension first (batch_first=True)."
        )
    return found


def _batch_dim(unit: Unit, args: Any, kwargs: Any, place: int, leaf: Tensor, batch: int) -> int | None:
    """As the first batch taught it; where it did not, as the kind of module has it, or else the first dimension."""
    if unit.inputs.get(place) == "mixed":
        raise UnsupportedModelError(
            f"{unit.label} was called with an input of shape {tuple(leaf.shape)} in a batch of {batch} examples: in "
            "some of its calls the first dimension is the batch, in others it is not (a table of constants, say), so "
            "its examples cannot be told apart. Give it the batch in every call: table.expand(len(x), -1, -1)."
        )
    if place in unit.batch_dims:
        known = unit.batch_dims[place]
        if known is None or leaf.shape[known : known + 1] == (batch,):
            return known
        if leaf.shape[known : known + 1] == (1,):
            return None  # the same for all examples, this time
        raise UnsupportedModelError(
            f"{unit.label} was called with an input of shape {tuple(leaf.shape)}: its dimension {known} was the batch "
            f"when the model was first called, and is not the batch of {batch} now, so its examples cannot be told "
            "apart. Call it with the same kinds of inputs each time."
        )
    if unit.inputs.get(place) == "shared":
        return None
    module, expected = unit.module, 0
    if isinstance(module, nn.RNNBase):
        is_input = leaf is _given(args, kwargs, 0, "input")
        expected = 0 if is_input and module.batch_first else 1  # states: (layers, batch, features)
        if leaf.dim() != 3:
            return None  # a sequence without a batch
    elif isinstance(module, nn.MultiheadAttention) and not module.batch_first and leaf.dim() == 3:
        expected = 1
    if batch == 1 and not unit.inputs and leaf.shape[expected : expected + 1] != (1,):
        # With one example there is nothing to tell apart: any dimension of size one will do.
        return next((d for d, size in enumerate(leaf.shape) if size == 1), None)
    return expected if leaf.shape[expected : expected + 1] == (batch,) else None


def _given(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


class Stamps:
    """The versions of tensors at one time: autograd counts one up at every change in place."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = [t for t in tensors if not t.is_inference()]  # those are not counted
        self.versions = [t._version for t in self.tensors]

    def changed(self) -> Tensor | None:
        """One that was changed since, if any."""
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                return tensor
        return None
