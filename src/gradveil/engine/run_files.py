"""The files that an engine writes into its run directory beside the ledger, each named in it with its hash.

    config.toml        the engine's settings, under [engine], and what was said about the run, under [about]
    environment.json   versions and machine
    metrics.jsonl      what the user's loop logs (PrivacyEngine.log)
    checkpoints/       the weights at the end, where the run knows a function that makes the model

With these a run of the user's own model is a run like those of ``gradveil train``, which writes its own.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradveil import __version__
from gradveil.accounting import manifest
from gradveil.clipping.backends import native
from gradveil.errors import ConfigError
from gradveil.mechanism.schedules import Schedule

if TYPE_CHECKING:
    from gradveil.engine.engine import PrivacyEngine
    from gradveil.training.run_directory import RunDirectory


def begin(engine: PrivacyEngine) -> None:
    """Write down the settings and the machine, unless somebody else (``gradveil train``) has or the run goes on."""
    run = _run(engine)
    if run is None or run.config.exists():
        return
    from gradveil.training.run_directory import write_whole

    settings = _settings(engine)
    machine = environment(next(iter(engine.parameters.values())).device, sys.argv)
    for path, text in ((run.environment, json.dumps(machine, indent=1)), (run.config, _toml(settings))):
        manifest.bind(engine.ledger, path.name, text.encode())
        write_whole(path, text.encode())
    engine.ledger.note("settings", settings)


def log(engine: PrivacyEngine, metrics: Mapping[str, Any]) -> None:
    """Add a record to metrics.jsonl; the ledger is on disk before it."""
    record: dict[str, Any] = {"step": engine.step, "seconds": round(time.perf_counter() - engine._began, 4)}
    for name, value in metrics.items():
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, bool) or not isinstance(number, int | float | str | None):
            raise ConfigError(f"the metric {name} is {value!r}: log numbers or strings.")
        record[name] = number if not isinstance(number, float) or math.isfinite(number) else None
    releases = engine.releases
    if releases:
        last = releases[-1]
        record |= {"clip": max(last.clip), "sigma": last.sigma, "noise_std": max(last.noise_std)}
    run = _run(engine)
    if run is None:
        raise ConfigError("the engine has no run_dir, so there is nowhere to log to. Give it one.")
    engine.commit()
    if engine.ranks.is_first:
        run.append_metrics(record)


def end(engine: PrivacyEngine) -> None:
    """Before the end of the run is noted: its weights, if they can be used, and what was logged."""
    run = _run(engine)
    if run is None or not engine.ranks.is_first or not engine.ledger.is_open:
        return
    bind = partial(manifest.bind, engine.ledger)
    if engine.model_factory is not None and not engine._sharded:
        import safetensors.torch

        state = engine.state_dict()
        tensors = {f"model.{name}": t for name, t in engine.module.state_dict().items()}
        tensors |= {f"rule.{name}": t for name, t in state.pop("rule").items()}
        del state["spent"]
        whole = safetensors.torch.save({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()})
        run.save_checkpoint(engine.step, whole, state | {"gradveil": __version__}, bind)
    if run.metrics.exists() and any(kind == "settings" and "engine" in body for kind, body in engine.ledger.notes):
        bind(run.metrics.name, run.metrics.read_bytes())


def _run(engine: PrivacyEngine) -> RunDirectory | None:
    if engine.run_dir is None:
        return None
    from gradveil.training.run_directory import RunDirectory

    return RunDirectory(engine.run_dir)


def _settings(engine: PrivacyEngine) -> dict[str, Any]:
    """What the ledger's header does not say, and what a reader of config.toml looks for."""
    asked, plan = engine.settings, engine.plan
    stated: dict[str, Any] = {
        "strategy": plan.strategy.name,
        "clip": _plain(asked.clip),
        "sigma": _plain(plan.sigma if asked.epsilon is not None else asked.sigma),
        "epsilon": asked.epsilon,
        "steps": plan.steps,
        "delta": asked.delta,
        "sampling": asked.sampling,
        "batch_size": engine.sampling.batch_size,
        "population": engine.sampling.population,
        **asked.shape,
        "loss_reduction": asked.loss_reduction,
        "views": asked.views,
        "budget": asked.budget,
        "optimizer": type(engine.optimizer).__name__,
        "lr": engine.optimizer.param_groups[0].get("lr"),
        "parameters": sum(p.numel() for p in engine.parameters.values()),
        "model": type(engine.module).__name__,
        "model_factory": engine.model_factory,
        "data_factory": engine.data_factory,
    }
    kept = {name: value for name, value in stated.items() if isinstance(value, str | int | float)}
    clipping = asked.clipping if isinstance(asked.clipping, str) else {n: list(m) for n, m in asked.clipping.items()}
    return {"engine": kept, "clipping": clipping, "options": dict(engine.options), "about": dict(engine.about)}


def _plain(value: Any) -> Any:
    return value.start if isinstance(value, Schedule) else value


def _toml(settings: Mapping[str, Any]) -> str:
    tables = {**settings["engine"]}
    lines = ["# The settings of a PrivacyEngine. The ledger is what counts; this is for reading.", "[engine]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in tables.items()]
    if isinstance(settings["clipping"], str):
        lines.append(f"clipping = {json.dumps(settings['clipping'])}")
    for name in ("clipping", "options", "about"):
        if isinstance(settings[name], Mapping) and settings[name]:
            lines += ["", f"[{name}]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in settings[name].items())]
    return "\n".join(lines) + "\n"


def checked_about(about: Mapping[str, str] | None) -> dict[str, str]:
    """What is said about a run: names and texts."""
    for name, text in (about or {}).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(f"about[{name!r}] is {text!r}: give texts by name, such as purpose='...'.")
    return dict(about or {})


def environment(device: torch.device, command: Sequence[str], clipping: str | None = None) -> dict[str, Any]:
    """Versions, machine, kernels and command of a run; ``clipping``: by which kernels."""
    import dp_accounting
    import scipy

    cuda = device.type == "cuda"
    return {
        "gradveil": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "dp_accounting": getattr(dp_accounting, "__version__", "unknown"),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
        "clipping": clipping or ("cuda" if cuda else native.status()),
        "command": without_seed(command),
    }


def without_seed(command: Sequence[str]) -> list[str]:
    """A command line with the value of --seed taken out: anyone who knows the seed can subtract the noise.

    >>> without_seed(["gradveil", "train", "--seed", "7", "--lr=1"])
    ['gradveil', 'train', '--seed', '(kept in secret.json)', '--lr=1']
    """
    kept: list[str] = []
    for word in command:
        if kept and kept[-1] == "--seed":
            kept.append("(kept in secret.json)")
        elif word.startswith("--seed="):
            kept.append("--seed=(kept in secret.json)")
        else:
            kept.append(word)
    return kept
