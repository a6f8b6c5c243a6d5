"""From tokens at their positions to sentences: which token at one position goes with which at the next.

Later layers are asked (reader.py): what they are fed with lies in the span of their gradient only if the sentence, up
to that place or as a whole, is one of those behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.attacks.text.reader import Reader

_DRAWN = 32  # sentences that are made up, to see how far wrong ones are
_STARTS = 8  # of the search for whole sentences
_AS_NEAR = 0.94  # of the log distance of the nearest sentence; one wrong token costs more
_AT_A_TIME = 1024  # sentences that are tried at once
_BUDGET = 60_000  # sentences, for all rounds together, in one sweep each
_SWEEPS = 5
_ROUNDS, _SETTLED = 10, 2  # at most, and rounds without a change after which it ends


def _asked(readers: Sequence[Reader], ids: Tensor, place: int | None = None) -> Tensor:
    return torch.stack([r.sentences(ids.clamp(min=0), place) for r in readers]).sum(0).cpu()


def join_causal(readers: Sequence[Reader], inside: Sequence[Sequence[int]], batch: int, seed: int) -> Tensor:
    """Word by word: of all beginnings with all tokens that may come next, those that are nearer than mixed-up ones.

    Returns (at most B, T); a sentence that nothing continues ends there, with -1.
    """
    generator = torch.Generator().manual_seed(seed)
    length = len(inside)
    begun, ended = torch.full((1, length), -1), torch.empty(0, length, dtype=torch.int64)
    for place, tokens in enumerate(inside):
        following = torch.tensor(tokens, dtype=torch.int64)
        if not len(following) or not len(begun):
            break
        tried = begun.repeat_interleave(len(following), 0)
        tried[:, place] = following.repeat(len(begun))
        logs = _asked(readers, tried, place)
        order = logs.argsort()[: batch - len(ended)]
        edge = (logs.min() + _mixed_up(readers, inside, place, generator)) / 2.0
        kept = order[logs[order] <= edge].sort().values
        stays = torch.isin(torch.arange(len(begun)), kept // len(following))
        if place:
            ended = torch.cat([ended, begun[~stays]])
        begun = tried[kept]
    return torch.cat([begun, ended])[:batch]


def _mixed_up(
    readers: Sequence[Reader], inside: Sequence[Sequence[int]], place: int, generator: torch.Generator
) -> Tensor:
    """The log distance of beginnings that are drawn at random from the tokens of each position, and end in any."""
    vocabulary = readers[0].vocabulary
    ids = torch.full((_DRAWN, len(inside)), -1)
    for before, tokens in enumerate(inside[:place]):
        choices = torch.tensor(tokens, dtype=torch.int64)
        ids[:, before] = choices[torch.randint(len(choices), (_DRAWN,), generator=generator)]
    ids[:, place] = torch.randint(vocabulary, (_DRAWN,), generator=generator)
    return _asked(readers, ids, place).median()


def search_whole(readers: Sequence[Reader], inside: Sequence[Sequence[int]], batch: int, seed: int) -> Tensor:
    """Sentences (B, T) by coordinate search: from random choices, one position at a time, to the smallest distance.

    Starts are many; the nearest different ends are the sentences.
    """
    generator = torch.Generator().manual_seed(seed)
    length, options = len(inside), max(map(len, inside))
    starts = max(batch, min(_STARTS * batch, _AT_A_TIME // options))
    choices = [torch.tensor(tokens, dtype=torch.int64) for tokens in inside]
    ends: dict[tuple[int, ...], float] = {}
    nearest: list[tuple[int, ...]] = []
    unchanged = 0
    rounds = max(1, min(_ROUNDS, _BUDGET // (starts * options * length)))
    for _ in range(rounds):
        ids = torch.stack([c[torch.randint(len(c), (starts,), generator=generator)] for c in choices], 1)
        ids, least = _descend(readers, ids, choices, generator)
        ends |= {tuple(row): log for row, log in zip(ids.tolist(), least.tolist(), strict=True)}
        before, nearest = nearest, _different(sorted(ends, key=lambda row: ends[row]), batch)
        unchanged = unchanged + 1 if nearest == before and len(nearest) == batch else 0
        if unchanged == _SETTLED:
            break
    found = torch.full((batch, length), -1)
    found[: len(nearest)] = torch.tensor(nearest)
    return found


def _descend(
    readers: Sequence[Reader], ids: Tensor, choices: Sequence[Tensor], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sentences (n, T) and their log distances, each position in turn at its best given the others."""
    least = _asked(readers, ids)
    for _ in range(_SWEEPS):
        before = ids.clone()
        for place in torch.randperm(len(choices), generator=generator).tolist():
            options = choices[place]
            if len(options) > 1:
                tried = ids.repeat_interleave(len(options), 0)
                tried[:, place] = options.repeat(len(ids))
                least, which = _asked(readers, tried).view(len(ids), -1).min(1)
                ids[:, place] = options[which]
        if torch.equal(ids, before):
            break
        ids, least = _unique(ids, least)
    return ids, least


def _different(ordered: Sequence[tuple[int, ...]], batch: int) -> list[tuple[int, ...]]:
    """The first ``batch`` that are not mostly the same tokens as one before; such ones too where there are too few."""
    found: list[tuple[int, ...]] = []
    for row in ordered:
        if all(2 * (Counter(row) & Counter(other)).total() < len(row) for other in found):
            found.append(row)
    return (found + [row for row in ordered if row not in found])[:batch]


def _unique(ids: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    once, back = torch.unique(ids, dim=0, return_inverse=True)
    found = torch.empty(len(once), dtype=least.dtype)
    found[back] = least
    return once, found


def nearest(readers: Sequence[Reader], ids: Tensor) -> Tensor:
    """Which sentences (n, 1) are as near as the nearest one; all where they were joined word by word."""
    if readers[0].causal or not readers[0].later:
        return torch.ones(len(ids), 1, dtype=torch.bool)
    logs = _asked(readers, ids)
    return (logs <= _AS_NEAR * logs.min()).unsqueeze(1)


def link_by_score(readers: Sequence[Reader], ids: Tensor) -> None:
    """Tokens (B, T) at known positions, exchanged between sentences in place: each beginning takes the best of them."""
    if len(ids) < 2 or not readers[0].later or not readers[0].causal:
        return
    batch, length = ids.shape
    for place in range(1, length):
        tried = ids.repeat_interleave(batch, 0)
        tried[:, place] = ids[:, place].repeat(batch)
        logs = _asked(readers, tried, place).view(batch, batch)
        _, which = linear_sum_assignment(logs.numpy())
        ids[:, place] = ids[torch.as_tensor(which), place]
