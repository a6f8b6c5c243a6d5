"""Attacks that weigh what was seen against what is probable: the one that knows the defence, and the one by angle.

    map         ours: the most probable input given what was seen. Clips its own dummy gradient as the defence does and
                weighs each layer by its known noise, all observed steps jointly; the prior is the strongest that public
                examples allow: Gaussians with full covariance (gaussian_prior.py), total variation where there are
                none. Of a single example, what linear layers were fed with is read off first (features.py).
    inverting   cosine similarity and total variation, signed steps (Geiping et al. 2020)

Both try several starts and keep, for every victim, the one with the smallest loss of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.methods.analytic import Analytic
from gradveil.attacks.methods.base import FRAMES, Attack, Reconstruction, Watch, squared_differences
from gradveil.attacks.methods.features import feature_misfit, read_features
from gradveil.attacks.methods.gaussian_prior import GaussianPrior, fit_gaussian
from gradveil.attacks.methods.labels import infer_labels, last_linear
from gradveil.attacks.methods.matching import ClipAwareMatching
from gradveil.attacks.methods.whitened_search import LossWatch, Objective, posterior, search
from gradveil.attacks.observation.gradients import model_at
from gradveil.attacks.observation.replay import Replay
from gradveil.attacks.observation.views import Observation, Public, StepObservation
from gradveil.attacks.seeds import start_of
from gradveil.errors import UnsupportedModelError

_LEAST_SPREAD = 0.05  # a pixel that never changed may yet
_EXPLAINED = 0.05  # of a squared std for every number: a thousandth of the gradients' size is the std, see precisions


def total_variation(x: Tensor) -> Tensor:
    """Sum over examples of the absolute differences between neighbouring pixels: (V,). Tables have none."""
    if x.dim() != 5:
        return torch.zeros(len(x), dtype=x.dtype, device=x.device)
    down, right = x.diff(dim=-2).abs(), x.diff(dim=-1).abs()
    return down.flatten(1).sum(1) + right.flatten(1).sum(1)


class _Descent(Attack):
    """Several starts, each a descent on the logit of x; the best by the attack's own loss is kept for each victim."""

    start = "random"

    def __init__(self, *, restarts: int = 2, lr: float = 0.1, variation: float) -> None:
        self.restarts, self.lr, self.variation = restarts, lr, variation

    def objective(self, observation: Observation, labels: Tensor) -> Objective:
        raise NotImplementedError

    def starts_at(self, observation: Observation, attempt: int, generator: torch.Generator) -> Tensor:
        """Where an attempt starts, (V, B, *shape) in [0, 1]."""
        return start_of(observation, self.start, generator)

    def scaled(self, gradient: Tensor) -> Tensor:
        """What is made of a gradient before it is used."""
        return gradient

    def reconstruct(
        self, observation: Observation, *, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        generator = torch.Generator().manual_seed(seed)
        labels = infer_labels(observation)
        objective = self.objective(observation, labels)
        best: Reconstruction | None = None
        for i in range(self.restarts):
            start = self.starts_at(observation, i, generator)
            attempt = self._attempt(start, labels, objective, iterations, _later(watch, i * iterations, best))
            best = attempt if best is None else _better(best, attempt)
        assert best is not None
        return best

    def _attempt(
        self, start: Tensor, labels: Tensor, objective: Objective, iterations: int, watch: LossWatch | None
    ) -> Reconstruction:
        z = torch.logit(start.clamp(0.05, 0.95)).requires_grad_()
        optimizer = torch.optim.Adam([z], lr=self.lr)
        frames, losses = {0: start.clone()}, []
        kept, least = start.clone(), torch.full((len(start),), float("inf"), device=start.device)
        x, loss, gradient = torch.empty_like(start), torch.empty_like(least), torch.empty_like(start)

        def evaluate() -> None:
            with torch.enable_grad():
                at = torch.sigmoid(z)
                found = objective(at)
                (slope,) = torch.autograd.grad(found.sum(), z)
            x.copy_(at.detach())
            loss.copy_(found.detach())
            gradient.copy_(slope)

        look = Replay(evaluate, start.device)
        for iteration in range(1, iterations + 1):
            for group in optimizer.param_groups:  # down to a hundredth along half a cosine
                group["lr"] = self.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (iteration - 1) / iterations)))
            look()
            better = loss < least
            least = torch.where(better, loss, least)
            kept = torch.where(better.view(-1, *[1] * (x.dim() - 1)), x, kept)
            losses.append(least.clone())
            if watch is not None:
                watch(iteration, kept, least)
            z.grad = self.scaled(torch.nan_to_num(gradient, 0.0, 0.0, 0.0))  # a victim that diverges stands still
            optimizer.step()
            if iteration in FRAMES:
                frames[iteration] = kept.clone()
        failed = ~torch.isfinite(least)
        return Reconstruction(x=kept, labels=labels, loss=least, losses=losses, frames=frames, failed=failed)


def _after(watch: Watch | None, done: int) -> Watch | None:
    return None if watch is None else lambda iteration, x: watch(done + iteration, x)


def _later(watch: Watch | None, done: int, best: Reconstruction | None) -> LossWatch | None:
    """The watch of a later attempt: iterations go on counting, and an earlier attempt stands until it is beaten."""
    if watch is None:
        return None

    def told(iteration: int, x: Tensor, loss: Tensor) -> None:
        if best is not None:
            x = torch.where((loss < best.loss).view(-1, *[1] * (x.dim() - 1)), x, best.x)
        watch(done + iteration, x)

    return told


def _better(a: Reconstruction, b: Reconstruction) -> Reconstruction:
    """For every victim, whichever of two attempts has the smaller loss of its own."""
    second = b.loss < a.loss

    def pick(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(second.view(-1, *[1] * (one.dim() - 1)), other, one)

    def at(r: Reconstruction, i: int) -> Tensor:
        return r.losses[min(i, len(r.losses) - 1)]  # one attempt may have ended before the other

    return Reconstruction(
        x=pick(a.x, b.x),
        labels=pick(a.labels, b.labels),
        loss=pick(a.loss, b.loss),
        losses=[pick(at(a, i), at(b, i)) for i in range(max(len(a.losses), len(b.losses)))],
        frames={i: pick(a.frames.get(i, a.x), b.frames.get(i, b.x)) for i in sorted({*a.frames, *b.frames})},
        failed=pick(a.failed, b.failed),
        attempts=(a.attempts or (a.x,)) + (b.attempts or (b.x,)),
    )


class MAP(_Descent):
    """``public``: examples of the same kind that the attacker has (n, *shape); default: those of the observation.

    Of images, with enough of them, the prior is Gaussian and the search is in whitened coordinates. Otherwise it is
    ``variation``, in nats per unit of total variation, and the mean and spread of every number alone, if there are
    public examples: of rows of bits too, for odds instead would drive rare ones to 0 before they are heard.
    """

    name = "map"

    def __init__(
        self, *, restarts: int = 2, lr: float = 0.1, variation: float = 0.3, public: Tensor | None = None
    ) -> None:
        super().__init__(restarts=restarts, lr=lr, variation=variation)
        self.public = public

    def reconstruct(
        self, observation: Observation, *, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        noised = any(sight.defence.noise_std is not None for sight in observation.sights)
        computed = None if noised else _computed(observation, iterations, seed)
        if computed is not None:
            return computed
        labels = infer_labels(observation)
        public = observation.public if self.public is None else Public(self.public.to(observation.device))
        prior = None
        if public is not None and len(observation.input_shape) == 3:
            prior = fit_gaussian(public, observation.input_shape, labels)
        if noised and prior is None:
            return super().reconstruct(observation, iterations=iterations, seed=seed, watch=watch)
        if noised:
            assert prior is not None
            return self._most_probable(observation, prior, iterations, seed, watch)
        return self._matched(observation, prior, iterations, seed, watch)

    def _most_probable(
        self, observation: Observation, prior: GaussianPrior, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        """Under noise: from the prior's guess, or from the input whose features are those that were read."""
        misfit = likelihood(observation, prior.labels)
        spread = 0.1 if observation.batch > 1 else 0.0
        starts = [_near_mean(prior, torch.Generator().manual_seed(seed), spread)]
        read = _from_features(observation, prior, iterations) if self.restarts > 1 else None
        if read is not None:
            starts.append(read[0])
        best: Reconstruction | None = None
        for i, start in enumerate(starts):
            told = _later(watch, i * iterations, best)
            attempt = search(prior, misfit, start, iterations=iterations, watch=told)
            best = attempt if best is None else _better(best, attempt)
        assert best is not None
        return best

    def _matched(
        self, observation: Observation, prior: GaussianPrior | None, iterations: int, seed: int, watch: Watch | None
    ) -> Reconstruction:
        """Without noise there is nothing to weigh: matching to the last digit, which L-BFGS does best.

        With a prior, from the most probable input first; and from the usual starts where that was not enough. Of each
        victim the most probable of all that was found is kept: an input that matches and looks like none is not it.
        """
        if prior is not None:
            return _from_most_probable(observation, prior, self.restarts, iterations, seed, watch)
        ways = [ClipAwareMatching() for _ in range(self.restarts)]
        public = self._public(observation)
        if public is not None and observation.batch == 1:  # the examples of a batch would start, and stay, together
            ways[0] = ClipAwareMatching(start="image", image=public.mean(0))
        found: Reconstruction | None = None
        for i, way in enumerate(ways):
            then = _after(watch, i * iterations)
            attempt = way.run(observation, iterations=iterations, seed=seed + i, watch=then)
            found = attempt if found is None else _better(found, attempt)
        assert found is not None
        return found

    def starts_at(self, observation: Observation, attempt: int, generator: torch.Generator) -> Tensor:
        start = super().starts_at(observation, attempt, generator)
        public = self._public(observation)
        # Not quite at the mean: the examples of a batch would start, and stay, together.
        return start if public is None or attempt > 0 else 0.1 * start + 0.9 * public.mean(0)

    def _public(self, observation: Observation) -> Tensor | None:
        if self.public is not None:
            return self.public.to(observation.device)
        return None if observation.public is None else observation.public.x.to(observation.device)

    def objective(self, observation: Observation, labels: Tensor) -> Objective:
        fit = likelihood(observation, labels)
        public = self._public(observation)
        centre = spread = None
        if public is not None:
            centre, spread = public.mean(0), public.std(0).clamp(min=_LEAST_SPREAD)

        def loss(x: Tensor) -> Tensor:
            total = self.variation * total_variation(x)
            if centre is not None and spread is not None:
                total = total + 0.5 * ((x - centre) / spread).square().flatten(1).sum(1)
            return total + fit(x)

        return loss


def likelihood(observation: Observation, labels: Tensor) -> Objective:
    """Minus the log likelihood of inputs, up to a constant: by what the defence would release of them."""
    known = [(model_at(observation, sight), sight, precisions(sight)) for sight in observation.sights]

    def misfit(x: Tensor) -> Tensor:
        total = torch.zeros(len(x), device=x.device)
        for model, sight, weights in known:
            found = model.released(x, labels, sight.defence)
            total = total + 0.5 * squared_differences(found, sight.gradients, weights)
        return total

    return misfit


def _computed(observation: Observation, iterations: int, seed: int) -> Reconstruction | None:
    """What a first linear layer gives away without a search, if that explains all gradients; else None."""
    if any(sight.local is not None for sight in observation.sights):
        return None
    try:
        found = Analytic().reconstruct(observation, iterations=iterations, seed=seed, watch=None)
    except UnsupportedModelError:
        return None
    with torch.no_grad():
        misfit = likelihood(observation, found.labels)(found.x)
    numbers = sum(gradient[0].numel() for sight in observation.sights for gradient in sight.gradients.values())
    explained = bool((misfit < _EXPLAINED * numbers).all()) and not bool(found.failed.any())
    return found if explained else None


def _near_mean(prior: GaussianPrior, generator: torch.Generator, spread: float) -> Tensor:
    """Around the prior's guess. Examples of one class in a batch must not start, and stay, together."""
    drawn = torch.randn(*prior.labels.shape, prior.latent, generator=generator).to(prior.labels.device)
    return spread * drawn


def _from_features(observation: Observation, prior: GaussianPrior, iterations: int) -> tuple[Tensor, Objective] | None:
    """z of the most probable input with the features that were read, and their misfit; None where none were."""
    last = last_linear(observation.module, observation.classes)
    readings = read_features(observation, last, prior.labels)
    if not readings:
        return None
    misfit = feature_misfit(observation, readings)
    start = torch.zeros(*prior.labels.shape, prior.latent, device=observation.device)
    return prior.to_latent(search(prior, misfit, start, iterations=iterations).x), misfit


def _from_most_probable(
    observation: Observation, prior: GaussianPrior, restarts: int, iterations: int, seed: int, watch: Watch | None
) -> Reconstruction:
    """The most probable input with the features and about the gradient, then matched; see MAP._matched."""
    gradients = likelihood(observation, prior.labels)
    read = _from_features(observation, prior, iterations)
    generator = torch.Generator().manual_seed(seed)
    if read is None:
        start = _near_mean(prior, generator, 0.1 if observation.batch > 1 else 0.0)
        first = search(prior, gradients, start, iterations=iterations, watch=_later(watch, 0, None))
    else:
        start, features = read
        first = search(
            prior, lambda x: gradients(x) + features(x), start, iterations=iterations, watch=_later(watch, 0, None)
        )

    def judged(attempt: Reconstruction) -> Reconstruction:
        with torch.no_grad():
            loss = posterior(prior, gradients, attempt.x.detach())
        return replace(attempt, loss=torch.where(torch.isfinite(loss), loss, float("inf")))

    best = judged(first)
    ways = [ClipAwareMatching(start="image", image=best.x)]
    if restarts > 1:
        ways.append(ClipAwareMatching())
    for i, way in enumerate(ways):
        matched = way.run(observation, iterations=iterations, seed=seed + i, watch=_after(watch, (i + 1) * iterations))
        best = _better(best, judged(matched))
        if bool((best.loss < prior.plausible).all()):
            break
    return best


def precisions(sight: StepObservation) -> dict[str, float | Tensor]:
    """1 / std^2 of the noise on each parameter's gradient, for every coordinate where they differ (adaclip).

    Without noise, or with next to none, that of a thousandth of the gradient's own size.
    """
    stds = sight.defence.noise_of_parameter()
    found: dict[str, float | Tensor] = {}
    for name, gradient in sight.gradients.items():
        floor = max(1e-3 * math.sqrt(float(gradient.square().mean())), 1e-12)
        std = floor if stds is None else stds[name]
        size = math.sqrt(float(std.square().mean())) if isinstance(std, Tensor) else std
        found[name] = 1.0 / (std * max(1.0, floor / size)) ** 2
    return found


class Inverting(_Descent):
    """Knows nothing of clipping or noise; a gradient's length does not matter to it.

    ``variation``: the weight of the mean absolute difference between neighbouring pixels beside 1 - cosine.
    """

    name = "inverting"

    def __init__(self, *, restarts: int = 2, lr: float = 0.1, variation: float = 0.03) -> None:
        super().__init__(restarts=restarts, lr=lr, variation=variation)

    def objective(self, observation: Observation, labels: Tensor) -> Objective:
        sight = observation.sights[0]
        model = model_at(observation, sight)
        names = list(sight.gradients)
        seen = torch.cat([sight.gradients[n].flatten(1) for n in names], 1)

        def loss(x: Tensor) -> Tensor:
            gradients = model.of_batch(x, labels)
            found = torch.cat([gradients[n].flatten(1) for n in names], 1)
            similar = torch.nn.functional.cosine_similarity(found, seen, dim=1)
            return 1.0 - similar + self.variation * total_variation(x) / x[0].numel()

        return loss

    def scaled(self, gradient: Tensor) -> Tensor:
        return gradient.sign()
