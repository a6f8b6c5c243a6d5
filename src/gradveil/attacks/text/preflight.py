"""Pre-flight of a token model: the text attack on sentences that are made up, one at a time, undefended and planned."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from gradveil.attacks.observation.task import Task
from gradveil.attacks.planned import Tried, cases
from gradveil.attacks.text.attack import TextAttack
from gradveil.attacks.text.observe import observe_text
from gradveil.attacks.text.score import chance, score_text

_VICTIMS = 2
_NEARLY_ALL = 0.9  # of a sentence's tokens: a success


def try_text(
    module: nn.Module,
    input_shape: tuple[int, ...],
    task: Task,
    clip: float | None,
    sigma: float | None,
    batch_size: int,
    seconds: float,
    seed: int,
) -> list[Tried]:
    """What the attack gets of random sentences in each case; no case is begun after ``seconds``."""
    ids = torch.randint(task.vocabulary, (_VICTIMS, 1, *input_shape), generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(_VICTIMS).unsqueeze(1) % task.classes
    guess = chance(ids, task.vocabulary, seed=seed).tokens
    deadline = time.perf_counter() + seconds
    tried = []
    for case in cases(clip, sigma, batch_size):
        named: dict[str, Any] = {"seen": case.words, "attack": TextAttack.name}
        started = time.perf_counter()
        if started >= deadline:
            tried.append(Tried(success=None, note="not tried: the time was up. Give more --seconds.", **named))
            continue
        try:
            seen = observe_text(
                module,
                ids,
                labels,
                clip=clip if case.clipped else None,
                sigma=sigma if case.noised else None,
                training_batch=case.mean_over,
                generator=torch.Generator().manual_seed(seed),
                task=task,
            )
            found = TextAttack().run(seen, task=task, seed=seed).ids
        except (RuntimeError, ValueError, NotImplementedError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            tried.append(Tried(success=None, note=f"cannot be run: {why}", **named))
            continue
        each = [score_text(a.unsqueeze(0), b.unsqueeze(0)).tokens for a, b in zip(found, ids, strict=True)]
        tried.append(
            Tried(
                success=sum(share >= _NEARLY_ALL for share in each) / _VICTIMS,
                reached=f"{sum(each) / _VICTIMS:.0%} of tokens (a guess: {guess:.0%})",
                bound=case.bound(sigma, len(seen.sights[0].defence.groups)),
                iterations=1,
                seconds=round(time.perf_counter() - started, 3),
                **named,
            )
        )
    return tried
