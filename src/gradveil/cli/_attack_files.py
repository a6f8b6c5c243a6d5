"""``gradveil attack`` on a user's own files: a model with gradients, or with what ``engine.record_gradients`` recorded.

Nobody but the user has the examples behind them: without ``--truth`` there is a reconstruction and no score.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil.attacks.scoring.pictures import draw_grid
from gradveil.cli._attack_text import attack_text
from gradveil.cli._file_options import Files
from gradveil.cli._output import number, table
from gradveil.errors import ConfigError, UnknownNameError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

    from gradveil.attacks.methods.base import Attack, Reconstruction
    from gradveil.attacks.observation.views import GroundTruth, Observation
    from gradveil.attacks.scoring.scores import Score

_ROWS_DRAWN = 8
_ROWS_PRINTED = 20


@dataclass(frozen=True)
class Finding:
    """What an attack made of one observation."""

    seen: Observation
    found: Reconstruction
    seconds: float
    secret: GroundTruth | None
    score: Score | None

    def to_dict(self) -> dict[str, Any]:
        each = zip(self.found.loss.tolist(), self.found.labels.tolist(), self.found.failed.tolist(), strict=True)
        defence = self.seen.sights[0].defence
        return {
            "steps": [sight.step for sight in self.seen.sights],
            "strategy": defence.strategy,
            "clip": defence.clip,
            "noise_std": defence.noise_std,
            "local": None if (local := self.seen.sights[0].local) is None else asdict(local),
            "examples_behind_each": self.seen.batch,
            "iterations": len(self.found.losses),
            "seconds": round(self.seconds, 3),
            "victims": [
                {"attack_loss": loss if math.isfinite(loss) else None, "labels": labels, "failed": failed}
                for loss, labels, failed in each
            ],
            "result": None if self.score is None else self.score.summary(),
        }


def attack_files(files: Files, out: Path | None, as_json: bool) -> None:
    """Load, attack, write, print. Everything is loaded and checked before anything is written."""
    from gradveil.attacks.observation.task import find_task

    observations = _load(files)
    task = find_task(observations[0].module, observations[0].input_shape)
    name = files.attack or ("text" if task.tokens else "cpl")
    if task.tokens or name == "text":
        attack_text(files, name, observations, task, out, as_json)
        return
    truth = None
    if files.truth is not None:
        if len(observations) > 1 and files.after is None:
            raise ConfigError("--truth is of one step, and several are recorded. Choose one with --step.")
        truth = _truth(files.truth, observations[0])
    attack = _attack(name, observations[0])
    if files.after is not None:
        observations = [_likeliest(attack, observations, files)]
    findings = []
    for seen in observations:
        click.echo(f"{name} on {seen.victims} gradient(s) of {seen.batch} example(s) ...", err=True)
        started = time.perf_counter()
        found = _run(attack, seen, files)
        seconds = time.perf_counter() - started
        findings.append(Finding(seen, found, seconds, truth, _score(found, truth, seen)))
    where = out or Path("attacks") / f"files-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    results = {
        "model": files.model,
        "source": str(files.source),
        "attack": name,
        "seed": files.seed,
        "scored": truth is not None,
        "attacked": [f.to_dict() for f in findings],
    }
    _write(where, results, findings)
    if as_json:
        click.echo(json.dumps(results))
        return
    _print(files, name, findings)
    click.echo(f"written to {where}", err=True)


def _run(attack: Attack, seen: Observation, files: Files) -> Reconstruction:
    """The model is the user's: what torch cannot do with it is said in a sentence."""
    try:
        return attack.run(seen, iterations=files.iterations, seed=files.seed)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnsupportedModelError(
            f"{attack.name} cannot be run on this model: {why} Attacks differentiate its gradients with respect to its "
            "inputs: all of it must be differentiable twice, in operations that torch.func knows."
        ) from error


def _likeliest(attack: Attack, observations: list[Observation], files: Files) -> Observation:
    """Of several ways in which local steps may have been made, the one under which the attack explains the update."""
    from gradveil.attacks.observation.local_updates import unexplained

    if len(observations) == 1:
        return observations[0]
    short = replace(files, iterations=max(1, files.iterations // 4))
    left = [unexplained(seen, _run(attack, seen, short)) for seen in observations]
    best = observations[left.index(min(left))]
    click.echo(f"of {len(left)} ways, {best.sights[0].local} explains the update best", err=True)
    return best


def _load(files: Files) -> list[Observation]:
    from gradveil.attacks.observation import from_files
    from gradveil.attacks.observation.from_capture import load_capture
    from gradveil.attacks.observation.local_updates import load_update
    from gradveil.attacks.observation.views import LocalSteps

    module = from_files.load_factory(files.model, seed=files.seed)
    public = None
    if files.public is not None:
        tensors = from_files.read_tensors(files.public)
        public = from_files.load_public(tensors, files.input_shape, str(files.public))
    shared: dict[str, Any] = {
        "input_shape": files.input_shape,
        "classes": files.classes,
        "public": public,
        "device": files.device,
    }
    if files.captured is not None:
        batch = files.defence.get("batch")
        return load_capture(files.captured, module, batch=batch, step=files.step, joint=files.joint, **shared)
    if files.after is not None and files.before is not None:
        from_files.load_weights(module, files.before)
        after = from_files.read_tensors(files.after)
        from_files.check_state(module, after, str(files.after))
        ways = [LocalSteps(steps=k, lr=lr, momentum=m, batch=b) for k, lr, m, b in files.local]
        return [load_update(module, after, local, where=str(files.after), **shared, **files.defence) for local in ways]
    assert files.gradients is not None
    tensors = from_files.read_tensors(files.gradients)
    if files.weights is not None:
        from_files.load_weights(module, files.weights)
    else:
        click.echo(
            f"gradveil: note: no --weights, so the gradients are taken to be of {files.model}()'s own.", err=True
        )
    return [from_files.load_observation(module, tensors, where=str(files.gradients), **shared, **files.defence)]


def _truth(path: Path, seen: Observation) -> GroundTruth:
    from gradveil.attacks.observation.from_files import load_truth, read_tensors

    return load_truth(read_tensors(path), seen, str(path))


def _attack(name: str, seen: Observation) -> Attack:
    from gradveil.attacks.methods.imprint import Imprint
    from gradveil.attacks.methods.prior import Prior
    from gradveil.attacks.trial import ATTACKS, NAMES

    if name == Imprint.name:
        return Imprint()
    if name not in NAMES:
        raise UnknownNameError("attack", name, (*NAMES, Imprint.name, "text"))
    if name != "prior":
        return ATTACKS[name]()
    if seen.public is None or seen.public.y is None:
        raise ConfigError("the prior attack chooses among candidates with labels: give them as --public, x and y.")
    return Prior(seen.public.x, seen.public.y)


def _score(found: Reconstruction, truth: GroundTruth | None, seen: Observation) -> Score | None:
    """Against the mean of what is public; without it, against the best constant image alone (grey is never better)."""
    import torch

    from gradveil.attacks.scoring.evaluate import score

    if truth is None:
        return None
    grey = torch.full(seen.input_shape, 0.5)
    mean = (grey if seen.public is None else seen.public.x.mean(0)).to(truth.x)
    return score(found, truth, mean_image=mean)


def _write(where: Path, results: dict[str, Any], findings: list[Finding]) -> None:
    """In a folder for the owner alone: a reconstruction that worked is somebody's example."""
    import safetensors.torch

    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    (where / "result.json").write_text(json.dumps(results, indent=1) + "\n")
    tensors = {}
    for finding in findings:
        step = f"step-{finding.seen.sights[0].step}."
        prefix = step if len(findings) > 1 else ""
        tensors[f"{prefix}x"] = finding.found.x.detach().cpu().contiguous()
        tensors[f"{prefix}labels"] = finding.found.labels.cpu().contiguous()
    safetensors.torch.save_file(tensors, where / "reconstruction.safetensors")
    lines = [line for finding in findings for line in _lines(finding)][:_ROWS_DRAWN]
    if lines:
        draw_grid(lines, where / "frames.png")


def _lines(finding: Finding) -> list[tuple[str, list[tuple[str, Tensor]]]]:
    """For every example: the original, where it is known, the reconstruction at some iterations, and the end."""
    from gradveil.attacks.scoring.metrics import matched

    seen, found, lines = finding.seen, finding.found, []
    if len(seen.input_shape) != 3:
        return []
    order = None if finding.secret is None else matched(found.x, finding.secret.x)
    step = seen.sights[0].step
    for victim in range(min(seen.victims, _ROWS_DRAWN)):
        for example in range(min(seen.batch, _ROWS_DRAWN)):
            place, pictures = example, []
            if finding.secret is not None and order is not None:
                place = int(order[victim, example])
                pictures.append(("original", finding.secret.x[victim, example]))
            pictures += [(str(i), frame[victim, place]) for i, frame in found.frames.items()]
            pictures.append(("end", found.x[victim, place]))
            lines.append((f"{step}, {victim}: class {int(found.labels[victim, place])}", pictures))
    return lines


def _print(files: Files, name: str, findings: list[Finding]) -> None:
    from gradveil.attacks.scoring.evaluate import table_rows

    columns = ["steps", "gradient", "attack loss", "labels", "iterations", "s"]
    rows = []
    for finding in findings:
        steps = ", ".join(str(sight.step) for sight in finding.seen.sights)
        for i, victim in enumerate(finding.to_dict()["victims"]):
            told = "failed" if victim["failed"] else number(victim["attack_loss"])
            labels = " ".join(str(label) for label in victim["labels"][:16])
            labels += " ..." if len(victim["labels"]) > 16 else ""
            rows.append([steps, str(i), told, labels, str(len(finding.found.losses)), f"{finding.seconds:.1f}"])
    note = "The loss is the attack's own: how well its guess explains the gradient, not how near it came."
    if len(rows) > _ROWS_PRINTED:
        note = f"And {len(rows) - _ROWS_PRINTED} more, in result.json. {note}"
    if files.truth is None:
        note += " For that, give the examples: --truth."
    table(columns, rows[:_ROWS_PRINTED], title=f"{name} on {files.source}", note=note)
    for finding in findings:
        if finding.score is not None:
            rows = table_rows([(name, finding.score)])
            table(["", *finding.score.headings], rows, note=f"success: {finding.score.success_means}.")
