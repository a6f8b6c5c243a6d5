"""The attack on models of tokens: which tokens, at which positions, in which sentences.

    1. The embedding's gradient tells which tokens occurred (rows.py).
    2. A pair of token and position lies in the span of the first attention layer's gradient, or not (span.py).
    3. Sentences: the same question to later layers, word by word where they look back only (GPT-2), for whole sentences
       by coordinate search where they look both ways (BERT).
    4. The last token of a language model is no input of any loss; it is read off the output layer, whose gradient has
       its row (last_token.py).

Where noise leaves no gap between pairs inside and outside the span, the answers become a ranking, and the best
assignment of tokens to places is returned. Clipping scales each sentence's gradient and changes no span.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.attacks.methods.base import full_precision
from gradveil.attacks.observation.task import Task, find_task
from gradveil.attacks.observation.views import Observation
from gradveil.attacks.text.last_token import last_tokens
from gradveil.attacks.text.reader import Reader
from gradveil.attacks.text.sentences import join_causal, link_by_score, nearest, search_whole
from gradveil.errors import UnsupportedModelError

_GAP = math.log(4.0)  # between the farthest pair inside a span and the nearest outside, to be called separate
_CLEAR = 5.0  # a log likelihood ratio from which on a row counts for more than what is expected anyway
_ENOUGH = 50  # tokens, to see how far out one stands among the others
_NEAR = math.log(1e-4)  # a squared distance that counts as none, next to 1 for a vector outside
_MOST_INSIDE = 16  # tokens at a position that are tried in sentences, for each sentence
_COPIES, _AGAIN = 8, 5.0  # how often a token may be guessed, and what each further time costs where nothing tells
_MOST_TOKENS = 4  # candidates in an assignment, for each token that is looked for


@dataclass(kw_only=True)
class TextReconstruction:
    """Legend: V victims, B sentences, T tokens."""

    ids: Tensor  # (V, B, T)
    sure: Tensor  # (V, B, T): read off without a guess, sentence by sentence
    ranking: Tensor  # (V, vocabulary): the higher, the more likely that the token occurred
    facts: list[dict[str, float]] = field(default_factory=list)  # for each victim: sizes of the spans


class TextAttack:
    """For token models; what is observed of several steps adds up."""

    name = "text"

    def run(self, observation: Observation, *, task: Task | None = None, seed: int = 0) -> TextReconstruction:
        task = task or find_task(observation.module, observation.input_shape)
        if not task.tokens:
            raise UnsupportedModelError(
                "the text attack is on models that take token ids, and this one takes numbers: use another attack, "
                "such as map."
            )
        with full_precision():
            found = [self._victim(observation, v, task, seed) for v in range(observation.victims)]
        ids, sure, ranking, facts = zip(*found, strict=True)
        return TextReconstruction(
            ids=torch.stack(ids), sure=torch.stack(sure), ranking=torch.stack(ranking), facts=list(facts)
        )

    def _victim(
        self, observation: Observation, victim: int, task: Task, seed: int
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
        readers = [Reader(observation, sight, victim, task) for sight in observation.sights]
        public = None if observation.public is None else observation.public.x
        evidence = _Evidence(readers, task.vocabulary, public)
        shape = (observation.batch, observation.input_shape[0])
        ids, sure = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
        inside = evidence.inside(observation.batch)
        facts = {**readers[0].facts(), "pairs_found": sum(map(len, inside)), "separate": float(any(map(len, inside)))}
        if any(map(len, inside)):
            found = self._sentences(readers, inside, observation.batch, seed)
            ids[: len(found)] = found
            sure[: len(found)] = (found >= 0) & nearest(readers, found)
            if task.per_token and readers[0].causal and bool((ids[:, :-1] >= 0).all()):
                ids[:, -1], sure[:, -1] = last_tokens(readers[0], ids[:, :-1])
        self._fill(ids, evidence, readers)
        return ids, sure, evidence.ranking(), facts

    @staticmethod
    def _sentences(readers: Sequence[Reader], inside: list[list[int]], batch: int, seed: int) -> Tensor:
        """Sentences (at most B, T) of the tokens at each position; -1 where one ends, or is not known."""
        if readers[0].causal:
            return join_causal(readers, inside, batch, seed)
        if readers[0].later and all(map(len, inside)):
            return search_whole(readers, inside, batch, seed)
        return torch.full((batch, len(inside)), -1)

    @staticmethod
    def _fill(ids: Tensor, evidence: _Evidence, readers: Sequence[Reader]) -> None:
        """The most likely tokens where none is known.

        That a token occurs is evidence once; if it occurs already, only its position counts.
        """
        missing = (ids < 0).nonzero()
        if not len(missing):
            return
        tokens = evidence.best(_MOST_TOKENS * ids.numel())
        occurs, position, often = evidence.scores(tokens)
        again = position[:, missing[:, 1]]
        used = torch.isin(tokens, ids[ids >= 0])
        copies = [torch.where(used, 0.0, occurs) + often]
        copies += [often - math.log(i) - evidence.again * (i - 1) for i in range(2, _COPIES + 1)]
        values = torch.cat([again + copy.unsqueeze(1) for copy in copies])
        rows, places = linear_sum_assignment(values.numpy(), maximize=True)
        guessed = len(missing) == ids.numel()
        ids[missing[places, 0], missing[places, 1]] = tokens[torch.as_tensor(rows % len(tokens))]
        if guessed:
            link_by_score(readers, ids)


class _Evidence:
    """What all steps together tell of tokens and of their positions."""

    def __init__(self, readers: Sequence[Reader], vocabulary: int, public: Tensor | None = None) -> None:
        self.vocabulary = vocabulary
        rows = [r for r in (reader.rows() for reader in readers) if r is not None]
        self._ratio = torch.stack([r.ratio.cpu() for r in rows]).sum(0) if rows else torch.zeros(vocabulary).double()
        self._often = rows[0].counts.cpu().log() if rows else torch.zeros(vocabulary).double()
        self.again = 0.0 if bool((self._ratio > 0).any()) or public is not None else _AGAIN
        if public is not None:  # as often as anyone would expect, where the gradient says nothing
            seen = torch.bincount(public.flatten().long().cpu().clamp(0, vocabulary - 1), minlength=vocabulary) + 0.5
            expected = (readers[0].batch * readers[0].length * seen / seen.sum()).log().double()
            self._often = torch.where(self._ratio > _CLEAR, torch.maximum(self._often, expected), expected)
        known = next((r.tokens for r in rows if r.tokens is not None), None)
        self.tokens = torch.arange(vocabulary) if known is None else known.cpu()
        pairs = [p for p in (reader.pairs(self.tokens) for reader in readers) if p is not None]
        self.logs = torch.stack(pairs).sum(0).cpu() if pairs else None
        self._length, self._places = readers[0].length, readers[0].batch * readers[0].length
        self._position = self._normal()

    def _normal(self) -> Tensor:
        """Log likelihood ratios (tokens, T) of pairs, by how far each stands out among all tokens at its position.

        There are more pairs as far out as this one than the tail of the others has (exponential beyond its last tenth,
        the pairs that may be inside left out): so many times likelier is it.
        """
        if self.logs is None or len(self.logs) < _ENOUGH:
            logs = self.logs
            length = torch.zeros(len(self.tokens), self._length, dtype=torch.float64)
            return length if logs is None else (-logs - (-logs).median(0).values).clamp(min=0.0)
        median = self.logs.median(0).values
        spread = 1.4826 * (self.logs - median).abs().median(0).values.clamp(min=1e-6)
        z = (median - self.logs) / spread
        order = z.flatten().sort().values
        others = order[: max(len(order) // 2, len(order) - self._places)]
        start = float(others.quantile(0.9)) if len(others) < 1 << 24 else float(others[int(0.9 * len(others))])
        tail = others[others > start] - start
        scale = max(float(tail.mean()) if len(tail) else 0.0, 1e-3)
        rank = len(order) - torch.searchsorted(order, z)  # how many are at least as far out
        expected = math.log(0.1 * len(others)) - (z - start).clamp(min=0.0) / scale
        found: Tensor = (rank.clamp(min=1).log() - expected).clamp(min=0.0)
        return torch.where(z > start, found, 0.0)

    def inside(self, batch: int) -> list[list[int]]:
        """The tokens at each position that lie in the span; none at all where there is no gap that tells.

        There may be more than B: a token that occurs at two positions puts their difference into the span, and with it
        every token of the one at the other. Later layers tell them apart.
        """
        nothing: list[list[int]] = [[] for _ in range(self._length)]
        if self.logs is None:
            return nothing
        logs = self.logs.clamp(min=_NEAR)
        order = logs.flatten().sort().values.numpy()
        gaps = np.diff(order)
        if not len(gaps) or gaps.max() < _GAP:
            return nothing
        edge = (order[gaps.argmax()] + order[gaps.argmax() + 1]) / 2.0
        found = []
        for place in range(self._length):
            log = self.logs[:, place]
            within = (log < edge).nonzero().flatten()
            found.append([int(t) for t in self.tokens[within[log[within].argsort()]][: _MOST_INSIDE * batch]])
        return found

    def ranking(self) -> Tensor:
        """(vocabulary,): evidence that a token occurs, at its best position."""
        found = torch.full((self.vocabulary,), -1e13, dtype=torch.float64)
        found[self.tokens] = (self._ratio + self._often)[self.tokens] + self._position.amax(1)
        return found

    def best(self, count: int) -> Tensor:
        """The tokens with most evidence, at most ``count``."""
        return self.ranking().topk(min(count, len(self.tokens))).indices

    def scores(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evidence that tokens occur (tokens,) and stand at each position (tokens, T), and the log of how often."""
        return self._ratio[tokens], self._position[torch.searchsorted(self.tokens, tokens)], self._often[tokens]
