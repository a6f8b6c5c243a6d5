"""Pre-flight of a model: what of it leaks, whether it can be trained privately, and attacks on it for a few seconds.

The attacks are on made-up examples (smooth images; rows of bits), one at a time, which is the worst case, as the
factory makes the model. What the adversary sees, from most to least:

    undefended               the gradient as it is
    clipped                  to C, before any noise
    noise, example alone     with the noise that the released mean of B gets: sigma C / B
    noise, others known      the released sum less the other examples' share: noise sigma C; proofs are about this one

An attack that fails in seconds proves nothing; the bound beside it does.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.accounting._rounding import at_most
from gradveil.attacks.methods.analytic import Analytic, leaking_layer
from gradveil.attacks.methods.base import Attack, Reconstruction
from gradveil.attacks.methods.inversion import MAP, Inverting
from gradveil.attacks.observation.from_files import state_of
from gradveil.attacks.observation.model_structure import ModelStructure, examine
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.observation.task import find_task
from gradveil.attacks.observation.views import GroundTruth, Observation, Public
from gradveil.attacks.planned import KAPPA, Tried, cases
from gradveil.attacks.scoring.evaluate import score
from gradveil.attacks.scoring.scores import ImageScore
from gradveil.attacks.text.preflight import try_text
from gradveil.clipping import fix
from gradveil.errors import ConfigError, UnsupportedModelError
from gradveil.mechanism.strategies import parameters

__all__ = ["KAPPA", "Preflight", "Tried", "inspect_model", "made_up"]

VICTIMS = 4
_NO_BOUND = 0.99  # a limit above this is none
_PUBLIC = 200
_ITERATIONS = 300
_TIMED = 4


@dataclass(frozen=True, kw_only=True)
class Preflight:
    anatomy: ModelStructure
    tried: tuple[Tried, ...]
    verdict: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "can_be_trained": self.anatomy.can_be_trained}


def inspect_model(
    module: nn.Module,
    *,
    input_shape: tuple[int, ...],
    classes: int | None = None,
    clip: float | None = None,
    sigma: float | None = None,
    batch_size: int = 1,
    seconds: float = 20.0,
    seed: int = 0,
) -> Preflight:
    """The whole pre-flight. ``seconds`` is for the attacks together; each gets at least one iteration, or is left out.

    ``sigma`` needs ``clip``; without them the undefended gradient is attacked alone.
    """
    for name, value in (("clip", clip), ("sigma", sigma), ("seconds", seconds)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value!r}; give a positive number.")
    if sigma is not None and clip is None:
        raise ConfigError(f"sigma is {sigma:g}, and noise is scaled to a clip bound. Give clip too.")
    if batch_size < 1:
        raise ConfigError(f"batch size is {batch_size}; give at least 1.")
    task = find_task(module, input_shape)
    classes = classes or task.classes
    anatomy = examine(module, input_shape=input_shape, classes=classes, seed=seed, task=task)
    mended = anatomy.can_be_mended
    target = (copy.deepcopy(module) if anatomy.can_be_trained or not mended else fix(module)).eval()
    if not mended:  # an unsupported model has a plain gradient still; one that mixes examples has none of each
        clip = sigma = None
    if task.tokens:
        tried = []
        if mended or not anatomy.mixes:
            tried = try_text(target, input_shape, task, clip, sigma, batch_size, seconds, seed)
        return Preflight(anatomy=anatomy, tried=tuple(tried), verdict=tuple(_verdict(anatomy, tried, sigma)))
    examples = made_up(VICTIMS + _PUBLIC, input_shape, seed=seed)
    labels = torch.randint(classes, (len(examples),), generator=torch.Generator().manual_seed(seed))
    tried = []
    if mended or not anatomy.mixes:
        seen = _sights(target, examples, labels, classes, clip, sigma, batch_size, seed)
        # The attack takes the first linear layer; it must be one that is fed with the input.
        first = leaking_layer(target, math.prod(input_shape))
        analytic = first in anatomy.leaking("input")
        tried = _try_all(seen, analytic=analytic, seconds=seconds, seed=seed) if isinstance(seen, list) else [seen]
    return Preflight(anatomy=anatomy, tried=tuple(tried), verdict=tuple(_verdict(anatomy, tried, sigma)))


def made_up(count: int, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Examples in [0, 1]: images of a few soft blobs, rows of bits; anything else, noise."""
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return (torch.rand(count, *shape, generator=generator) < 0.3).float()
    if len(shape) != 3:
        return torch.rand(count, *shape, generator=generator)
    coarse = torch.rand(count, shape[0], 4, 4, generator=generator).square()
    return F.interpolate(coarse, size=shape[1:], mode="bicubic", align_corners=False).clamp(0.0, 1.0)


Sighted = tuple[str, Observation, GroundTruth, float | None]


def _sights(
    module: nn.Module,
    examples: Tensor,
    labels: Tensor,
    classes: int,
    clip: float | None,
    sigma: float | None,
    batch_size: int,
    seed: int,
) -> list[Sighted] | Tried:
    """What is seen in each case, with the bound where there is one."""
    dtype = next(module.parameters()).dtype
    x, y = examples[:VICTIMS].unsqueeze(1).to(dtype), labels[:VICTIMS].unsqueeze(1)
    public = Public(examples[VICTIMS:].to(dtype), labels[VICTIMS:])
    # sigma is of no account where the view is before the noise.
    plan = None if clip is None else parameters("baseline", steps=1, clip=clip, sigma=sigma or 1.0)
    found: list[Sighted] = []
    try:
        for case in cases(clip, sigma, batch_size):
            generator = torch.Generator().manual_seed(seed)
            seen, secret = observe(
                module,
                x,
                y,
                plan=plan if case.clipped else None,
                view="per-example-noised" if case.noised else "per-example",
                training_batch=case.mean_over,
                classes=classes,
                generator=generator,
                public=public,
                weights=state_of(module),
            )
            bound = case.bound(sigma, len(seen.sights[0].defence.groups))
            found.append((case.words, seen, secret, bound))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return Tried(seen="undefended", attack="-", success=None, note=f"no attack can run: {_first_line(error)}")
    return found


def _try_all(seen: Sequence[Sighted], *, analytic: bool, seconds: float, seed: int) -> list[Tried]:
    """Every case with every attack that suits it; the time that is left is shared out evenly before each."""
    jobs: list[tuple[Sighted, Attack]] = []
    for case in seen:
        attacks: list[Attack] = [Analytic()] if analytic else []
        attacks.append(MAP(restarts=1))
        if case[1].sights[0].defence.noise_std is None and case[1].sights[0].defence.clip is None:
            attacks.append(Inverting(restarts=1))
        jobs += [(case, attack) for attack in attacks]
    deadline = time.perf_counter() + seconds
    tried = []
    for i, (case, attack) in enumerate(jobs):
        searches = sum(not isinstance(other, Analytic) for _, other in jobs[i:])
        tried.append(_try(case, attack, (deadline - time.perf_counter()) / max(1, searches), seed))
    return tried


def _try(case: Sighted, attack: Attack, seconds: float, seed: int) -> Tried:
    words, seen, secret, bound = case
    named: dict[str, Any] = {"seen": words, "attack": attack.name, "bound": bound}
    if seconds <= 0:
        return Tried(success=None, note="not tried: the time was up. Give more --seconds.", **named)
    assert seen.public is not None
    started = time.perf_counter()
    try:
        found = _run_for(attack, seen, seconds, seed)
        judged = score(found, secret, mean_image=seen.public.x.mean(0))
    except (RuntimeError, ValueError, NotImplementedError, UnsupportedModelError) as error:
        return Tried(success=None, note=f"cannot be run: {_first_line(error)}", **named)
    s = judged.summary()
    reached = (
        f"{s['psnr_median']:.1f} dB (a guess: {s['guess_psnr_median']:.1f})"
        if isinstance(judged, ImageScore)
        else f"{s['wrong_median']:.0f} wrong (a guess: {s['guess_wrong_median']:.0f})"
    )
    return Tried(
        success=s["success_rate"],
        reached=reached,
        iterations=len(found.losses),
        seconds=round(time.perf_counter() - started, 3),
        **named,
    )


def _run_for(attack: Attack, seen: Observation, seconds: float, seed: int) -> Reconstruction:
    """As many iterations as fit: a first one (which is slow: much is loaded), a few that are timed, then the rest.

    A run that takes longer than was foreseen is broken off, and the last of the earlier ones stands.
    """
    begun = time.perf_counter()
    found, done, took = attack.run(seen, iterations=1, seed=seed), 1, time.perf_counter() - begun

    def watch(iteration: int, x: Tensor) -> None:
        if time.perf_counter() - begun > seconds:
            raise _TimeUp

    for limit in () if isinstance(attack, Analytic) else (_TIMED, _ITERATIONS):
        left = seconds - (time.perf_counter() - begun)
        fit = min(limit, int(0.8 * left * done / took))
        if fit > done:
            started = time.perf_counter()
            try:
                found, done, took = attack.run(seen, iterations=fit, seed=seed, watch=watch), fit, 0.0
            except _TimeUp:
                break
            took = time.perf_counter() - started
    return found


class _TimeUp(Exception):
    """The time of an attack is up."""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _verdict(anatomy: ModelStructure, tried: Sequence[Tried], sigma: float | None) -> list[str]:
    words = [
        f"This model was made to leak: layer {found.layer!r} ({found.kind}): {found.words}. Do not train it on your "
        "data."
        for found in anatomy.made_to_leak
    ]
    if anatomy.can_be_trained:
        words.append(f"It can be trained privately as it is, in {anatomy.groups} group(s).")
    else:
        why = "it mixes the examples of a batch" if anatomy.mixes else "a layer of it is not supported"
        words.append(f"It cannot be trained privately as it is: {why}.")
        if anatomy.can_be_mended:
            words.append("gradveil.fix(model) mends it, and is what was attacked.")
        elif anatomy.mixes:
            words.append("Nothing was attacked: no example has a gradient of its own.")
        else:
            words.append("It was attacked without a defence only, for none can be put around it.")
    if layers := anatomy.leaking("input"):
        words.append(
            f"Undefended it hides nothing: the gradient of {layers[0]!r} divided by that of its bias is the input of a "
            "single example, without any search. Clipping does not change that; noise does."
        )
    cases = list(dict.fromkeys(t.seen for t in tried))
    for case in cases:
        rates = [(t.success, t) for t in tried if t.seen == case and t.success is not None]
        if not rates:
            words.append(f"{case}: nothing could be tried.")
            continue
        best, how = max(rates, key=lambda pair: pair[0])
        if best > 0:
            words.append(f"{case}: {how.attack} got {best:.0%} of the examples back, {how.reached}: it leaks.")
        elif how.bound is None or how.bound > _NO_BOUND:
            words.append(f"{case}: no example came back in this time. That proves nothing.")
        else:
            words.append(
                f"{case}: no example came back in this time. Proved for one step: where guessing succeeds in 1 of 100, "
                f"no attack succeeds in more than {at_most(how.bound, digits=3)}."
            )
    if sigma is None and anatomy.can_be_mended:
        words.append("No noise was planned: give clip and sigma to see what they change.")
    return words
