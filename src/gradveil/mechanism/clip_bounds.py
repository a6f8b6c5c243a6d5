"""How the clip bounds of a run move: by schedule, after a private quantile, or per coordinate; or that there are none.

A bound rule knows the bounds of a step before its batch is drawn, and learns only from what has been
released already. That is the rule of every proved strategy: the noise scale is a function of public
schedules and of private outputs, and the clip is at that same value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradveil.clipping import ClipStats, Group
from gradveil.clipping.clip_factors import Whitening
from gradveil.errors import ConfigError
from gradveil.mechanism.noise.streams import NoiseSource
from gradveil.mechanism.records import AuxiliaryRelease
from gradveil.mechanism.strategies import PrivacyPlan


class BoundRule:
    """The bounds of each step, for every group; the defaults are those of a rule that learns nothing."""

    whitening: Whitening | None = None
    gamma: float | None = None  # where given, gradients are normalised, g / (|g| + gamma), rather than clipped
    reads_gradients = False  # whether the rule learns from the noised gradients themselves
    stop: str | None = None  # why the rule ends the run
    chosen_from: dict[str, Any] | None = None  # what the coming step's noise is a function of, for its record
    counts_norms = False  # whether the rule looks at how many examples are within their bound
    side_inverse_square: float = 0.0  # what the side releases of one step add to 1/z^2 of the whole release

    def bounds(self, step: int) -> tuple[float, ...]:
        """The clip bound of every group at ``step``."""
        raise NotImplementedError

    def sigma(self, step: int) -> float | None:
        """The noise scale of ``step``; None: the plan's."""
        return None

    def side_releases(self, clip_stats: ClipStats, noise: NoiseSource) -> tuple[AuxiliaryRelease, ...]:
        """What this rule releases of the batch beside the gradients."""
        return ()

    def learn(
        self, side: tuple[AuxiliaryRelease, ...], noised: Mapping[str, Tensor], sigma: float, batch_size: float
    ) -> None:
        """Adapt to what was released: the side releases and the noised mean gradients."""

    def shift(self, name: str) -> Tensor | None:
        """What is added to a parameter's noised mean gradient (the centre that whitening took off)."""
        return None

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise ConfigError(f"unexpected state for {type(self).__name__}: {sorted(state)}")


class ScheduledClip(BoundRule):
    """The same scheduled C_t for every group."""

    def __init__(self, plan: PrivacyPlan, groups: Sequence[Group]) -> None:
        self.schedule, self.count = plan.clip, len(groups)

    def bounds(self, step: int) -> tuple[float, ...]:
        return (self.schedule(step),) * self.count


class AutoClip(ScheduledClip):
    """Every example's gradient is scaled to g / (|g| + gamma): shorter than 1, whatever it was, so there is no C.

    Bu et al. 2023, "Automatic clipping"; Yang et al. 2022. Large gamma keeps short gradients short.
    """

    def __init__(self, plan: PrivacyPlan, groups: Sequence[Group], *, gamma: float = 0.01) -> None:
        super().__init__(plan, groups)
        if not (gamma > 0 and math.isfinite(gamma)):
            raise ConfigError(f"gamma is {gamma!r}; give a positive number: a gradient of 0 has no direction.")
        self.gamma = gamma


class QuantileClip(BoundRule):
    """Each group's bound follows a quantile of its per-example norms (Andrew et al. 2021, Algorithm 1).

    Per step and group, the number of examples within the bound is released with Gaussian noise of std
    ``count_noise``: each example adds +1/2 if within and -1/2 if not, so that adding or removing one
    moves the count by 1/2, and M counts jointly by sqrt(M)/2. With b the noised share of examples
    within, C <- C exp(-learning_rate (b - quantile)). The count is charged like the gradient, by its own
    noise: of the whole release, 1/z^2 = M/sigma^2 + M/(2 count_noise)^2.
    """

    counts_norms = True

    def __init__(
        self,
        plan: PrivacyPlan,
        groups: Sequence[Group],
        *,
        batch_size: float,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
        count_noise: float | None = None,
    ) -> None:
        if not 0 < quantile < 1:
            raise ConfigError(f"quantile is {quantile!r}; give a share of the examples strictly between 0 and 1.")
        if not (learning_rate > 0 and math.isfinite(learning_rate)):
            raise ConfigError(f"the quantile's learning rate is {learning_rate!r}; give a positive number.")
        # B/20 is the published advice for large cohorts; below 5 sigma the count would cost more than it is worth.
        noise = max(batch_size / 20.0, 5.0 * plan.sigma.start) if count_noise is None else count_noise
        if not (noise > 0 and math.isfinite(noise)):
            raise ConfigError(f"count_noise is {noise!r}; the released counts need positive noise.")
        self.batch_size, self.quantile, self.learning_rate, self.count_noise = (
            batch_size,
            quantile,
            learning_rate,
            noise,
        )
        self.current = [plan.clip.start] * len(groups)
        self.side_inverse_square = len(groups) / (2.0 * noise) ** 2

    def bounds(self, step: int) -> tuple[float, ...]:
        return tuple(self.current)

    def side_releases(self, clip_stats: ClipStats, noise: NoiseSource) -> tuple[AuxiliaryRelease, ...]:
        count = len(self.current)
        exact = [within - clip_stats.examples / 2.0 for within in clip_stats.counts_within()]
        sensitivity = math.sqrt(count) / 2.0
        return (
            AuxiliaryRelease(
                name="within-bound counts",
                values=noise.noised(exact, self.count_noise, sensitivity=sensitivity),
                sensitivity=sensitivity,
                noise_std=self.count_noise,
            ),
        )

    def learn(
        self, side: tuple[AuxiliaryRelease, ...], noised: Mapping[str, Tensor], sigma: float, batch_size: float
    ) -> None:
        for group, value in enumerate(side[0].values):
            share = value / self.batch_size + 0.5
            self.current[group] *= math.exp(-self.learning_rate * (share - self.quantile))

    def state_dict(self) -> dict[str, Tensor]:
        return {"current": torch.tensor(self.current, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.current = [float(c) for c in state["current"]]


class SearchedClip(QuantileClip):
    """Bounds found by private counts, wherever they start, that follow the norms down and never far up.

    The counts are those of :class:`QuantileClip`, charged in the same way. What is made of them is free:

    - In the first steps each group's bound is searched, from far below ``clip``, until the counts say that it is at the
      median of the norms or has passed it; there it waits for the others. A bound that is too low costs a few slow
      steps; noise of one that is too high would stay in the weights.
    - The length of what was found, split evenly over the groups, times ``headroom``, is the ceiling of all bounds from
      then on, and decays as the plan says (``clip_decay``, ``clip_end``). The weights of a network drift with the
      noise, and norms grow with the weights: a bound that followed them up would add noise to noise, until nothing is
      learned.
    - Under the ceiling each bound follows an upper quantile of its norms, so noise falls as gradients do: to a
      thousandth of the ceiling at least.

    Estimates move fast at first and settle: rates from 1 to ``learning_rate`` over some 40 steps, and never so fast
    that the noise of one count moves a bound by more than 5 %.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        groups: Sequence[Group],
        *,
        batch_size: float,
        quantile: float = 0.9,
        learning_rate: float = 0.2,
        count_noise: float | None = None,
        headroom: float = 1.0,
    ) -> None:
        super().__init__(
            plan,
            groups,
            batch_size=batch_size,
            quantile=quantile,
            learning_rate=learning_rate,
            count_noise=count_noise,
        )
        if not (headroom > 0 and math.isfinite(headroom)):
            raise ConfigError(f"headroom is {headroom!r}; give a positive number, 1 for the norms of the first steps.")
        self.schedule, self.headroom = plan.clip, headroom
        self.steadiest = _SHAKE * batch_size / self.count_noise
        steps, way = 0, 0.0  # that the search may take, and how far it comes: noisy counts are slow
        longest = min(plan.steps, max(_SHORTEST_SEARCH, plan.steps // 10))
        while way < _WAY and steps < longest:
            way += _MEDIAN * self._rate(steps)
            steps += 1
        self.longest_search = longest
        self.current = [plan.clip.start * math.exp(-way / 2.0)] * len(groups)
        self.looks = max(1, math.ceil((self.count_noise / batch_size / _SURE) ** 2))  # that counts are averaged over
        self.lowest = self.current[0] * math.exp(-way)  # a group that is searched for there has no norms
        self.within = [0.0] * len(groups)  # share of the examples, so averaged, in the search
        self.been_below, self.been_above = [False] * len(groups), [False] * len(groups)  # the median
        self.ceiling = math.inf  # at the start of the schedule; none while it is searched
        self.learned = 0  # steps

    def _rate(self, step: int) -> float:
        settled = 1.0 - math.exp(-step / _SETTLING_STEPS)
        return min(_FIRST_RATE + (self.learning_rate - _FIRST_RATE) * settled, self.steadiest)

    def bounds(self, step: int) -> tuple[float, ...]:
        most = self.ceiling * self.schedule(step) / self.schedule.start
        least = 0.0 if math.isinf(most) else _LEAST * most
        return tuple(min(max(bound, least), most) for bound in self.current)

    def learn(
        self, side: tuple[AuxiliaryRelease, ...], noised: Mapping[str, Tensor], sigma: float, batch_size: float
    ) -> None:
        rate, used = self._rate(self.learned), self.bounds(self.learned)
        self.learned += 1
        searching = math.isinf(self.ceiling)
        for group, (value, bound) in enumerate(zip(side[0].values, used, strict=True)):
            if searching and self._found(group):
                continue
            within = value / self.batch_size + 0.5
            # The count was of examples within the bound that was used: the estimate goes on from there.
            quantile = _MEDIAN if searching else self.quantile
            self.current[group] = bound * math.exp(-rate * (within - quantile))
            self.within[group] += (within - self.within[group]) / self.looks
            self.been_above[group] |= self.within[group] >= _MEDIAN - _NEAR
            self.been_below[group] |= self.within[group] <= _MEDIAN + _NEAR
        found = all(self._found(group) for group in range(len(used)))
        if searching and (found or self.learned >= self.longest_search):
            self.ceiling = self.headroom * math.hypot(*self.current) / math.sqrt(len(self.current))

    def _found(self, group: int) -> bool:
        return (self.been_below[group] and self.been_above[group]) or self.current[group] < self.lowest

    def state_dict(self) -> dict[str, Tensor]:
        own = {
            "learned": torch.tensor(self.learned),
            "ceiling": torch.tensor(self.ceiling, dtype=torch.float64),
            "within": torch.tensor(self.within, dtype=torch.float64),
            "been_below": torch.tensor(self.been_below),
            "been_above": torch.tensor(self.been_above),
        }
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.learned, self.ceiling = int(state["learned"]), float(state["ceiling"])
        self.within = [float(share) for share in state["within"]]
        self.been_below = [bool(was) for was in state["been_below"]]
        self.been_above = [bool(was) for was in state["been_above"]]


_MEDIAN = 0.5
_NEAR = 0.05
_WAY = 8.0  # of the search, as a logarithm: from a fiftieth of the bound that is given to fifty times it
_SURE = 0.15  # what the noise of averaged counts may be, as a share of the examples
_LEAST = 1e-3  # of the ceiling: a layer that is not in use for long is found again
_SHORTEST_SEARCH = 10  # steps; otherwise a tenth of the run at most
_FIRST_RATE = 1.0
_SETTLING_STEPS = 40.0
_SHAKE = 0.05  # what the noise of one count may move a bound by, relative


class AdaClip(BoundRule):
    """AdaClip (Pichapati et al. 2019, Algorithm 2): coordinates whitened, then clipped to norm 1.

    Example i gives w = (g - m) / b, clipped to norm 1 per group. Noise of std sigma goes on the sum of the
    w; the released mean gradient is b (sum + noise) / B + m. Mean m and spread s are running estimates
    from these already noised gradients, with the known noise variance taken off:

        m   <- beta1 m + (1 - beta1) g
        s^2 <- beta2 s^2 + (1 - beta2) clamp((g - m)^2 - (b sigma / B)^2, h1, h2)
        b_j  = sqrt(s_j) sqrt(sum_k s_k)        over the coordinates k of the group

    so that the expected squared norm of w is 1. Nothing private is used beyond what was released.
    """

    reads_gradients = True

    def __init__(
        self,
        plan: PrivacyPlan,
        groups: Sequence[Group],
        *,
        parameters: Mapping[str, Tensor],
        beta1: float = 0.99,
        beta2: float = 0.9,
        h1: float = 1e-12,
        h2: float = 10.0,
    ) -> None:
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ConfigError(f"adaclip's beta1={beta1!r} and beta2={beta2!r} must be in [0, 1).")
        if not 0 < h1 <= h2 < math.inf:
            raise ConfigError(f"adaclip's variance range is h1={h1!r} to h2={h2!r}; give finite 0 < h1 <= h2.")
        self.groups, self.beta1, self.beta2, self.h1, self.h2 = groups, beta1, beta2, h1, h2
        self.mean = {n: torch.zeros_like(p, requires_grad=False) for n, p in parameters.items()}
        start = math.sqrt(math.sqrt(h1 * h2))  # the geometric middle of the variance range, as a spread
        self.spread = {n: torch.full_like(p, start, requires_grad=False) for n, p in parameters.items()}
        self._refresh()

    def _refresh(self) -> None:
        """The scales that follow from the spreads; written in place, for a captured pass reads them where they are."""
        if self.whitening is None:
            self.whitening = {n: (self.mean[n], torch.empty_like(s)) for n, s in self.spread.items()}
        for group in self.groups:
            total = sum(self.spread[n].sum() for n in group.parameters) + torch.zeros(())
            for n in group.parameters:
                self.whitening[n][1].copy_((self.spread[n] * total.to(self.spread[n])).sqrt())

    def bounds(self, step: int) -> tuple[float, ...]:
        return (1.0,) * len(self.groups)

    def shift(self, name: str) -> Tensor | None:
        return self.mean[name]

    def learn(
        self, side: tuple[AuxiliaryRelease, ...], noised: Mapping[str, Tensor], sigma: float, batch_size: float
    ) -> None:
        assert self.whitening is not None
        for name, grad in noised.items():
            mean, scale = self.whitening[name]
            noise_variance = (scale * (sigma / batch_size)) ** 2
            variance = ((grad - mean) ** 2 - noise_variance).clamp(self.h1, self.h2)
            self.spread[name].copy_((self.beta2 * self.spread[name] ** 2 + (1 - self.beta2) * variance).sqrt())
            self.mean[name].copy_(self.beta1 * mean + (1 - self.beta1) * grad)
        self._refresh()

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"mean.{n}": t.clone() for n, t in self.mean.items()}
        return state | {f"spread.{n}": t.clone() for n, t in self.spread.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name in self.mean:
            self.mean[name].copy_(state[f"mean.{name}"])
            self.spread[name].copy_(state[f"spread.{name}"])
        self._refresh()


def _scheduled(plan: PrivacyPlan, groups: Sequence[Group], **context: Any) -> BoundRule:
    return ScheduledClip(plan, groups)


def _quantile(plan: PrivacyPlan, groups: Sequence[Group], *, batch_size: float, options: Any, **_: Any) -> BoundRule:
    return QuantileClip(plan, groups, batch_size=batch_size, **options)


def _estimated(plan: PrivacyPlan, groups: Sequence[Group], *, batch_size: float, options: Any, **_: Any) -> BoundRule:
    return SearchedClip(plan, groups, batch_size=batch_size, **options)


def _normalised(plan: PrivacyPlan, groups: Sequence[Group], *, options: Any, **_: Any) -> BoundRule:
    return AutoClip(plan, groups, **options)


def _whitened(plan: PrivacyPlan, groups: Sequence[Group], *, parameters: Any, options: Any, **_: Any) -> BoundRule:
    return AdaClip(plan, groups, parameters=parameters, **options)


def _adaptive(
    plan: PrivacyPlan,
    groups: Sequence[Group],
    *,
    parameters: Mapping[str, Tensor],
    batch_size: float,
    options: Any,
) -> BoundRule:
    from gradveil.mechanism.adaptive_clip import AdaptiveClip  # it is a rule like those above

    # Without the parameters, where only what the rule releases beside the gradient is asked for: nothing.
    sizes = [sum(parameters[name].numel() for name in group.parameters if parameters) for group in groups]
    return AdaptiveClip(plan, groups, batch_size=batch_size, sizes=sizes).with_options(options)


RULES: dict[str, Callable[..., BoundRule]] = {
    "constant": _scheduled,
    "decay": _scheduled,
    "private-quantile": _quantile,
    "private-estimate": _estimated,
    "normalised": _normalised,
    "per-coordinate": _whitened,
    "adaptive": _adaptive,
}


def make_rule(
    plan: PrivacyPlan,
    groups: Sequence[Group],
    *,
    parameters: Mapping[str, Tensor],
    batch_size: float,
    options: Mapping[str, Any],
) -> BoundRule:
    """The bound rule that the strategy names; ``options`` are its own settings (quantile, beta1, ...)."""
    factory = RULES[plan.strategy.bounds]
    if options and factory is _scheduled:
        raise ConfigError(f"strategy {plan.strategy.name!r} takes no options, but {sorted(options)} were given.")
    try:
        return factory(plan, groups, parameters=parameters, batch_size=batch_size, options=dict(options))
    except TypeError as error:
        raise ConfigError(f"options of strategy {plan.strategy.name!r}: {error}.") from None
