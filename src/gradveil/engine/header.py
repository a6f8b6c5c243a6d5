"""The first line of a run's ledger: what the run declares before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradveil import __version__
from gradveil.engine.guards import salt
from gradveil.errors import ConfigError
from gradveil.mechanism.adaptive_clip import AdaptiveClip
from gradveil.mechanism.records import RunHeader

LATTICE_FROM = 500  # examples in a batch: see _on_lattice

if TYPE_CHECKING:
    from gradveil.engine.engine import PrivacyEngine


def run_header(engine: PrivacyEngine, side: float) -> RunHeader:
    """``side``: what the side releases of a step add to 1/z^2."""
    return RunHeader(
        strategy=engine.plan.strategy.name,
        guarantee=engine.plan.strategy.guarantee,
        groups=tuple(g.name for g in engine.groups),
        population=engine.sampling.population,
        sampling=engine.sampling.name,
        sample_rate=engine.sampling.rate,
        expected_batch_size=float(engine.sampling.batch_size),
        steps=engine.plan.steps,
        delta=engine.delta,
        seeded=engine._key.seeded,
        plan=engine.plan.to_plan()
        | {"side_inverse_square": side, "group_sizes": _group_sizes(engine)}
        | _stated_settings(engine)
        | (_filters(engine, side) if engine.settings.filters else {}),
        salt=_salt(engine),
        stopping=engine.settings.stopping,
        gradveil_version=__version__,
    )


def _stated_settings(engine: PrivacyEngine) -> dict[str, Any]:
    """Said where they are not the default: what an ordinary run writes stays what it was."""
    found: dict[str, Any] = {}
    if engine.settings.views > 1:
        found["views"] = engine.settings.views
    if engine.settings.budget is not None:
        found["budget"] = engine.settings.budget
    if engine.run_dir is not None:
        found["durability"] = engine.settings.durability
    if engine.plan.strategy.rule is not None:
        assert isinstance(engine.rule, AdaptiveClip)
        found["rule"] = engine.rule.to_plan()
    if engine.settings.drops_examples:
        found["drops_examples"] = True
    if engine.plan.strategy.is_private and _on_lattice(engine):
        found["noise"] = "lattice"
    return found


def _on_lattice(engine: PrivacyEngine) -> bool:
    """Whether noise is to be drawn on a lattice.

    A parameter takes at least 6 operations for each example of a batch, and its noise on a lattice about a nanosecond
    more than in floating point: less than 3 % of a step from some hundred examples on.
    """
    chosen, devices = engine.settings.noise, {p.device.type for p in engine.parameters.values()}
    if chosen == "lattice" and not devices <= {"cpu", "cuda"}:
        raise ConfigError(
            f"noise='lattice' needs float64, and this model is on {', '.join(sorted(devices))}. Train on the CPU or on "
            "CUDA, or take noise='auto'."
        )
    on_cpu = devices == {"cpu"}
    return chosen == "lattice" or (chosen == "auto" and on_cpu and engine.sampling.batch_size >= LATTICE_FROM)


def _filters(engine: PrivacyEngine, side: float) -> dict[str, Any]:
    from gradveil.accounting import filter as filters
    from gradveil.accounting.plan import plan_filters

    found = plan_filters(
        engine.plan,
        groups=len(engine.groups),
        side_inverse_square=side,
        sampling=engine.sampling.name,
        population=engine.sampling.population,
        batch_size=engine.sampling.batch_size,
        delta=engine.delta,
        epsilon=engine.settings.target,
    )
    return {filters.NAME: filters.to_plan(found)}


def _group_sizes(engine: PrivacyEngine) -> list[int]:
    return [sum(engine.parameters[n].numel() for n in group.parameters) for group in engine.groups]


def _salt(engine: PrivacyEngine) -> str:
    settings = {
        "strategy": engine.plan.strategy.name,
        "plan": engine.plan.to_plan(),
        "steps": engine.plan.steps,
        "groups": [(g.name, g.parameters) for g in engine.groups],
        "sampling": [engine.sampling.name, engine.sampling.population, engine.sampling.batch_size],
        "options": engine.options,
        "loss_reduction": engine.settings.loss_reduction,
        **({"views": engine.settings.views} if engine.settings.views > 1 else {}),
    }
    return salt(settings, engine.parameters.values(), engine.optimizer)
