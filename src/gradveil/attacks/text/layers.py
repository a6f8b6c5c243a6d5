"""Which linear layers of a token model are fed with what, found by running it and not by its names.

    local    what a layer is fed with at a place depends on one token and its position alone: the first attention
             layer's projections, the input weights of a recurrent layer. Every pair of token and position can be tried
             against its gradient.
    causal   it depends on the tokens up to that place: later layers of GPT-2. Sentences can be tried word by word.
    whole    it depends on the whole sentence: later layers of BERT.

The gradient of a linear layer's weight is sum over places of (its input) x (gradient of its output)': of low rank, and
all inputs lie in its span (Petrov et al. 2024, "DAGER"). An adapter's first factor (LoRA) is a linear layer too.

Legend: n sentences, T tokens of each, P places that a layer sees (T, or more with a class token), d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.attacks.observation.task import logits_of, plain_attention

_SAME = 1e-5  # relative: below this, what a layer is fed with has not changed


@dataclass(frozen=True)
class Fed:
    """A linear layer; ``features_first``: its weight is (d, outputs), as in transformers' Conv1D."""

    name: str
    weight: str
    features_first: bool
    kind: str  # "local", "causal", "whole"
    places: tuple[int, ...]  # of each token, where the layer sees it ("whole": every place that depends on a token)

    def matrix(self, gradient: Tensor) -> Tensor:
        """A gradient of the weight as (d, outputs)."""
        return gradient if self.features_first else gradient.T


class _Enough(Exception):
    """All layers that are looked at have been called: the rest of the model need not run."""


class TokenModel:
    """A model of token ids at given weights, and what its linear layers are fed with."""

    def __init__(self, module: nn.Module, length: int, vocabulary: int) -> None:
        self.module, self.length, self.vocabulary = module, length, vocabulary
        self.device = next(module.parameters()).device
        self._layers = {name: m for name, m in module.named_modules() if _parameter(m) is not None}

    @torch.no_grad()
    def inputs(self, ids: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """What the named layers are fed with, (n, P, d) or (n, d) each; the model runs no further than it must."""
        found: dict[str, Tensor] = {}

        def keep(name: str, layer: nn.Module) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                fed = args[0] if args else kwargs.get("query", kwargs.get("input"))
                if isinstance(fed, Tensor):
                    if not getattr(layer, "batch_first", True) and fed.dim() == 3:
                        fed = fed.transpose(0, 1)
                    found[name] = fed.detach()
                if len(found) == len(names):
                    raise _Enough

            return hook

        chosen = {name: self._layers[name] for name in names}
        handles = [m.register_forward_pre_hook(keep(n, m), with_kwargs=True) for n, m in chosen.items()]
        try:
            with plain_attention():  # the fast path of nn.TransformerEncoder calls none of its layers
                self.module(ids.to(self.device))
        except _Enough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return found

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad(), plain_attention():
            found = logits_of(self.module(ids.to(self.device)))
        assert isinstance(found, Tensor)
        return found

    def layers(self, gradients: Sequence[str], *, seed: int = 0) -> list[Fed]:
        """Every linear layer that is called once, has a gradient of its own, and sees tokens one by one."""
        calls = self._calls()
        names: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        usable = []
        for name, layer in self._layers.items():
            parameter = getattr(layer, str(_parameter(layer)))
            same = names[id(parameter)]
            if calls.get(name) == 1 and len(same) == 1 and same[0] in gradients:
                usable.append((name, same[0]))
        generator = torch.Generator().manual_seed(seed)
        base = torch.randint(self.vocabulary, (1, self.length), generator=generator)
        ids = base.repeat(self.length + 1, 1)
        for j in range(self.length):
            ids[j + 1, j] = (ids[j + 1, j] + 1 + int(torch.randint(self.vocabulary - 1, (), generator=generator))) % (
                self.vocabulary
            )
        fed = self.inputs(ids, [name for name, _ in usable])
        found = []
        for name, weight in usable:
            seen = _kind(fed.get(name), self.length)
            if seen is not None:
                layer = self._layers[name]
                first = type(layer).__name__ == "Conv1D"
                found.append(Fed(name, weight, first, *seen))
        return found

    @torch.no_grad()
    def _calls(self) -> dict[str, int]:
        counts: dict[str, int] = {}

        def count(name: str) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                counts[name] = counts.get(name, 0) + 1

            return hook

        handles = [m.register_forward_pre_hook(count(n), with_kwargs=True) for n, m in self._layers.items()]
        try:
            with plain_attention():
                self.module(torch.zeros(2, self.length, dtype=torch.int64, device=self.device))
        finally:
            for handle in handles:
                handle.remove()
        return counts


def _parameter(layer: nn.Module) -> str | None:
    """The name of a linear layer's weight; None where it is another layer."""
    if isinstance(layer, nn.Linear):
        return "weight"
    if isinstance(layer, nn.MultiheadAttention):
        return "in_proj_weight" if layer.in_proj_weight is not None else None
    if isinstance(layer, nn.RNNBase):
        return "weight_ih_l0"
    weight = getattr(layer, "weight", None)
    is_conv1d = type(layer).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2
    return "weight" if is_conv1d else None


def _kind(fed: Tensor | None, length: int) -> tuple[str, tuple[int, ...]] | None:
    """From inputs (T + 1, P, d), the first row plain and row j + 1 with token j changed."""
    if fed is None or fed.dim() != 3 or len(fed) != length + 1 or fed.shape[1] < length:
        return None
    scale = fed[0].abs().amax().clamp(min=1e-12)
    depends = ((fed[1:] - fed[:1]).abs().amax(2) > _SAME * scale).T  # (P, T)
    if bool((depends.sum(1) <= 1).all()) and bool(depends.any(0).all()):
        return "local", tuple(int(depends[:, j].int().argmax()) for j in range(length))
    later = torch.ones_like(depends, dtype=torch.bool).triu(1)
    if fed.shape[1] == length and not bool((depends & later).any()) and bool(depends.diagonal().all()):
        return "causal", tuple(range(length))
    places = tuple(int(p) for p in depends.any(1).nonzero().flatten())
    return ("whole", places) if places else None
