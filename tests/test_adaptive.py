"""Rules that adapt to releases: what they are given, what they cannot reach, and what the ledger proves of them."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import types
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from gradveil.accounting import FilterAccountant, proved_epsilon
from gradveil.accounting.ledger import read
from gradveil.errors import ConfigError, LedgerError
from gradveil.mechanism import strategies
from gradveil.mechanism.adaptive import (
    RANGE,
    AdaptiveRule,
    Choice,
    PublicSettings,
    ReleasedStep,
    SignalRule,
    check_rule,
    replay,
)
from gradveil.mechanism.strategies import Strategy
from loops import network, run, start

PRIVATE = torch.arange(12.0)  # stands for the training set
PUBLIC = PublicSettings(steps=100, batch_size=50.0, clip=2.0, sigma=3.0, sizes=(40, 10))


def seen(**changes) -> ReleasedStep:
    facts = {
        "step": 0,
        "sigma": 3.0,
        "clip": (2.0, 2.0),
        "noise_std": (0.12, 0.12),
        "squares": (2.0, 1.0),
        "left": 0.99,
    }
    return ReleasedStep(**facts | changes)


def helper(x):
    return math.sqrt(x) + LEVEL


def leaking_helper(x):
    return x + float(PRIVATE.sum())


LEVEL = 0.5


# --- a rule that reads anything private cannot be written ----------------------------------------


def rule_of(after, **more) -> AdaptiveRule:
    return dataclass(frozen=True)(type("Mine", (AdaptiveRule,), {"after": after, **more}))()


def closure():
    data = PRIVATE
    return lambda self, seen, memory, public: Choice(sigma=float(data.sum()), clip=seen.clip)


def imports(self, seen, memory, public):
    import gc as collector

    return Choice(sigma=float(len(collector.get_objects())), clip=seen.clip)


def a_global(self, seen, memory, public):
    return Choice(sigma=float(PRIVATE.sum()), clip=seen.clip)


def a_module(self, seen, memory, public):
    return Choice(sigma=float(torch.zeros(1).sum()), clip=seen.clip)


def a_default(self, seen, memory, public, data=PRIVATE):
    return Choice(sigma=float(data.sum()), clip=seen.clip)


def through_a_helper(self, seen, memory, public):
    return Choice(sigma=leaking_helper(1.0), clip=seen.clip)


def through_dunders(self, seen, memory, public):
    return Choice(sigma=float(len(().__class__.__base__.__subclasses__())), clip=seen.clip)


def by_eval(self, seen, memory, public):
    return Choice(sigma=eval("1.0"), clip=seen.clip)


def by_formatting(self, seen, memory, public):
    return Choice(sigma=float("{0.after.__globals__[LEVEL]}".format(self)), clip=seen.clip)  # noqa: UP030, UP032


def through_a_frame(self, seen, memory, public):
    return Choice(sigma=float(len((x for x in memory).gi_frame.f_back.f_globals)), clip=seen.clip)


def changes_a_global(self, seen, memory, public):
    global LEVEL
    LEVEL = seen.left
    return Choice(sigma=1.0, clip=seen.clip)


def nested(self, seen, memory, public):
    return Choice(sigma=max(float(PRIVATE[i]) for i in range(3)), clip=seen.clip)


def keeps_a_secret(self, seen, memory, public):
    object.__setattr__(self, "kept", seen)
    return Choice(sigma=1.0, clip=seen.clip)


@pytest.mark.parametrize(
    "after",
    [
        closure(),
        imports,
        a_global,
        a_module,
        a_default,
        through_a_helper,
        through_dunders,
        by_eval,
        by_formatting,
        through_a_frame,
        changes_a_global,
        nested,
        keeps_a_secret,
    ],
    ids=lambda f: f.__name__,
)
def test_a_rule_that_reaches_for_something_else_is_refused(after):
    with pytest.raises(ConfigError, match="is refused"):
        check_rule(rule_of(after))
    with pytest.raises(ConfigError, match="is refused"):
        Strategy(name="leak", bounds="adaptive", sensitivity="clip", noise="adaptive", summary="", rule=rule_of(after))


def test_a_rule_that_holds_something_private_is_refused():
    @dataclass(frozen=True)
    class Holds(AdaptiveRule):
        data: object = 0.0

    check_rule(Holds())
    for data in (PRIVATE, network(), [1.0], {"a": 1.0}):
        with pytest.raises(ConfigError, match="not a number"):
            check_rule(Holds(data=data))
    with pytest.raises(ConfigError, match="its attribute 'data' is Tensor"):
        check_rule(rule_of(lambda self, seen, memory, public: Choice(sigma=1.0, clip=seen.clip), data=PRIVATE))
    with pytest.raises(ConfigError, match="frozen dataclass"):
        check_rule(types.SimpleNamespace(after=lambda: None))

    @dataclass
    class Thawed:
        level: float = 1.0

    with pytest.raises(ConfigError, match="frozen dataclass"):
        check_rule(Thawed())
    with pytest.raises(dataclasses.FrozenInstanceError):
        SignalRule().smoothing = 0.5


def test_a_rule_of_numbers_is_accepted():
    def after(self, seen, memory, public):
        level = helper(sum(seen.squares)) + sum(x * x for x in memory)
        return Choice(sigma=public.sigma + level, clip=tuple(c * 0.9 for c in seen.clip), memory=(level,))

    check_rule(rule_of(after))
    check_rule(SignalRule())


@pytest.mark.parametrize("kind", [PublicSettings, ReleasedStep])
def test_what_a_rule_is_given_holds_numbers_only(kind):
    given = PUBLIC if kind is PublicSettings else seen()
    for field in dataclasses.fields(kind):
        for wrong in (PRIVATE, [1.0], "text", None, (PRIVATE,), torch.tensor(1.0)):
            with pytest.raises(ConfigError, match="numbers"):
                dataclasses.replace(given, **{field.name: wrong})
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.data = PRIVATE


def test_nothing_private_can_be_reached_from_what_a_rule_is_given():
    """Everything that can be reached from the arguments of a real run's rule, as the garbage collector sees it."""
    got = []

    engine, *rest = start(strategy="dyn-adaptive", steps=3)
    original = SignalRule.after
    try:
        SignalRule.after = lambda self, *args: got.append(args) or original(self, *args)
        run(engine, *rest)
    finally:
        SignalRule.after = original
    assert len(got) == 3
    todo, reached = [vars(argument) if not isinstance(argument, tuple) else argument for argument in got[-1]], []
    while todo:
        thing = todo.pop()
        reached.append(thing)
        todo += gc.get_referents(thing)
    assert {type(thing) for thing in reached} <= {dict, tuple, int, float, str}


@pytest.mark.parametrize("wrong", [{"sigma": 0.0}, {"sigma": math.nan}, {"clip": (1.0, -1.0)}, {"memory": (math.inf,)}])
def test_a_choice_without_noise_is_refused(wrong):
    with pytest.raises(ConfigError, match="above zero"):
        Choice(**{"sigma": 1.0, "clip": (1.0, 1.0)} | wrong)


# --- dyn-adaptive ---------------------------------------------------------------------------------


def follow(rule: SignalRule, signals, *, noise=0.05, left=None, public=PUBLIC):
    """The rule's choices for releases whose mean gradient has these squared norms, in units of C^2."""
    choice, found = rule.first(public), []
    generator = torch.Generator().manual_seed(3)
    for step, signal in enumerate(signals):
        squares = []
        for size, clip in zip(public.sizes, choice.clip, strict=True):
            std = noise * clip
            mean = torch.full((size,), math.sqrt(signal * clip * clip / 2 / size))
            squares.append(float((mean + std * torch.randn(size, generator=generator)).square().sum()))
        share = 1 - (step + 1) / public.steps if left is None else left
        told = ReleasedStep(
            step=step,
            sigma=choice.sigma,
            clip=choice.clip,
            noise_std=tuple(noise * c for c in choice.clip),
            squares=tuple(squares),
            left=max(share, 1e-6),
        )
        choice = rule.after(told, choice.memory, public)
        found.append(choice)
    return found


def test_the_bound_falls_with_the_signal_and_the_noise_with_it():
    high, low = [0.5] * 40, [0.05] * 40
    choices = follow(SignalRule(clip_end=1.0), high + low)
    assert choices[39].clip[0] == pytest.approx(PUBLIC.clip, rel=0.1)
    assert choices[-1].clip[0] < 0.7 * PUBLIC.clip
    assert choices[-1].clip[0] >= SignalRule().clip_floor * PUBLIC.clip
    assert choices[39].sigma > 1.4 * PUBLIC.sigma > choices[-1].sigma
    assert all(choice.stop is None for choice in choices)


def test_training_stops_when_the_signal_is_gone_and_not_before_it_was_found():
    long = dataclasses.replace(PUBLIC, steps=300)
    choices = follow(SignalRule(gone=0.5), [0.5] * 50 + [0.0] * 249, public=long)
    first = next(step for step, choice in enumerate(choices) if choice.stop is not None)
    assert 100 < first < 250  # the average over past steps has to forget the signal
    nothing = follow(SignalRule(gone=0.5), [0.0] * 99, noise=0.5)
    assert all(choice.stop is None for choice in nothing)
    assert nothing[-1].clip[0] == pytest.approx(0.703 * PUBLIC.clip)  # the ceiling


def test_the_noise_makes_what_is_left_last():
    short, even, long = (follow(SignalRule(spare=0.0), [0.5] * 10, left=left)[-1].sigma for left in (0.5, 0.9, 1.0))
    assert short > even > long
    assert even == pytest.approx(PUBLIC.sigma, rel=1e-9)


# --- in an engine ---------------------------------------------------------------------------------


def test_a_run_spends_its_budget_and_no_more():
    engine, *rest = start(strategy="dyn-adaptive", budget=3.0, steps=60)
    run(engine, *rest)
    counted = FilterAccountant(engine.header).observe(engine.releases)
    assert engine.epsilon <= 3.0
    assert 0.9 < counted.granted[0] / counted.filters[0].budget <= 1.0
    assert len({release.sigma for release in engine.releases}) > 20
    assert all(PLANNED / RANGE <= release.sigma <= PLANNED * RANGE for release in engine.releases)
    fixed = proved_epsilon(engine.header, engine.releases, charge="taken")
    assert fixed.epsilon < engine.epsilon


PLANNED = 2.0


def test_the_ledger_proves_what_each_sigma_was_a_function_of(tmp_path):
    engine, *rest = start(strategy="dyn-adaptive", budget=3.0, steps=20, run_dir=tmp_path / "run")
    run(engine, *rest)
    engine.close()
    contents = read(tmp_path / "run" / "ledger.jsonl")
    assert contents.releases == tuple(engine.releases)
    assert contents.header.plan["rule"]["name"] == "SignalRule"
    assert replay(SignalRule(), contents.header, contents.releases) == 20
    forged = dataclasses.replace(contents.releases[7], sigma=contents.releases[7].sigma * 1.01)
    with pytest.raises(LedgerError, match="not a function of releases"):
        replay(SignalRule(), contents.header, [*contents.releases[:7], forged])
    with pytest.raises(LedgerError, match="not a function of releases"):
        replay(AdaptiveRule(), contents.header, contents.releases)
    assert json.loads(json.dumps(contents.releases[5].to_dict()))["chosen_from"]["seen"]["step"] == 4


def test_squares_in_the_ledger_are_of_the_noised_gradient():
    engine, model, optimizer, loader = start(strategy="dyn-adaptive", steps=3)
    lengths = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        lengths.append(
            [float(sum(engine.parameters[n].grad.double().square().sum() for n in g.parameters)) for g in engine.groups]
        )
        optimizer.step()
    for release, length in zip(engine.releases[1:], lengths, strict=False):
        assert release.chosen_from["seen"]["squares"] == pytest.approx(length, rel=1e-6)


def test_a_seeded_run_goes_back_to_a_checkpoint_and_repeats_itself():
    engine, model, optimizer, loader = start(strategy="dyn-adaptive", steps=12, seed=5, budget=20.0)
    kept = None
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if engine.step == 5:
            kept = engine.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        if engine.step == 8:
            break
    first = [(r.sigma, r.clip, r.digest) for r in engine.releases[5:8]]
    engine.load_state_dict(kept[0])
    model.load_state_dict(kept[1])
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if engine.step == 8:
            break
    assert [(r.sigma, r.clip, r.digest) for r in engine.releases[8:11]] == first
    assert replay(engine.rule.rule, engine.header, engine.releases) == 11


def test_a_rule_must_give_a_bound_for_every_group():
    def after(self, seen, memory, public):
        return Choice(sigma=public.sigma, clip=(1.0,))

    mine = Strategy(
        name="short", bounds="adaptive", sensitivity="clip", noise="adaptive", summary="", rule=rule_of(after)
    )
    engine, *rest = start(strategy=mine)
    with pytest.raises(ConfigError, match="chose 1 clip bounds for 2 clipping groups"):
        run(engine, *rest)


def test_a_run_ends_where_its_rule_stops():
    @dataclass(frozen=True)
    class Three(AdaptiveRule):
        def after(self, seen, memory, public):
            return Choice(sigma=public.sigma, clip=seen.clip, stop="three are enough" if seen.step == 2 else None)

    mine = Strategy(name="three", bounds="adaptive", sensitivity="clip", noise="adaptive", summary="", rule=Three())
    engine, *rest = start(strategy=mine, steps=12)
    run(engine, *rest)
    assert (engine.step, engine.stopped) == (3, "three are enough")
    assert engine.statement().proved.filter is not None


def test_a_rule_that_wants_too_little_noise_is_held_to_what_the_filter_grants():
    @dataclass(frozen=True)
    class Greedy(AdaptiveRule):
        def after(self, seen, memory, public):
            return Choice(sigma=1e-9, clip=seen.clip)

    mine = Strategy(name="greedy", bounds="adaptive", sensitivity="clip", noise="adaptive", summary="", rule=Greedy())
    engine, *rest = start(strategy=mine, steps=100, budget=4.0)
    run(engine, *rest)
    assert engine.stopped == "the budget of the privacy filter is spent"
    counted = FilterAccountant(engine.header).observe(engine.releases)
    assert all(granted <= one.budget for granted, one in zip(counted.granted, counted.filters, strict=True))
    assert math.isfinite(engine.epsilon)
    assert replay(Greedy(), engine.header, engine.releases) == engine.step


def test_options_change_the_rule_and_are_in_the_header():
    engine, *_ = start(strategy="dyn-adaptive", options={"spare": 0.0, "clip_floor": 0.1})
    assert (engine.header.plan["rule"]["spare"], engine.header.plan["rule"]["clip_floor"]) == (0.0, 0.1)
    with pytest.raises(ConfigError, match="options of strategy"):
        start(strategy="dyn-adaptive", options={"spear": 0.0})
    with pytest.raises(ConfigError, match="only a privacy filter covers that"):
        start(strategy="dyn-adaptive", accountant="PLD")
    with pytest.raises(ConfigError, match="a rule chooses both"):
        Strategy(name="x", bounds="constant", sensitivity="clip", noise="adaptive", summary="", rule=SignalRule())
    assert strategies.get("dyn-adaptive").guarantee == "proved"
