"""What make_private puts together: the plan and its noise, the clipper, the ledger, and the step that releases."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gradveil.accounting import ledger as ledgers
from gradveil.accounting.finite_precision import is_covered
from gradveil.clipping import Clipper, sharding
from gradveil.engine import run_files
from gradveil.engine.backward import accumulator, backward_ended
from gradveil.engine.guards import BudgetGuard, FilterGuard, fingerprint
from gradveil.engine.header import run_header
from gradveil.engine.release_log import ReleaseLog
from gradveil.engine.step import PrivateStep
from gradveil.errors import RunDirectoryError
from gradveil.mechanism import clip_bounds
from gradveil.mechanism.adaptive_clip import AdaptiveClip
from gradveil.mechanism.distributed import prepare
from gradveil.mechanism.distributed.ranks import Ranks
from gradveil.mechanism.release import Releaser
from gradveil.mechanism.sampling import Source
from gradveil.mechanism.strategies import PrivacyPlan

if TYPE_CHECKING:
    from gradveil.engine.engine import PrivacyEngine


def check_run_directory(engine: PrivacyEngine) -> None:
    """Refuse one that holds a run already, unless that run is resumed."""
    path = engine.run_dir
    if path is not None and not engine._resume and engine.ranks.is_first and (path / ledgers.FILE_NAME).exists():
        raise RunDirectoryError(
            f"{path} holds a ledger already: a run directory belongs to one run, and a ledger is never overwritten. "
            "Give another run_dir, or resume that run."
        )


def declare_steps(engine: PrivacyEngine, source: Source) -> None:
    """How long the run is, and the length of an epoch."""
    engine._epoch = source.batches
    steps = engine.settings.steps
    if steps is None:
        assert engine.settings.epochs is not None
        steps = engine.settings.epochs * engine._epoch
    if engine._plan is None:
        # With a target epsilon, of any noise for now.
        engine._plan = engine.settings.plan(steps=steps, sigma=engine.settings.any_sigma)


def calibrate(engine: PrivacyEngine) -> None:
    """The sigma with which the whole run spends the epsilon that was asked for."""
    from gradveil.accounting import calibrate_plan

    target = engine.settings.epsilon
    if target is None:
        return
    steps = engine.plan.steps
    sigma = calibrate_plan(
        target,
        plan_of=lambda sigma: engine.settings.plan(steps=steps, sigma=sigma),
        groups=len(engine.groups),
        sampling=engine.sampling.name,
        population=engine.sampling.population,
        batch_size=engine.sampling.batch_size,
        delta=engine.delta,
        side_of=lambda plan: make_rule(engine, plan).side_inverse_square,
        least=engine.settings.least_sigma,
        accountant="RDP" if engine.settings.filters else None,
    )
    engine._plan = engine.settings.plan(steps=steps, sigma=sigma)


def make_rule(engine: PrivacyEngine, plan: PrivacyPlan) -> clip_bounds.BoundRule:
    return clip_bounds.make_rule(
        plan,
        engine.groups,
        parameters={n: p.detach() for n, p in engine.parameters.items()},
        batch_size=float(engine.sampling.batch_size),
        options=engine.options,
    )


def make_clipper(engine: PrivacyEngine) -> Clipper:
    """Follows the model; refuses one that cannot be followed."""
    clipper = Clipper(
        engine.module,
        engine.groups,
        bounds=engine.rule.bounds(0),
        loss_reduction=engine.settings.loss_reduction,
        views=engine.settings.views,
    )
    clipper.weighing.whitening, clipper.weighing.gamma = engine.rule.whitening, engine.rule.gamma
    if engine._sharded:
        clipper.as_delivered = lambda name, total: sharding.added_up(engine.parameters[name], total)
        clipper.agree = engine.ranks.all_agree
    return clipper


def attach(engine: PrivacyEngine) -> None:
    """Release what the clipper has summed at the end of each backward pass."""
    clipper = engine._clipper
    assert clipper is not None
    in_noise_order = {name: engine.parameters[name] for group in engine.groups for name in group.parameters}
    releaser = Releaser(
        plan=engine.plan,
        rule=engine.rule,
        groups=engine.groups,
        parameters=in_noise_order,
        sample_rate=engine.sampling.rate,
        batch_size=float(engine.sampling.batch_size),
        ranks=engine.ranks,
        on_lattice=is_covered(engine.header),
    )
    engine._private = PrivateStep(
        key=engine._run_key,
        releaser=releaser,
        log=engine._log,
        batches=engine._batches,
        clipper=clipper,
        ranks=engine.ranks,
        steps=engine.plan.steps,
    )
    clipper.checks.share = engine.settings.spot_checks
    clipper.checks.report = lambda seen: engine.ledger.note("check", {"step": engine.step, **seen})
    clipper.on_end = partial(backward_ended, engine, accumulator())
    clipper.on_call = engine._drawn.called


def join(engine: PrivacyEngine, given: nn.Module) -> None:
    """Where there are several ranks: the same key on all, and the model one of several."""
    if not engine._key.seeded:
        engine._key = engine._key.told(engine.ranks.from_first)
    engine.ranks.check_same("the seed", engine._key.device_seed("same on all ranks").__repr__())
    engine._handles += prepare.join(given, engine.ranks)


def open_log(engine: PrivacyEngine) -> None:
    side = engine.rule.side_inverse_square if engine.plan.strategy.is_private else 0.0
    published = engine.settings.why_unproved(engine.plan) is not None
    engine._release_log = ReleaseLog.open(
        run_header(engine, side),
        engine.run_dir,
        resume=engine._resume,
        ranks=engine.ranks,
        budget=_budget_guard(engine, side, published=published),
        digest=partial(_digest, engine.ranks if engine._sharded else None),
        seeded=engine._key.seeded,
        durability=engine.settings.durability,
    )
    if engine.settings.noise == "lattice" and engine.plan.strategy.is_private and not is_covered(engine.header):
        raise RunDirectoryError(
            "the run was begun with noise in floating point, and is to go on with noise='lattice'. A run keeps its "
            "privacy settings: leave noise out, or start a new run."
        )
    engine._run_key = engine._key.bound_to(engine._release_log.ledger.header.salt)
    if engine.ranks.is_first:
        run_files.begin(engine)
    if engine.plan.strategy.rule is not None:
        _let_rule_ask(engine)


def _budget_guard(engine: PrivacyEngine, side: float, *, published: bool) -> BudgetGuard:
    budget, groups = engine.settings.budget, len(engine.groups)
    if engine.settings.filters:
        return FilterGuard(budget, engine.plan, groups, side, engine.rule.sigma)
    return BudgetGuard(budget, engine.plan, groups, side, published=published)


def _let_rule_ask(engine: PrivacyEngine) -> None:
    """An adaptive rule may know what its filter has granted, which follows from the ledger."""
    guard, rule = engine._log.budget, engine.rule
    assert isinstance(guard, FilterGuard) and isinstance(rule, AdaptiveClip)
    rule.left = lambda step: guard.counted(engine.header, engine.ledger.releases).left_after(step)
    rule.grants = lambda sigma: guard.counted(engine.header, engine.ledger.releases).grants(guard.multiplier(sigma))


def _digest(ranks: Ranks | None, grads: list[Tensor]) -> str:
    """Of gradients; ``ranks`` where each has a part of them. No method: a log outlives its engine."""
    here = fingerprint([sharding.local_shard(grad) for grad in grads])
    return here if ranks is None else ranks.digest(here)
