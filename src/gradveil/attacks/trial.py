"""One attack tried on victims of a data set under one strategy, judged, with controls and the bound beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.accounting.reconstruction_robustness import one_step_bound
from gradveil.attacks.methods.analytic import Analytic
from gradveil.attacks.methods.base import Attack, Reconstruction, full_precision
from gradveil.attacks.methods.counts import expected_counts
from gradveil.attacks.methods.inversion import MAP, Inverting
from gradveil.attacks.methods.labels import counts_recovered
from gradveil.attacks.methods.matching import CPL, DLG, IDLG
from gradveil.attacks.methods.prior import Prior
from gradveil.attacks.observation.multi_step import observe_steps
from gradveil.attacks.observation.observe import starting_rule
from gradveil.attacks.observation.views import VIEWS, GroundTruth, Public, StepObservation
from gradveil.attacks.scoring.evaluate import controls, score
from gradveil.attacks.scoring.guessing import guessing_chance
from gradveil.attacks.scoring.oracle import Oracle, oracle
from gradveil.attacks.scoring.scores import Score
from gradveil.attacks.seeds import start_of
from gradveil.attacks.untrained import untrained
from gradveil.clipping import make_groups
from gradveil.clipping.groups import Clipping
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.mechanism.records import inverse_square
from gradveil.mechanism.strategies import PrivacyPlan, parameters
from gradveil.training.data import DataSet

ATTACKS: dict[str, Callable[[], Attack]] = {
    "cpl": CPL,
    "dlg": DLG,
    "idlg": IDLG,
    "inverting": Inverting,
    "map": MAP,
    "analytic": Analytic,
}
NAMES = (*ATTACKS, "prior")
_CANDIDATES = 1000  # examples that guessing is tried with, and that the prior attack chooses from
_PUBLIC = 5000  # examples other than the victims that attacks may learn from


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """``training_batch`` is the expected batch size B by which the released mean is taken.

    ``steps_seen`` steps from ``step`` on are seen, with the victims in each; between them the model is trained on other
    examples at learning rate ``lr``.
    """

    strategy: str = "non-private"
    attack: str = "cpl"
    victims: int = 20
    batch: int = 1
    view: str = "per-example"
    clip: float = 4.0
    sigma: float = 6.0
    steps: int = 1000
    step: int = 0
    steps_seen: int = 1
    lr: float = 0.1
    reading: str | None = None
    clipping: Clipping = "per-layer"
    training_batch: int = 600
    iterations: int = 300
    network: str | None = None  # untrained, see untrained.py; None: the usual one for the data
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.attack not in NAMES:
            raise UnknownNameError("attack", self.attack, NAMES)
        if self.view not in VIEWS:
            raise UnknownNameError("view", self.view, VIEWS)
        for name in ("victims", "batch", "iterations", "training_batch", "steps_seen"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', ' ')} is {getattr(self, name)}; give at least 1.")
        if not 0 <= self.step < self.steps:
            raise ConfigError(f"step {self.step} is not one of the run's {self.steps}, which count from 0.")
        if self.step + self.steps_seen > self.steps:
            raise ConfigError(
                f"{self.steps_seen} steps from step {self.step} on are to be seen, and the run has {self.steps}, which "
                "count from 0. See fewer, or begin earlier."
            )

    def plan(self) -> PrivacyPlan | None:
        if self.strategy == "non-private":
            return None
        return parameters(self.strategy, steps=self.steps, clip=self.clip, sigma=self.sigma, reading=self.reading)


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    trial: AttackConfig
    score: Score
    reconstruction: Reconstruction
    secret: GroundTruth
    controls: dict[str, Score]
    kappa: float  # how often guessing succeeds at most: a confidence limit, see scoring/guessing.py
    labels_guessed: float  # the share of labels that guessing finds: as often as they are among other examples
    bound: float | None  # on any attack's success at this step, if guessing succeeds so often; None: there is none
    seconds: float
    seen_by_onlooker: dict[str, Any]  # iterations until examples came out
    used: dict[str, Any]  # how the gradients that were seen were clipped and noised
    oracle: dict[str, float] | None  # with the attempt chosen by the truth; None where there was one attempt

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.trial),
            "used": self.used,
            "result": self.score.summary() | self.seen_by_onlooker,
            "oracle": self.oracle,
            "controls": {name: found.summary() for name, found in self.controls.items()},
            "guess_succeeds": self.kappa,
            "labels_guessed": self.labels_guessed,
            "success_bound": self.bound,
            "success_interval": {"at_least": float(self.score.success.double().mean()), "at_most": self.bound},
            "iterations": len(self.reconstruction.losses),
            "seconds": round(self.seconds, 3),
        }


@full_precision()
def run(
    trial: AttackConfig,
    data: DataSet,
    *,
    model: nn.Module | None = None,
    plan: PrivacyPlan | None = None,
    rule_state: Mapping[str, Tensor] | None = None,
    options: Mapping[str, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> AttackResult:
    """Attack examples of the training set. The model defaults to an untrained one, the plan to the trial's.

    ``progress`` is told how many iterations are done. ``rule_state``: where a run's clip bounds are at that step
    (quantile-clip, adaclip); default: where they start. ``options``: of the strategy's own rule.
    """
    count = trial.victims * trial.batch
    if count + _CANDIDATES // 2 > len(data.x_train):
        raise ConfigError(
            f"{trial.victims} victims of {trial.batch} example(s) leave too few of the {len(data.x_train)} training "
            "examples to compare with. Take fewer."
        )
    generator = torch.Generator().manual_seed(trial.seed)
    if model is None:
        model = untrained(data, generator=generator, network=trial.network)
    order = torch.randperm(len(data.x_train), generator=generator)
    device = torch.device(trial.device)
    model = model.to(device)
    x, y = data.x_train[order].to(device), data.y_train[order].to(device)
    shape = (trial.victims, trial.batch)
    victims = (x[:count].unflatten(0, shape), y[:count].unflatten(0, shape))
    others = x[count:]
    plan = plan or trial.plan()
    rule = None
    if plan is not None and plan.strategy.is_private:
        groups = make_groups(model, trial.clipping)
        mean_over = float(trial.training_batch)
        rule = starting_rule(plan, model, groups, mean_over, device=device, state=rule_state, options=options)
    public = Public(others[:_PUBLIC], y[count:][:_PUBLIC])
    seen, secret = observe_steps(
        model,
        *victims,
        count=trial.steps_seen,
        others=(others, y[count:]),
        plan=plan,
        view=trial.view,
        step=trial.step,
        training_batch=trial.training_batch,
        clipping=trial.clipping,
        classes=data.classes,
        generator=generator,
        lr=trial.lr,
        rule=rule,
        public=public,
    )
    mean_image = others.mean(0)
    onlooker = Oracle(secret, mean_image)
    near = x[: max(_CANDIDATES, count)]
    attack = Prior(near, y[: len(near)]) if trial.attack == "prior" else ATTACKS[trial.attack]()
    started = time.perf_counter()

    def watch(iteration: int, x: Tensor) -> None:
        onlooker(iteration, x)
        if progress is not None:
            progress(iteration)

    found = attack.run(seen, iterations=trial.iterations, seed=trial.seed, watch=watch)
    seconds = time.perf_counter() - started
    judged = score(
        found,
        secret,
        mean_image=mean_image,
        candidates=near,
        candidate_index=torch.arange(count, device=device).view(trial.victims, trial.batch),
    )
    start = start_of(seen, "half", torch.Generator().manual_seed(trial.seed))
    guesses = controls(secret, mean_image=mean_image, others=others, seed=start, generator=generator)
    if isinstance(attack, Prior):
        kappa = guessing_chance(near, y[: len(near)], mean_image, exact=True)
    else:
        few = slice(count, count + 2 * _CANDIDATES)
        kappa = guessing_chance(x[few], y[few], mean_image, batch=trial.batch)
    expected = expected_counts(seen)
    labels = torch.arange(data.classes, device=device).repeat_interleave(expected).expand_as(secret.y)
    return AttackResult(
        trial=trial,
        score=judged,
        reconstruction=found,
        secret=secret,
        controls={name: score(_as_found(g, secret), secret, mean_image=mean_image) for name, g in guesses.items()},
        kappa=kappa,
        labels_guessed=float(counts_recovered(labels, secret.y).mean()),
        bound=_bound(seen.sights, kappa),
        seconds=seconds,
        seen_by_onlooker=onlooker.summary(),
        used=_used(seen.sights[0]),
        oracle=oracle(found, secret, mean_image),
    )


def _as_found(x: Tensor, secret: GroundTruth) -> Reconstruction:
    nobody = torch.zeros(len(x), device=x.device)
    return Reconstruction(x=x, labels=secret.y, loss=nobody, losses=[], frames={}, failed=nobody.bool())


def _used(seen: StepObservation) -> dict[str, Any]:
    known = seen.defence
    return {
        "clip": known.clip,
        "noise_std_of_the_mean": known.noise_std,
        "mean_over": known.normaliser,
        "sensitivity_rule": known.sensitivity_rule,
        "groups": len(known.groups),
    }


def _bound(sights: Sequence[StepObservation], kappa: float) -> float | None:
    """On the success of any attack on one example that is known to take part in every release that is seen.

    By how much an example moves what is seen, relative to the noise on it: a single example's gradient that is noised
    for a batch of B is hardly protected at all. What is released beside the gradients counts too. Gaussian releases
    add up in 1/z^2, also where each is chosen after those before it.
    """
    total = 0.0
    for defence in (sight.defence for sight in sights):
        if defence.clip is None or defence.noise_std is None or defence.sensitivity_rule != "clip":
            return None
        clips = (clip / defence.normaliser for clip in defence.clip)
        total += inverse_square(zip(clips, defence.noise_std, strict=True)) + defence.side_inverse_square
    return None if kappa >= 1.0 else one_step_bound(total**-0.5, kappa)
