"""What an adversary would see of a live run, step by step, on disk: ``engine.record_gradients``.

    engine.record_gradients("seen", steps=3)              # the next three steps; steps=[0, 50, 99] for chosen ones
    for x, y in loader: ...                      # the loop as it is

    seen/                                        mode 0700, its files 0600
      step-00000000.safetensors                  gradient.<parameter> (V, *shape), weights.<name>;
                                                 adaclip: centre.<parameter>, scale.<parameter>
      step-00000000.json                         written last: what is public, and the hash of the tensors beside it

The weights are those before the update; the batch is not in it. What is recorded, by view:

    batch                the noised mean that is released (of plain training, its mean gradient): from every loop
    per-example          each example's gradient as it is summed, before any noise. Clipping goes on inside the backward
                         pass, which never holds one example's gradient by itself: it can be had only with
                         physical_batch_size=1, where every pass is of one. A step without an example leaves no record
    per-example-noised   the same with the noise that the released mean gets. The noise is drawn for the record: the
                         run's own is used once, in the release

The per-example views are as secret as the examples. Recording draws nothing from the run's or torch's generators and
changes no number of the training; the ledger is brought to disk before anything is recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gradveil import __version__
from gradveil.accounting.files import write_whole
from gradveil.clipping import Group
from gradveil.errors import ConfigError, DataError, RunDirectoryError, UnknownNameError
from gradveil.mechanism.records import Release

if TYPE_CHECKING:
    from gradveil.engine import PrivacyEngine

VIEWS = ("per-example", "per-example-noised", "batch")
FORMAT = "gradveil observation 1"


class Recorder:
    """What ``engine.record_gradients`` returns. ``left``: the steps to be recorded; ``recorded``: those that were."""

    path: Path

    def __init__(
        self, engine: PrivacyEngine, path: str | os.PathLike[str], *, steps: int | Iterable[int], view: str
    ) -> None:
        if not engine.is_set_up:
            raise ConfigError("the engine has no run yet: call make_private before engine.record_gradients.")
        if engine._in_graphs:
            raise ConfigError(
                "this engine's steps run in CUDA graphs (gradveil.cuda_graph_step), which update the weights as they "
                "make the release: there is no moment to record it. Record from an eager loop."
            )
        busy = engine._recorder
        if busy is not None and busy.left:
            raise ConfigError(f"record_gradients is recording to {busy.path}: wait for its steps, or stop() it.")
        if view not in VIEWS:
            raise UnknownNameError("view", view, VIEWS)
        if view != "batch" and engine.physical_batch_size != 1:
            raise ConfigError(
                f"view {view!r} shows single examples, and this engine's backward passes are of whole batches: their "
                "clipped gradients exist as sums only. Give make_private physical_batch_size=1, or record the view "
                "'batch' (gradveil.attacks.observation.observe shows examples you have yourself, at recorded weights)."
            )
        self.left: set[int] = _chosen(steps, engine)
        self.recorded: list[int] = []
        self.path, self.view, self._engine = Path(path), view, engine
        self._step: int | None = None  # that is being taken
        self._loop = 0
        self._examples: list[dict[str, Tensor]] = []  # of this step, for the per-example views
        self._whitening: dict[str, Tensor] = {}
        _make_folder(self.path)

    def stop(self) -> None:
        """Record no further step."""
        self.left.clear()

    def see_part(self, sums: Mapping[str, Tensor]) -> None:
        """A backward pass of the batch, or of a physical part of it, has ended: its sums of clipped gradients.

        Of a run without privacy, its gradients.
        """
        engine = self._engine
        this = engine.step if engine.step in self.left else None
        if (this, engine._batches.loop) != (self._step, self._loop):
            self._examples = []
        self._step, self._loop = this, engine._batches.loop
        if this is None:
            return
        if self.view != "batch":
            self._take_example(sums)
        whitening = engine.rule.whitening if engine.plan.strategy.is_private else None
        # Cloned now: the rule learns from this step's release, in place.
        self._whitening = {
            f"{part}.{name}": _kept(t)
            for name, pair in (whitening or {}).items()
            for part, t in zip(("centre", "scale"), pair, strict=True)
        }

    def _take_example(self, sums: Mapping[str, Tensor]) -> None:
        ticket = self._engine._batches.ticket
        if ticket is None or ticket.size > 1:
            raise ConfigError(
                f"view {self.view!r} is recorded from batches of the loader that make_private returned, one example at "
                f"a time; step {self._step} was fed with another batch. Train with that loader, or record 'batch'."
            )
        if ticket.size:
            self._examples.append(self._of_every_parameter(sums))

    def _of_every_parameter(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: _kept(grads[name]) if name in grads else torch.zeros_like(p, device="cpu", requires_grad=False)
            for name, p in self._engine.parameters.items()
        }

    def see_release(self, noised: Mapping[str, Tensor]) -> None:
        """The release is recorded and handed out; the optimizer has not moved yet."""
        step = self._step
        if step is None:
            return
        release = self._engine.ledger.releases[-1] if self._engine.plan.strategy.is_private else None
        seen = self._seen(self._of_every_parameter(noised), release)
        self.left.discard(step)
        self._step, self._examples = None, []
        if seen is None:
            return
        self._engine.commit()
        weights = {n: _kept(t) for n, t in self._engine.module.state_dict().items() if isinstance(t, Tensor)}
        tensors = {f"gradient.{n}": t for n, t in seen.items()} | {f"weights.{n}": t for n, t in weights.items()}
        self._write(step, tensors | self._whitening, release)
        self.recorded.append(step)

    def see_plain_step(self) -> None:
        """Of a run without privacy: what the optimizer finds, before its step."""
        engine = self._engine
        if self._step is None or engine.step == self._step:
            return  # not chosen, or a part of a batch that goes on
        self.see_release({n: p.grad for n, p in engine.parameters.items() if p.grad is not None})

    def _seen(self, released: Mapping[str, Tensor], release: Release | None) -> dict[str, Tensor] | None:
        """The gradients of the view, (V, *shape); None where there is no example in the batch to be seen."""
        engine, batch_size = self._engine, float(self._engine.sampling.batch_size)
        if self.view == "batch":
            summed = release is None and engine.settings.loss_reduction == "sum"
            return {n: (g / batch_size if summed else g).unsqueeze(0) for n, g in released.items()}
        if not self._examples:
            return None
        seen = {n: torch.stack([e[n] for e in self._examples]) for n in self._examples[0]}
        for name in seen if self._whitening else ():
            seen[name] += self._whitening[f"centre.{name}"]  # taken off before clipping, put back on after
        if self.view == "per-example-noised" and release is not None:
            generator = torch.Generator().manual_seed(secrets.randbits(63))
            for group, std in zip(engine.groups, release.noise_std, strict=True):
                for name in group.parameters:
                    noise = std / batch_size * torch.randn(seen[name].shape, generator=generator).to(seen[name])
                    scale = self._whitening.get(f"scale.{name}")
                    seen[name] += noise if scale is None else noise * scale
        return seen

    def _write(self, step: int, tensors: Mapping[str, Tensor], release: Release | None) -> None:
        engine = self._engine
        data = safetensors.torch.save(dict(tensors))
        facts = {
            "format": FORMAT,
            "gradveil_version": __version__,
            "view": self.view,
            "step": step,
            "strategy": engine.plan.strategy.name,
            "groups": [[group.name, list(group.parameters)] for group in engine.groups],
            "batch_size": float(engine.sampling.batch_size),
            "release": None if release is None else release.to_dict(),
            "gamma": None if release is None else engine.rule.gamma,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
        }
        stem = self.path / f"step-{step:08d}"
        write_whole(stem.with_suffix(".safetensors"), data, mode=0o600)
        write_whole(stem.with_suffix(".json"), json.dumps(facts, indent=1).encode(), mode=0o600)


def _kept(t: Tensor) -> Tensor:
    return t.detach().cpu().clone(memory_format=torch.contiguous_format)


def _chosen(steps: int | Iterable[int], engine: PrivacyEngine) -> set[int]:
    first, end = engine.step, engine.plan.steps
    chosen = set(range(first, first + steps)) if isinstance(steps, int) else {int(s) for s in steps}
    if not chosen:
        raise ConfigError(f"steps is {steps!r}: there is nothing to record. Give a number of steps, or some of them.")
    if min(chosen) < first or max(chosen) >= end:
        raise ConfigError(
            f"steps {min(chosen)} to {max(chosen)} are to be recorded, and the run's coming steps are {first} to "
            f"{end - 1} (it declared {end}). Choose among those."
        )
    return chosen


def _make_folder(path: Path) -> None:
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunDirectoryError(
                f"{path} exists and is not an empty folder: a record is never written over. Give another path."
            )
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be made: {error.strerror}. Give another path.") from None


# ---- reading


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One step as it was recorded; ``release`` is None for plain training."""

    step: int
    view: str
    strategy: str
    groups: tuple[Group, ...]
    batch_size: float
    release: Release | None
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    whitening: Mapping[str, tuple[Tensor, Tensor]]  # adaclip: centre and scale of every parameter's coordinates
    gamma: float | None = None  # normalised: added to every norm


def read(path: Path) -> list[Recorded]:
    """Every step in a folder that ``engine.record_gradients`` wrote, in order; or the one step of a JSON file in it."""
    if path.is_dir():
        files = sorted(path.glob("step-*.json"))
        if not files:
            raise DataError(
                f"{path} holds no recorded step (step-*.json). Give a folder that engine.record_gradients wrote, after "
                "training has come to the steps that were chosen."
            )
        return [_read_step(file) for file in files]
    if not path.exists():
        raise DataError(f"{path} does not exist. Give the folder that engine.record_gradients wrote.")
    return [_read_step(path.with_suffix(".json"))]


def _read_step(path: Path) -> Recorded:
    try:
        facts = json.loads(path.read_bytes())
        data = path.with_suffix(".safetensors").read_bytes()
        if facts["format"] != FORMAT:
            raise DataError(f"{path} is of the format {facts['format']!r}, not {FORMAT!r}: another version wrote it.")
        if hashlib.sha256(data).hexdigest() != facts["tensors_sha256"]:
            raise DataError(f"{path.with_suffix('.safetensors')} is damaged: its hash does not fit its record.")
        tensors = safetensors.torch.load(data)
        parts = {
            part: {n.removeprefix(f"{part}."): t for n, t in tensors.items() if n.startswith(f"{part}.")}
            for part in ("gradient", "weights", "centre", "scale")
        }
        release = facts["release"]
        return Recorded(
            step=facts["step"],
            view=facts["view"],
            strategy=facts["strategy"],
            groups=tuple(Group(name, tuple(members)) for name, members in facts["groups"]),
            batch_size=facts["batch_size"],
            release=None if release is None else Release.from_dict(release),
            gradients=parts["gradient"],
            weights=parts["weights"],
            whitening={n: (t, parts["scale"][n]) for n, t in parts["centre"].items()},
            gamma=facts.get("gamma"),
        )
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} is missing: a recorded step is a JSON file and its tensors.") from None
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError):
        raise DataError(f"{path} is damaged: it is not what engine.record_gradients wrote.") from None
