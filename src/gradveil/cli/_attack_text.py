"""``gradveil attack`` on a user's model of tokens: which tokens, where, in which sentences."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradveil.cli._file_options import Files
from gradveil.cli._output import table
from gradveil.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from gradveil.attacks.observation.task import Task
    from gradveil.attacks.observation.views import Observation
    from gradveil.attacks.text import TextReconstruction

_ROWS_PRINTED = 20


def attack_text(
    files: Files, name: str, observations: list[Observation], task: Task, out: Path | None, as_json: bool
) -> None:
    """Attack, write, print; judged where the ids are given."""
    import safetensors.torch

    from gradveil.attacks.text import TextAttack

    if not task.tokens:
        raise ConfigError("the text attack is on models of token ids, and this one takes numbers: use map, or cpl.")
    if files.after is not None and any(steps > 1 for steps, *_ in files.local):
        raise ConfigError(
            "the text attack reads one step, and the update is of several local ones: the spans of its gradients mix "
            "several states of the model. Attack an update of one step (--local-steps 1)."
        )
    if name != "text":
        raise ConfigError(
            f"the model takes token ids, and {name} searches for numbers. Leave --attack out, or give --attack text."
        )
    truth = _truth(files, observations, task)
    attacked, found = [], []
    tensors: dict[str, Tensor] = {}
    for seen in observations:
        click.echo(f"text on {seen.victims} gradient(s) of {seen.batch} sentence(s) ...", err=True)
        started = time.perf_counter()
        found.append(TextAttack().run(seen, task=task, seed=files.seed))
        seconds = time.perf_counter() - started
        attacked.append(_finding(seen, found[-1], truth, task, seconds))
        prefix = f"step-{seen.sights[0].step}." if len(observations) > 1 else ""
        tensors |= {f"{prefix}x": found[-1].ids, f"{prefix}sure": found[-1].sure.byte()}
    results = {
        "model": files.model,
        "source": str(files.source),
        "attack": name,
        "seed": files.seed,
        "scored": truth is not None,
        "vocabulary": task.vocabulary,
        "attacked": attacked,
    }
    where = out or Path("attacks") / f"files-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    (where / "result.json").write_text(json.dumps(results, indent=1) + "\n")
    safetensors.torch.save_file(tensors, where / "reconstruction.safetensors")
    if as_json:
        click.echo(json.dumps(results))
        return
    _print(files, observations, found, attacked)
    click.echo(f"written to {where}", err=True)


def _truth(files: Files, observations: list[Observation], task: Task) -> Tensor | None:
    from gradveil.attacks.observation.from_files import load_ids, read_tensors

    if files.truth is None:
        return None
    if len(observations) > 1:
        raise ConfigError("--truth is of one step, and several are recorded. Choose one with --step.")
    return load_ids(read_tensors(files.truth), observations[0], task.vocabulary, str(files.truth))


def _finding(
    seen: Observation, found: TextReconstruction, truth: Tensor | None, task: Task, seconds: float
) -> dict[str, Any]:
    from gradveil.attacks.text import chance, ranking_score, score_text

    defence = seen.sights[0].defence
    result = None
    if truth is not None:
        public = None if seen.public is None else seen.public.x.long()
        result = {
            **score_text(found.ids, truth).to_dict(),
            "ranked_above_absent": round(ranking_score(found.ranking, truth), 4),
            "chance": chance(truth, task.vocabulary, public=public).to_dict(),
        }
    return {
        "steps": [sight.step for sight in seen.sights],
        "strategy": defence.strategy,
        "clip": defence.clip,
        "noise_std": defence.noise_std,
        "examples_behind_each": seen.batch,
        "seconds": round(seconds, 3),
        "sure": round(float(found.sure.double().mean()), 4),
        "victims": [{"ids": ids.tolist(), **facts} for ids, facts in zip(found.ids, found.facts, strict=True)],
        "result": result,
    }


def _print(
    files: Files, observations: list[Observation], found: list[TextReconstruction], attacked: list[dict[str, Any]]
) -> None:
    rows = []
    for seen, guess in zip(observations, found, strict=True):
        for victim, (ids, sure) in enumerate(zip(guess.ids, guess.sure, strict=True)):
            for sentence, known in zip(ids.tolist(), sure, strict=True):
                shown = " ".join(str(token) for token in sentence[:24]) + (" ..." if len(sentence) > 24 else "")
                rows.append([str(seen.sights[0].step), str(victim), shown, f"{float(known.double().mean()):.0%}"])
    note = "read off: tokens that follow from the gradient's spans; the others are the most likely ones."
    if len(rows) > _ROWS_PRINTED:
        note = f"And {len(rows) - _ROWS_PRINTED} more, in reconstruction.safetensors. {note}"
    if files.truth is None:
        note += " How many are right: give the ids, --truth."
    title = f"text on {files.source}"
    table(["step", "gradient", "token ids", "read off"], rows[:_ROWS_PRINTED], title=title, note=note)
    heads = ("tokens", "in_place", "sentences", "rouge_1", "rouge_2", "rouge_l")
    for finding in attacked:
        if (result := finding["result"]) is not None:
            scores = [["text", *result.values()][:7], ["chance", *result["chance"].values()]]
            table(
                ["", "tokens", "in place", "sentences", "ROUGE-1", "ROUGE-2", "ROUGE-L"],
                [[row[0], *(f"{value:.1%}" for value in row[1 : 1 + len(heads)])] for row in scores],
                note="tokens: found, wherever they stand. chance: tokens drawn as in --public, or all alike. A token "
                f"that occurs is ranked above one that does not in {result['ranked_above_absent']:.1%} of pairs "
                "(chance: 50 %).",
            )
