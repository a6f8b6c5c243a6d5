"""One observed step of a token model, ready to be asked: is this token at this position, is this how a sentence begins?

Answers are distances to the spans of gradients (span.py), as logarithms, summed over the layers that tell something.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.attacks.observation.task import Task
from gradveil.attacks.observation.views import Observation, StepObservation
from gradveil.attacks.text.layers import Fed, TokenModel
from gradveil.attacks.text.rows import TokenEvidence, token_evidence, token_table
from gradveil.attacks.text.span import Span, span_of

_LEAST = 1e-9  # a distance that is zero but for rounding
_GROUPS = 3  # layers that are asked, of those that tell something; the first ones are the cheapest
_AT_ONCE = 1 << 22  # numbers that a layer is fed with in one run


@dataclass(frozen=True)
class _Group:
    """Layers that are fed with the same, and the span of their gradients."""

    fed: Fed
    span: Span

    @property
    def tells(self) -> bool:
        return self.span.rank > 0 and not self.span.full


class Reader:
    """``batch``: sentences behind the gradient; ``victim``: which of those that were observed."""

    def __init__(self, observation: Observation, sight: StepObservation, victim: int, task: Task) -> None:
        module = copy.deepcopy(observation.module).eval()
        module.load_state_dict(dict(sight.weights), strict=False)
        self.length, self.batch, self.vocabulary = observation.input_shape[0], observation.batch, task.vocabulary
        self.model = TokenModel(module, self.length, task.vocabulary)
        self.per_token = task.per_token
        self.gradients = {name: g[victim].detach() for name, g in sight.gradients.items()}
        self.stds = _stds(sight, self.gradients)
        self.table = token_table(module, task.vocabulary)
        self.local, self.later = self._groups()

    @property
    def causal(self) -> bool:
        return any(g.fed.kind == "causal" for g in self.later)

    def _groups(self) -> tuple[list[_Group], list[_Group]]:
        """The layers that are asked: local ones, and the first later ones that tell something, of one kind."""
        layers = self.model.layers(list(self.gradients))
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(self.vocabulary, (2, self.length), generator=generator)
        inputs = self.model.inputs(ids, [fed.name for fed in layers])
        together: list[list[Fed]] = []
        for fed in layers:
            x = inputs[fed.name]
            same = (m for m in together if x.shape == inputs[m[0].name].shape and torch.equal(x, inputs[m[0].name]))
            members = next(same, None)
            if members is None:
                together.append([fed])
            else:
                members.append(fed)
        later_kind = "causal" if any(m[0].kind == "causal" for m in together) else "whole"
        found: dict[str, list[_Group]] = {"local": [], later_kind: []}
        for members in together:
            matrices = [fed.matrix(self.gradients[fed.weight]) for fed in members]
            kept = found.get(members[0].kind)
            if kept is None or len(kept) == _GROUPS or not any(bool(m.any()) for m in matrices):
                continue
            stds = None if self.stds is None else [self.stds[fed.weight] for fed in members]
            group = _Group(members[0], span_of(matrices, stds, self.batch * inputs[members[0].name].shape[1]))
            if group.tells or members[0].kind == "local":
                kept.append(group)
        return found["local"], found[later_kind]

    def rows(self) -> TokenEvidence | None:
        """What the table of embeddings tells of the tokens, and of a language model its output layer; None: nothing."""
        found = output_layer(self.model.module, self.vocabulary) if self.per_token else None
        tables = dict.fromkeys(n for n in (self.table, found and found[0]) if n is not None and n in self.gradients)
        evidence = [
            token_evidence(self.gradients[n], None if self.stds is None else self.stds[n], self.batch * self.length)
            for n in tables
        ]
        if not evidence:
            return None
        ratio, counts = (
            torch.stack(parts).amax(0) for parts in zip(*((e.ratio, e.counts) for e in evidence), strict=True)
        )
        return TokenEvidence(ratio, any(e.certain for e in evidence), counts)

    def pairs(self, tokens: Tensor) -> Tensor | None:
        """Log distances (tokens, T) of tokens at positions, the mean over layers; None where no layer tells."""
        asked = [g for g in self.local if g.tells]
        if not asked:
            return None
        at_once = max(1, _AT_ONCE // (self.length * max(g.span.features for g in asked)))
        parts = []
        for some in tokens.split(at_once):
            # What a local layer is fed with depends on one token: a sentence of one token repeated shows all places.
            inputs = self.model.inputs(some.unsqueeze(1).expand(-1, self.length), [g.fed.name for g in asked])
            parts.append(torch.stack([self._logs(g, inputs[g.fed.name]) for g in asked]).mean(0))
        return torch.cat(parts)

    def sentences(self, ids: Tensor, place: int | None = None) -> Tensor:
        """Log distances (n,) of sentences (n, T) in the later layers: at one place (causal), or the sum of all."""
        inputs = self.model.inputs(ids, [g.fed.name for g in self.later])
        logs = [self._logs(g, inputs[g.fed.name]) for g in self.later]
        return torch.stack([log.sum(1) if place is None else log[:, place] for log in logs]).sum(0)

    @staticmethod
    def _logs(group: _Group, x: Tensor) -> Tensor:
        return group.span.distance(x[:, list(group.fed.places)]).clamp(min=_LEAST).log()

    def facts(self) -> dict[str, float]:
        first = self.local[0].span if self.local else None
        return {
            "places": self.batch * self.length,
            "features": 0 if first is None else first.features,
            "span": 0 if first is None else first.rank,
            "later_layers": len(self.later),
        }


def _stds(sight: StepObservation, gradients: dict[str, Tensor]) -> dict[str, float] | None:
    known = sight.defence.noise_of_parameter()
    if known is None:
        return None
    # Where the noise differs between coordinates (adaclip), its root mean square.
    return {
        n: float(s.double().square().mean().sqrt()) if isinstance(s := known[n], Tensor) else float(s)
        for n in gradients
    }


def output_layer(module: nn.Module, classes: int) -> tuple[str, nn.Linear] | None:
    """The last linear layer with a row for each class, by the name its weight has among the parameters."""
    names = {id(p): name for name, p in module.named_parameters()}
    found = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == classes]
    return (names[id(found[-1].weight)], found[-1]) if found else None
