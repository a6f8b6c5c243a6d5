"""One attack tried on victims of a data set under one strategy, judged, with controls and the bound beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil import models
from gradveil.accounting.rero import one_step_bound
from gradveil.attacks.analytic import Analytic
from gradveil.attacks.attack import Attack, Reconstruction
from gradveil.attacks.inversion import MAP, Inverting
from gradveil.attacks.matching import CPL, DLG, IDLG
from gradveil.attacks.metrics import psnr
from gradveil.attacks.observation import VIEWS, Defence, Secret
from gradveil.attacks.observe import observe
from gradveil.attacks.prior import Prior
from gradveil.attacks.score import MARGIN_DB, Score, best_guess, controls, score
from gradveil.attacks.seeds import start_of
from gradveil.data import DataSet
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.strategies import Parameters, parameters

ATTACKS: dict[str, Callable[[], Attack]] = {
    "cpl": CPL,
    "dlg": DLG,
    "idlg": IDLG,
    "inverting": Inverting,
    "map": MAP,
    "analytic": Analytic,
}
NAMES = (*ATTACKS, "prior")
_CANDIDATES = 1000  # images that guessing is tried with, and that the prior attack chooses from


@dataclass(frozen=True, kw_only=True)
class Trial:
    """``training_batch`` is the expected batch size B by which the released mean is taken."""

    strategy: str = "non-private"
    attack: str = "cpl"
    victims: int = 20
    batch: int = 1
    view: str = "per-example"
    clip: float = 4.0
    sigma: float = 6.0
    steps: int = 1000
    step: int = 0
    reading: str | None = None
    training_batch: int = 600
    iterations: int = 300
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.attack not in NAMES:
            raise UnknownNameError("attack", self.attack, NAMES)
        if self.view not in VIEWS:
            raise UnknownNameError("view", self.view, VIEWS)
        for name in ("victims", "batch", "iterations", "training_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', ' ')} is {getattr(self, name)}; give at least 1.")
        if not 0 <= self.step < self.steps:
            raise ConfigError(f"step {self.step} is not one of the run's {self.steps}, which count from 0.")

    def plan(self) -> Parameters | None:
        if self.strategy == "non-private":
            return None
        return parameters(self.strategy, steps=self.steps, clip=self.clip, sigma=self.sigma, reading=self.reading)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    trial: Trial
    score: Score
    reconstruction: Reconstruction
    secret: Secret
    controls: dict[str, Score]
    kappa: float  # how often guessing succeeds: estimated, with the best of some training images as the guess
    bound: float | None  # on any attack's success at this step, if guessing succeeds so often; None: there is none
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.trial),
            "result": self.score.summary(),
            "controls": {name: found.summary() for name, found in self.controls.items()},
            "guess_succeeds": self.kappa,
            "success_bound": self.bound,
            "iterations": len(self.reconstruction.losses),
            "seconds": round(self.seconds, 3),
        }


def run(trial: Trial, data: DataSet, *, model: nn.Module | None = None, plan: Parameters | None = None) -> Outcome:
    """Attack examples of the training set. The model defaults to the untrained CPL net, the plan to the trial's."""
    count = trial.victims * trial.batch
    if count + _CANDIDATES // 2 > len(data.x_train):
        raise ConfigError(
            f"{trial.victims} victims of {trial.batch} example(s) leave too few of the {len(data.x_train)} training "
            "examples to compare with. Take fewer."
        )
    generator = torch.Generator().manual_seed(trial.seed)
    if model is None:
        model = models.cpl_net(data.input_shape, data.classes, generator=generator)
    order = torch.randperm(len(data.x_train), generator=generator)
    device = torch.device(trial.device)
    model = model.to(device)
    x, y = data.x_train[order].to(device), data.y_train[order].to(device)
    shape = (trial.victims, trial.batch)
    victims = (x[:count].unflatten(0, shape), y[:count].unflatten(0, shape))
    others = x[count:]
    seen, secret = observe(
        model,
        *victims,
        plan=plan or trial.plan(),
        view=trial.view,
        step=trial.step,
        training_batch=trial.training_batch,
        classes=data.classes,
        generator=generator,
    )
    attack = _attack(trial, x, y, others)
    started = time.perf_counter()
    found = attack.run(seen, iterations=trial.iterations, seed=trial.seed)
    seconds = time.perf_counter() - started
    mean_image = others.mean(0)
    near = x[: max(_CANDIDATES, count)]
    judged = score(
        found,
        secret,
        mean_image=mean_image,
        candidates=near,
        candidate_index=torch.arange(count, device=device).view(trial.victims, trial.batch),
    )
    start = start_of(seen, "half", torch.Generator().manual_seed(trial.seed))
    guesses = controls(secret, mean_image=mean_image, others=others, seed=start, generator=generator)
    kappa = 1.0 / len(attack.x) if isinstance(attack, Prior) else guessing_chance(others, mean_image)
    return Outcome(
        trial=trial,
        score=judged,
        reconstruction=found,
        secret=secret,
        controls={name: score(_as_found(g, secret), secret, mean_image=mean_image) for name, g in guesses.items()},
        kappa=kappa,
        bound=_bound(seen.sights[0].defence, kappa),
        seconds=seconds,
    )


def _attack(trial: Trial, x: Tensor, y: Tensor, others: Tensor) -> Attack:
    """Those that use what is public of the data get training examples other than the victims for it."""
    if trial.attack == "prior":
        return Prior(x[:_CANDIDATES], y[:_CANDIDATES])
    if trial.attack == "map":
        return MAP(public=others[: 5 * _CANDIDATES])
    return ATTACKS[trial.attack]()


def _as_found(x: Tensor, secret: Secret) -> Reconstruction:
    nobody = torch.zeros(len(x), device=x.device)
    return Reconstruction(x=x, labels=secret.y, loss=nobody, losses=[], frames={}, failed=nobody.bool())


def guessing_chance(others: Tensor, mean_image: Tensor) -> float:
    """How often the best single image of the training set is a success for another example of it."""
    half = min(_CANDIDATES, len(others) // 2)
    guesses, truths = others[:half], others[half : 2 * half].unsqueeze(1)
    needed = best_guess(truths, mean_image) + MARGIN_DB
    rates = [(psnr(guess.expand_as(truths), truths) >= needed).double().mean() for guess in guesses]
    return max(float(torch.stack(rates).max()), 1.0 / half)


def _bound(defence: Defence, kappa: float) -> float | None:
    """On the success of any attack on one example that is known to take part in this one release.

    By how much an example moves what is seen, relative to the noise on it: a single example's gradient that is noised
    for a batch of B is hardly protected at all.
    """
    if defence.clip is None or defence.noise_std is None or defence.sensitivity_rule != "clip" or kappa >= 1.0:
        return None
    moves = [c / defence.normaliser / std for c, std in zip(defence.clip, defence.noise_std, strict=True)]
    return one_step_bound(1.0 / math.hypot(*moves), kappa)
