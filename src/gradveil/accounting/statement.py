"""The privacy statement of a run: what is proved, what is only published, what is not covered."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradveil.accounting._compose import Neighbours, default_view
from gradveil.accounting._release_table import kinds, sigmas_of
from gradveil.accounting._rounding import at_least, at_most, percent_at_most
from gradveil.accounting.evidence import checks_of
from gradveil.accounting.finite_precision import extra_delta, is_covered
from gradveil.accounting.paper import PaperEpsilon, from_releases
from gradveil.accounting.proved import NOT_COVERED, UNIT, ProvedEpsilon, proved_epsilon
from gradveil.mechanism.records import Release, RunHeader

if TYPE_CHECKING:
    from gradveil.accounting.ledger import Contents

_WIDTH = 100
_LABEL = 16

_UNIT = {
    "add-remove": "one example; neighbouring data sets differ by one example added or removed",
    "replace-one": "one example; neighbouring data sets differ in the content of one example",
}
_TRUST = (
    "central: the trainer holds the data and is trusted with them. Protection is against anyone who sees what is "
    "released, knows every other example and the code, and has unlimited computing power"
)
_COVERS = "every noised gradient, and so every intermediate model, the final one, and anything computed from them alone"
_NOT_COVERED = (
    "hyper-parameter search: each run on the same data spends its own epsilon",
    "metrics computed from the training data, such as the loss, and what is decided by them: a learning rate that "
    "follows the training loss, say",
    "a seed that becomes known or is reused: anyone who knows the seed can subtract the noise",
    "side channels, such as the time a step takes",
)
_FLOATING = (
    "floating point: the noise is drawn in finite precision, so it is only approximately Gaussian (noise='lattice' "
    "covers it)"
)
_LATTICE = (
    "covered: released values lie on a public lattice, their noise was drawn on it, and its scale allows for the "
    "rounding; the distance of the draws from Gaussian ones adds at most {extra:.1e} to delta. Assumed: float32 "
    "arithmetic moves the sum of clipped gradients by at most 0.04 % of the clip bound, and the cipher that the noise "
    "comes from, ChaCha12, is not broken"
)
_GUARANTEE = {
    "proved": "its noise depends only on public settings and on values already released with noise",
    "paper-only": "published without a proof: its noise is scaled to the data",
    "none": "not private",
}
_SAMPLING = {
    "poisson": "Poisson: each example is in a batch with probability {rate:g}, independently",
    "without-replacement": "batches of exactly {batch:g} examples, drawn without replacement (rate {rate:g})",
    "with-replacement": "batches of exactly {batch:g} examples, drawn with replacement (rate {rate:g})",
    "full": "none: every example is in every batch",
    "shuffle": "batches of {batch:g} cut from a shuffled data set (rate {rate:g})",
    "unknown": "not gradveil's own sampler",
}
_SEED = "the run was seeded: anyone who knows the seed can subtract the noise"
_OWN_LOSS = "each example's loss depends on that example alone"
_EARLIER = "no example's loss depends on examples of earlier batches, other than through released weights (not checked)"
_WEIGHTS = (
    "the weights at the start do not depend on these examples, or what they cost is charged beside this run; after "
    "that only releases change the weights and buffers (not checked)"
)
_DRAWN = (
    "each step is taken on the batch that was drawn for it: its number of rows is checked, and the loader's own "
    "tensors of an earlier batch are refused; copies of other rows would not be noticed"
)
_FROM_ARGUMENTS = (
    "a whole step is checked from run_step's arguments on: that the data set, the collate_fn and the loop before it "
    "keep examples apart is not"
)
_POWER_CUT = "a power cut may lose the records of the last second of training; durability='fsync' closes that"
_SYNCED = "every record is on disk before its release is used (durability='fsync')"
# What no check of the model and the loss sees.
_BEFORE = "what happens before the model, targets, or outputs that reach the loss in other ways"


def _row(label: str, text: str) -> str:
    return textwrap.fill(
        text,
        width=_WIDTH,
        initial_indent=f"{label and label + ':':<{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "infinite"


def _told(value: object, printed: Callable[[float], str] = _number) -> str:
    """A number of an audit.json, where infinity is "inf"."""
    return printed(float(value)) if isinstance(value, int | float) or value == "inf" else "unknown"


def _evidence(checks: Mapping[str, int] | None) -> str:
    """What was checked of the independence of examples, and what was not."""
    batches = 0 if checks is None else checks.get("batches", 0)
    if checks is None or not batches:
        return "not checked"
    of = max(batches, checks.get("of", 0))  # a batch may have been checked whose release a crash cut off
    text = f"checked on {batches} of {_count(of, 'batch')}"
    whole = checks.get("whole_step", 0)
    if whole >= batches:
        return f"{text} (whole step)"
    parts = [name for name in ("model", "loss") if checks.get(name)]
    missed = _BEFORE if "loss" in parts else f"the loss, {_BEFORE}"
    only = f"{' and '.join(parts) or 'nothing'} only; not {missed}"
    return f"{text} ({only})" if not whole else f"{text} (the whole step on {whole}; on the others {only})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """Three epsilons that are never merged: ``proved``, ``paper`` (as published), ``audited``.

    ``proved`` is under the neighbours that suit the sampler, ``proved_other`` under the other ones; ``proved_if_fixed``
    is what ``proved`` would be had it been fixed in advance to stop where the run did, None if that is the same.
    ``paper`` is empty for a run without noise. ``audited`` is what an audit.json holds, None until an audit was run.
    ``checks`` counts the batches on which the independence of examples was checked ("batches", "of", "whole_step",
    "model", "loss"). ``durability`` is that of the ledger.
    """

    header: RunHeader
    steps_taken: int
    steps_recovered: int
    proved: ProvedEpsilon
    proved_other: ProvedEpsilon
    paper: Mapping[str, PaperEpsilon]
    audited: Mapping[str, Any] | None = None
    proved_if_fixed: ProvedEpsilon | None = None
    last_step: int = 0
    checks: Mapping[str, int] | None = None
    durability: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: an infinite epsilon is the string "inf", with its reason beside it."""
        header = self.header
        return {
            "strategy": header.strategy,
            "guarantee": header.guarantee,
            "unit": "one example",
            "population": header.population,
            "sampler": header.sampling,
            "sample_rate": header.sample_rate,
            "expected_batch_size": header.expected_batch_size,
            "groups": list(header.groups),
            "steps_declared": header.steps,
            "steps_taken": self.steps_taken,
            "steps_recovered": self.steps_recovered,
            "stopping": header.stopping,
            "seeded": header.seeded,
            "delta": self.proved.delta,
            "neighbours": self.proved.neighbours,
            "accountant": self.proved.accountant,
            "trust_model": _TRUST,
            "covers": self._covers(),
            "not_covered": list(self.not_covered),
            "floating_point": {"covered": is_covered(self.header), "extra_delta": self.extra_delta},
            "largest_success_of_a_membership_test": self.membership_success,
            "proved": self.proved.to_dict(),
            "proved_other": self.proved_other.to_dict(),
            "proved_if_fixed": None if self.proved_if_fixed is None else self.proved_if_fixed.to_dict(),
            "assumes": list(self.assumptions),
            "checks": None if self.checks is None else dict(self.checks),
            "durability": self.durability,
            "paper": {name: value.to_dict() for name, value in self.paper.items()},
            "paper_is_a_guarantee": False,
            "audited": None if self.audited is None else dict(self.audited),
        }

    @property
    def membership_success(self) -> float | None:
        """No test for one example is right more often than this, at even odds; None where nothing is proved.

        (e^epsilon + delta) / (e^epsilon + 1): epsilon and delta bound the total variation distance.
        """
        epsilon, delta = self.proved.epsilon, self.proved.delta
        if not math.isfinite(epsilon):
            return None
        return min(1.0, (1.0 + delta * math.exp(-epsilon)) / (1.0 + math.exp(-epsilon)))

    @property
    def extra_delta(self) -> float:
        """What the finite precision of the noise adds to delta; 0 where it is not covered at all."""
        return extra_delta(self.header, self.proved.epsilon, steps=max(self.header.steps, self.proved.steps_charged))

    @property
    def not_covered(self) -> tuple[str, ...]:
        return _NOT_COVERED if is_covered(self.header) else (*_NOT_COVERED[:-1], _FLOATING, _NOT_COVERED[-1])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the proof takes for granted, with the evidence there is for it; empty where nothing is proved."""
        if not math.isfinite(self.proved.epsilon):
            return ()
        notes = [note for note in self.proved.assumptions if note not in (UNIT, NOT_COVERED)]
        found = [f"{_OWN_LOSS}: {_evidence(self.checks)}", *notes, _EARLIER, _WEIGHTS, _DRAWN]
        if self.checks is not None and self.checks.get("whole_step", 0):
            found.append(_FROM_ARGUMENTS)
        declared = 0 if self.checks is None else self.checks.get("public", 0)
        if declared:
            found.append(
                f"what ran under engine.public_data() was public: declared {_count(declared, 'time')}, not noised"
            )
        if self.durability is not None:
            found.append(_SYNCED if self.durability == "fsync" else _POWER_CUT)
        return tuple(found)

    def _covers(self) -> str:
        return _COVERS if math.isfinite(self.proved.epsilon) else "nothing: no finite epsilon is proved"

    def meaning(self) -> str:
        success = self.membership_success
        if success is None:
            return "there is no proved limit on what can be learned about one example."
        question = "whether one example was used" if self.proved.neighbours == "add-remove" else "which of two was used"
        limit = percent_at_most(success)
        if limit is None:
            return f"a test for {question} that is right in more than 99.9 % of cases, at even odds, is not ruled out."
        return f"no test for {question} is right in more than {limit} % of cases, at even odds."

    def _proved_text(self, proved: ProvedEpsilon) -> str:
        if not math.isfinite(proved.epsilon):
            if proved is not self.proved and proved.reason == self.proved.reason:
                return f"infinite under {proved.neighbours} too, for the same reason."
            return f"infinite under {proved.neighbours}, because {proved.reason}."
        if proved.steps_charged == 0:
            return f"epsilon = 0 under {proved.neighbours}: nothing was released yet."
        return (
            f"epsilon = {at_most(proved.epsilon)} at delta = {proved.delta:g} under {proved.neighbours} "
            f"({proved.accountant}, {_count(proved.steps_charged, 'step')} charged)."
        )

    def _charged_text(self) -> str | None:
        """Why more steps are charged than were taken, or fewer than declared; None where neither is so."""
        proved, fixed = self.proved, self.proved_if_fixed
        if proved.filter is not None:
            return self._filter_text(proved.filter)
        charged = f"{_count(proved.steps_charged, 'step')}: "
        if proved.at_budget:
            charged += f"as many as the budget of epsilon = {self.header.plan['budget']:g} affords"
        elif fixed is not None:
            charged += "all declared steps"
        else:
            return None
        if fixed is None:
            return f"{charged}, of {self.header.steps} declared."
        taken = f"{self.steps_taken} {'was' if self.steps_taken == 1 else 'were'} taken"
        return (
            f"{charged}, because training may have stopped on released values; {taken}. Had it been fixed in advance "
            f"to stop at step {self.last_step}: epsilon = {at_most(fixed.epsilon)}."
        )

    def _filter_text(self, facts: Mapping[str, Any]) -> str | None:
        """The theorem behind the epsilon of a run with a privacy filter, and what the theorem costs."""
        fixed = self.proved_if_fixed
        if fixed is None:
            return None
        return (
            f"the whole budget of a {facts['theorem']}: sigma, clip bounds and the last step may have been chosen from "
            f"released values. {facts['granted'] / facts['budget']:.0%} of its budget was granted. Had the same "
            f"{_count(self.steps_taken, 'step')} been fixed in advance: epsilon = {at_most(fixed.epsilon)} "
            f"({fixed.accountant})."
        )

    def _paper_text(self) -> str:
        if not self.paper:
            return "nothing: there is no noise to account for."
        values = ", ".join(f"{name} {_number(p.epsilon)}" for name, p in self.paper.items())
        spent = max(p.delta_total for p in self.paper.values())
        delta = next(iter(self.paper.values())).delta_nominal
        text = f"{values}; quoted at delta = {delta:g}"
        if spent > delta * 1.001:
            text += f", but the composition methods really spend up to {spent:.3g}"
        for warning in dict.fromkeys(w for p in self.paper.values() for w in p.warnings):
            text += f". zCDP and MA: {warning}"
        return text + "."

    def _audited_text(self) -> str:
        found = self.audited
        if found is None:
            return "not run."
        unit = found.get("unit", "the run")
        text = f"epsilon of {unit} is at least {_told(found.get('epsilon_lower_bound'), at_least)}"
        if "delta" in found:
            text += f" at delta = {_told(found['delta'])}"
        if "confidence" in found:
            text += f" with confidence {_told(found['confidence'])}"
        how = [str(found[name]) for name in ("statistic", "method") if name in found]
        if "trials" in found:
            how.append(f"{found['trials']} trials")
        text += f" ({', '.join(how)})." if how else "."
        if "epsilon_proved" in found:
            text += f" Proved for {unit}: {_told(found['epsilon_proved'], at_most)}."
        if "verdict" in found:
            text += f" Verdict: {found['verdict']}."
        return text + " A lower bound can refute, never prove."

    def __str__(self) -> str:
        header = self.header
        sampling = _SAMPLING.get(header.sampling, header.sampling).format(
            batch=header.expected_batch_size, rate=header.sample_rate
        )
        steps = f"{self.steps_taken} taken of {header.steps} declared"
        if self.steps_recovered:
            steps += f"; {_count(self.steps_recovered, 'line')} recovered after a crash, counted as spent"
        rows = [
            _row("Protected", _UNIT[self.proved.neighbours]),
            _row("Strategy", f"{header.strategy}: {_GUARANTEE.get(header.guarantee, header.guarantee)}"),
            _row("Trust", _TRUST),
            _row("Covers", self._covers()),
            _row("Sampling", sampling),
            _row("Data", f"N = {header.population}; {_count(len(header.groups), 'clipping group')}"),
            _row("Steps", steps),
            _row("Delta", f"{self.proved.delta:g}"),
            "",
            _row("Proved", self._proved_text(self.proved)),
            _row("  otherwise", self._proved_text(self.proved_other)),
            *([] if (charged := self._charged_text()) is None else [_row("  charged", charged)]),
            _row("Meaning", self.meaning()),
            _row("As published", "not a guarantee: " + self._paper_text()),
            _row("Audited", self._audited_text()),
            "",
        ]
        rows += [_row("" if i else "Assumes", note) for i, note in enumerate(self.assumptions)]
        if header.seeded and not self.assumptions:
            rows.append(_row("Seed", _SEED))
        if is_covered(header) and self.assumptions:
            rows.append(_row("Floating point", _LATTICE.format(extra=self.extra_delta)))
        rows += [_row("" if i else "Not covered", note) for i, note in enumerate(self.not_covered)]
        return "\n".join(row.rstrip() for row in rows)


def is_noised(header: RunHeader, releases: Sequence[Release]) -> bool:
    """Whether the published formulas have anything to work on: noise at every step."""
    sigmas = np.asarray(sigmas_of(releases), dtype=float)
    return header.guarantee != "none" and bool(np.all(np.isfinite(sigmas) & (sigmas > 0)))


def statement(
    header: RunHeader,
    releases: Sequence[Release],
    *,
    delta: float | None = None,
    audited: Mapping[str, Any] | None = None,
    checks: Mapping[str, int] | None = None,
    durability: str | None = None,
) -> Statement:
    """The statement of a run, computed from its records alone. No releases: epsilon 0.

    ``audited`` is stated beside what is proved. ``checks`` is the evidence, counted by the engine, that each example's
    loss depends on that example alone: on how many "batches" of how many ("of") it was checked, and of those on how
    many for the "whole_step", the "model" and the "loss". ``durability`` is by default what the header's plan says.
    """
    neighbours, accountant = default_view(header.sampling)
    other_neighbours: Neighbours = "replace-one" if neighbours == "add-remove" else "add-remove"
    proved = proved_epsilon(header, releases, delta=delta, neighbours=neighbours, accountant=accountant)
    fixed: ProvedEpsilon | None = None
    if math.isfinite(proved.epsilon) and (proved.filter or proved.steps_charged > len(releases)) and releases:
        fixed = proved_epsilon(
            header, releases, delta=delta, neighbours=neighbours, accountant=accountant, charge="taken"
        )
    return Statement(
        header=header,
        steps_taken=len(releases),
        steps_recovered=sum(r.recovered * count for r, count in kinds(releases)),
        proved=proved,
        proved_other=proved_epsilon(header, releases, delta=delta, neighbours=other_neighbours, accountant=accountant),
        paper=from_releases(header, releases, delta=delta) if is_noised(header, releases) else {},
        audited=audited,
        proved_if_fixed=fixed,
        last_step=releases[-1].step + 1 if releases else 0,
        checks=checks,
        durability=header.plan.get("durability") if durability is None else durability,
    )


def statement_of(
    contents: Contents, *, delta: float | None = None, audited: Mapping[str, Any] | None = None
) -> Statement:
    """The statement of a ledger that was read and verified, with the checks that it records.

    A half-written last line is charged.
    """
    checks = checks_of(contents.notes, batches=len(contents.releases))
    return statement(contents.header, contents.charged(), delta=delta, audited=audited, checks=checks)
