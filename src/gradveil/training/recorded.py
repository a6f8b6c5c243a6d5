"""What a run did, as its ledger records it; config.toml is only compared with it. No torch.

Whoever attacks, audits or judges a run takes clip, sigma, clipping, sampler and strategy from here. What is said
elsewhere in the run directory must agree: :func:`contradictions` names what does not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradveil.accounting.ledger import Contents
from gradveil.accounting.manifest import check_files, settings_of
from gradveil.errors import ConfigError, GradveilError, LedgerError
from gradveil.mechanism import schedules, strategies
from gradveil.mechanism.records import Release, RunHeader
from gradveil.mechanism.strategies import PrivacyPlan, parameters
from gradveil.training.config import RunConfig, read_toml
from gradveil.training.run_directory import RunDirectory

Clipping = str | Mapping[str, Sequence[str]]


def plan_of(header: RunHeader) -> PrivacyPlan:
    """The strategy with its numbers, as the run declared them in its ledger."""
    strategy, told = strategies.get(header.strategy), header.plan
    rule = str(told.get("sensitivity_rule", ""))
    return PrivacyPlan(
        strategy=strategy,
        steps=header.steps,
        clip=schedules.from_dict(told["clip"]),
        sigma=schedules.from_dict(told["sigma"]),
        reading="batch" if rule == "l2max-batch" else "example" if rule.startswith("l2max") else None,
        fixed_variance=bool(told.get("fixed_variance", False)),
    )


def clipping_of(contents: Contents) -> Clipping:
    """How the run's gradients were clipped: per layer, flat, or in groups of its own."""
    told = (settings_of(contents) or {}).get("clipping")
    if isinstance(told, Mapping):
        if not all(isinstance(members, list) for members in told.values()):
            raise LedgerError(f"the clipping groups in the ledger's settings make no sense: {told!r:.200}.")
        return {str(name): [str(member) for member in members] for name, members in told.items()}
    return "flat" if contents.header.groups == ("all",) else "per-layer"


def config_of(contents: Contents, config: RunConfig | None) -> RunConfig:
    """The settings of a run that ``gradveil train`` made: those in its ledger, or of an old one those in config.toml.

    What the ledger's header says takes the place of what they say.
    """
    told = settings_of(contents)
    found = RunConfig.check(told) if told is not None else config
    if found is None:
        raise ConfigError("the run has neither settings in its ledger nor a config.toml: it is not known what it was.")
    header, clipping = contents.header, clipping_of(contents)
    changes: dict[str, Any] = {
        "strategy": header.strategy,
        "steps": header.steps,
        "delta": header.delta,
        "sampling": header.sampling,
        "batch_size": round(header.expected_batch_size),
    }
    if isinstance(clipping, str):
        changes["clipping"] = clipping
    return found.model_copy(update=changes)


def read_recorded(run: RunDirectory) -> tuple[Contents, RunConfig | Mapping[str, Any]]:
    """The verified ledger of a run, and the settings it records; refused where the run directory contradicts them.

    Of a run of somebody's own model: the settings of its engine, as the ledger has them.
    """
    contents = run.verified_ledger()
    check_files(run.path, contents)
    own = settings_of(contents)
    is_own = own is not None and isinstance(own.get("engine"), Mapping)
    config = RunConfig.check(read_toml(run.config)) if run.config.exists() and not is_own else None
    wrong = contradictions(contents, config=config, metrics=run.read_metrics(), checkpoint=_newest_step(run))
    if wrong:
        raise LedgerError(f"{run.path} contradicts its ledger: {' '.join(wrong)} Nothing can be taken from it.")
    if own is not None and is_own:
        return contents, own
    return contents, config_of(contents, config)


def _newest_step(run: RunDirectory) -> int:
    checkpoint = run.newest_checkpoint()
    return 0 if checkpoint is None else checkpoint.step


def contradictions(
    contents: Contents,
    *,
    config: RunConfig | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
    checkpoint: int = 0,
) -> list[str]:
    """Where other files of the run say something else than its ledger, in sentences.

    A ledger that was cut off or rewritten gives itself away here, unless everything beside it was rewritten too:
    against that only a signature or a head that was kept elsewhere helps.
    """
    found = list(_cut_off(contents, metrics, checkpoint))
    told = settings_of(contents)
    for where, settings in (("config.toml", config), ("the settings in the ledger", told)):
        if settings is None:
            continue
        try:
            known = settings if isinstance(settings, RunConfig) else RunConfig.check(settings)
            found += _against_header(known, contents.header, where)
        except GradveilError:
            continue  # an engine's own settings, which are written from the same values as the header
    if not any(kind == "spent" for kind, _ in contents.notes):  # whose plan was another one's
        found += _against_plan(contents)
    found += _against_metrics(contents, metrics)
    return found


def _cut_off(contents: Contents, metrics: Sequence[Mapping[str, Any]], checkpoint: int) -> Iterable[str]:
    if contents.header.guarantee == "none":
        return  # its steps are not releases
    held = max((release.step + 1 for release in contents.releases), default=0)
    looked = max((_step(record) for record in metrics), default=0)
    for name, step in (("metrics.jsonl", looked), ("a checkpoint", checkpoint)):
        if step > held:
            yield (
                f"{name} tells of step {step}, and the ledger's releases end after {held}: lines were cut off, or "
                f"{name} is of another run."
            )


def _step(record: Mapping[str, Any]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0


def _against_header(config: RunConfig, header: RunHeader, where: str) -> Iterable[str]:
    pairs: dict[str, tuple[Any, Any]] = {
        "strategy": (config.strategy, header.strategy),
        "steps": (config.steps, header.steps),
        "delta": (config.delta, header.delta),
        "sampling": (config.sampling, header.sampling),
        "batch_size": (config.batch_size, header.expected_batch_size),
        "clipping": (config.clipping == "flat", header.groups == ("all",)),
    }
    if header.guarantee != "none" and not config.awaits_sigma:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = parameters(**config.plan_settings()).to_plan()
        pairs |= {name: (value, header.plan.get(name)) for name, value in plan.items()}
    for name, (said, recorded) in pairs.items():
        if said != recorded:
            yield f"{where} says {name} = {_short(said)}, the ledger {_short(recorded)}."


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and value.get("kind") == "constant":
        return f"{value.get('start'):g}"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _against_plan(contents: Contents) -> Iterable[str]:
    """Releases whose noise is not the one that the header declares for their step."""
    header = contents.header
    try:
        plan = plan_of(header)
    except (GradveilError, KeyError, TypeError, ValueError):
        return  # a strategy of the user's, which is not registered here
    if plan.fixed_variance or not plan.strategy.is_private or plan.strategy.noise not in ("constant", "decay"):
        return
    for release in contents.releases:
        declared = plan.sigma(release.step) if release.step < header.steps else release.sigma
        if not release.recovered and not (_near(release.sigma, declared, 1e-6) and _noise_fits(release)):
            yield (
                f"the release of step {release.step} has sigma = {release.sigma:g} and noise of "
                f"{max(release.noise_std, default=0.0):g} on S = {max(release.sensitivity, default=0.0):g}, where the "
                f"header declares sigma = {declared:g}."
            )
            return


def _noise_fits(release: Release) -> bool:
    pairs = zip(release.noise_std, release.sensitivity, strict=False)
    return all(_near(std, release.sigma * s, 1e-2) for std, s in pairs)


def _near(value: float, wanted: float, share: float) -> bool:
    return math.isclose(value, wanted, rel_tol=share, abs_tol=1e-12)


def _against_metrics(contents: Contents, metrics: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Noise that metrics.jsonl recorded during training and the ledger does not have at that step."""
    noted = {_step(m) - 1: m for m in metrics if isinstance(m.get("noise_std"), float) and m["noise_std"] > 0}
    recorded: dict[int, list[float]] = {}
    for release in contents.releases:
        if release.step in noted and release.noise_std:
            recorded.setdefault(release.step, []).append(max(release.noise_std))
    for step, stds in recorded.items():
        said = noted[step]["noise_std"]
        if not any(_near(said, std, 1e-6) for std in stds):
            yield f"metrics.jsonl says that step {step + 1} had noise of {said:g}, the ledger {stds[-1]:g}."
            return
