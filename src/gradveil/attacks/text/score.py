"""How much of a text came back: tokens found, in their places, whole sentences, ROUGE; beside what guessing gets.

Sentences have no order in a batch: found ones are matched with true ones so that most tokens are in place.
ROUGE-1, -2 and -L are F1 scores of unigrams, bigrams and the longest common subsequence (Lin 2004).

Legend: V victims, B sentences, T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

_DRAWS = 20  # guesses that chance is averaged over


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """Shares in [0, 1], over all victims. ``tokens``: of the true tokens, how many were found, wherever they stand."""

    tokens: float
    in_place: float  # right token at the right position of the matched sentence
    sentences: float  # found to the last token
    rouge_1: float
    rouge_2: float
    rouge_l: float

    def to_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def score_text(found: Tensor, truth: Tensor) -> TextScore:
    """Ids (V, B, T) against the true ones; -1 stands for a token that is not there."""
    per_victim = [_one(a.tolist(), b.tolist()) for a, b in zip(found, truth, strict=True)]
    means = torch.tensor(per_victim, dtype=torch.float64).mean(0).tolist()
    names = ("tokens", "in_place", "sentences", "rouge_1", "rouge_2", "rouge_l")
    return TextScore(**dict(zip(names, means, strict=True)))


def chance(truth: Tensor, vocabulary: int, *, public: Tensor | None = None, seed: int = 0) -> TextScore:
    """What guessing gets: tokens drawn as often as they are in ``public`` ids, or all alike; the mean of some draws.

    With ``public``, or the expected number of each token, where that gets more.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(vocabulary, dtype=torch.float64)
    if public is not None:
        weights = torch.bincount(public.flatten().cpu().clamp(min=0), minlength=vocabulary)[:vocabulary].double()
    scores = []
    for _ in range(_DRAWS):
        drawn = torch.multinomial(weights, truth.numel(), replacement=True, generator=generator)
        scores.append(asdict(score_text(drawn.view(truth.shape), truth.cpu())))
    drawn_score = {name: sum(s[name] for s in scores) / _DRAWS for name in scores[0]}
    if public is None:
        return TextScore(**drawn_score)
    places = truth[0].numel()
    expected = places * weights / weights.sum()
    counts = expected.floor()
    counts[(expected - counts).topk(places - int(counts.sum())).indices] += 1
    bag = torch.arange(vocabulary).repeat_interleave(counts.long()).view(1, *truth.shape[1:]).expand(truth.shape)
    likeliest = asdict(score_text(bag, truth.cpu()))
    return TextScore(**{name: max(drawn_score[name], likeliest[name]) for name in drawn_score})


def ranking_score(ranking: Tensor, truth: Tensor) -> float:
    """How often a token that occurs is ranked above one that does not, (V, vocabulary) of scores: chance is 1/2."""
    found = []
    for scores, ids in zip(ranking, truth, strict=True):
        occurs = torch.zeros(len(scores), dtype=torch.bool)
        occurs[ids.flatten().cpu()[ids.flatten().cpu() >= 0]] = True
        inside, outside = scores.cpu()[occurs].double(), scores.cpu()[~occurs].double()
        if len(outside):
            order = outside.sort().values
            below = torch.searchsorted(order, inside) + torch.searchsorted(order, inside, right=True)
            found.append(float((below.double() / 2).mean()) / len(outside))
    return sum(found) / len(found) if found else float("nan")


def _one(found: list[list[int]], truth: list[list[int]]) -> tuple[float, ...]:
    right = [[sum(x == y for x, y in zip(a, b, strict=True) if y >= 0) for a in found] for b in truth]
    rows, columns = linear_sum_assignment(right, maximize=True)
    size = sum(token >= 0 for sentence in truth for token in sentence)
    bags = [Counter(token for sentence in ids for token in sentence if token >= 0) for ids in (found, truth)]
    pairs = [(found[j], truth[i]) for i, j in zip(rows, columns, strict=True)]
    rouges = [rouge(a, b) for a, b in pairs]
    return (
        (bags[0] & bags[1]).total() / size,
        sum(right[i][j] for i, j in zip(rows, columns, strict=True)) / size,
        sum(a == b for a, b in pairs) / len(truth),
        *(sum(r[k] for r in rouges) / len(rouges) for k in range(3)),
    )


def rouge(found: Sequence[Any], truth: Sequence[Any]) -> tuple[float, float, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L of one sentence, as F1.

    >>> [round(r, 3) for r in rouge("the cat sat".split(), "the cat ran".split())]
    [0.667, 0.5, 0.667]
    """
    a, b = [t for t in found if t != -1], [t for t in truth if t != -1]

    def f1(common: int, one: int, other: int) -> float:
        return 2.0 * common / (one + other) if one + other else 1.0

    grams = []
    for n in (1, 2):
        counts = [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (a, b)]
        grams.append(f1((counts[0] & counts[1]).total(), counts[0].total(), counts[1].total()))
    longest = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for i, other in enumerate(b, start=1):
            before, longest[i] = longest[i], before + 1 if word == other else max(longest[i], longest[i - 1])
    return grams[0], grams[1], f1(longest[-1], len(a), len(b))
