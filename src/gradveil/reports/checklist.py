"""What an auditor asks of a run, answered from its facts; and what was not tested, in words."""

from __future__ import annotations

import contextlib
import math
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradveil.accounting import files
from gradveil.accounting._rounding import at_most
from gradveil.accounting.finite_precision import is_covered
from gradveil.errors import DataError
from gradveil.mechanism.records import RunHeader
from gradveil.reports.charts import label, must_withhold
from gradveil.reports.facts import PICTURES, RunFacts
from gradveil.training.run_directory import RunDirectory

Answer = Literal["satisfied", "open", "not applicable"]

# As in gradveil.attacks.trial and .observation, which need torch; a test holds them equal.
ATTACKS = ("cpl", "dlg", "idlg", "inverting", "map", "analytic", "prior")
VIEWS = ("per-example", "per-example-noised", "batch")
KNOWING = ("map", "prior")  # the attacks that use everything that is public about the defence
_OF_THE_LEDGER = ("Unit of protection", "Neighbours", "Sampler", "Delta", "Accounting", "Noise scale", "Stopping rule")


@dataclass(frozen=True, kw_only=True)
class Item:
    """``open`` means: not shown here. Somebody has to look, or to decide."""

    name: str
    answer: Answer
    evidence: str


def checklist(run: RunFacts) -> list[Item]:
    """Every item, whatever the run is; what does not apply to it says so."""
    if run.contents is None:
        ledger = _item("Ledger verified", "open", run.ledger_problem or "There is no ledger: nothing was released yet.")
        unknown = "Unknown without a valid ledger."
        return [ledger, *(_item(name, "open", unknown) for name in _OF_THE_LEDGER), *_always(run)]
    header = run.contents.header
    if header.guarantee == "none":
        none = "The run is not private: nothing is protected."
        return [_ledger(run), *(_item(name, "not applicable", none) for name in _OF_THE_LEDGER), *_always(run)]
    return [
        _ledger(run),
        _item("Unit of protection", "satisfied", "Stated: one example, that is one row of the data set."),
        _item(
            "Several rows of one person",
            "open",
            "If a person has several rows, or rows were copied or augmented before training, the epsilon of one row "
            "does not hold for the person. The run directory does not say whether this is the case.",
        ),
        _neighbours(run),
        _sampler(run),
        _delta(header),
        _accounting(run),
        _noise(run),
        _stopping(run),
        *_always(run),
    ]


def _item(name: str, answer: Answer, evidence: str) -> Item:
    return Item(name=name, answer=answer, evidence=evidence)


def _ledger(run: RunFacts) -> Item:
    assert run.contents is not None
    against = " and the newest checkpoint" if RunDirectory(run.path).list_checkpoints() else ""
    told = f"{run.contents.length} lines; every hash was recomputed and matches the chain{against}."
    torn = " A crash cut off one more line, which is charged." if run.contents.torn else ""
    return _item("Ledger verified", "satisfied", told + torn)


def _neighbours(run: RunFacts) -> Item:
    assert run.statement is not None
    first, other = run.statement.proved, run.statement.proved_other
    told = f"Stated: {first.neighbours}, which fits the sampler; {other.neighbours} is reported separately."
    return _item("Neighbours", "satisfied", told)


def _sampler(run: RunFacts) -> Item:
    assert run.contents is not None
    header = run.contents.header
    strange = [r for r in run.contents.releases if r.sampler != header.sampling]
    if strange:
        other = ", ".join(sorted({r.sampler for r in strange}))
        told = f"{len(strange)} step(s) were not drawn as declared ({header.sampling}), but by: {other}."
        return _item("Sampler", "open", told)
    if header.sampling in ("shuffle", "unknown"):
        return _item("Sampler", "open", f"{header.sampling}: no bound is proved for this sampler.")
    told = f"Every step was drawn by gradveil's own sampler: {header.sampling}, rate {header.sample_rate:.4g}."
    return _item("Sampler", "satisfied", told)


def _delta(header: RunHeader) -> Item:
    limit = 1 / header.population
    told = f"delta = {label(header.delta)}, N = {header.population}, 1/N = {limit:.3g}"
    if header.delta < limit:
        return _item("Delta", "satisfied", f"{told}: delta is below 1/N.")
    return _item("Delta", "open", f"{told}: delta is not below 1/N, so publishing a random row would satisfy it.")


def _accounting(run: RunFacts) -> Item:
    assert run.statement is not None
    proved = run.statement.proved
    if not math.isfinite(proved.epsilon):
        return _item("Accounting", "open", f"No finite epsilon is proved, because {proved.reason}.")
    groups = len(run.statement.header.groups)
    jointly = f" the {groups} clipping groups jointly," if groups > 1 else ""
    told = f"{proved.accountant} over {proved.steps_charged} steps,{jointly} repeated and recovered steps included."
    return _item("Accounting", "satisfied", told)


def _noise(run: RunFacts) -> Item:
    assert run.contents is not None
    follows = sum(not r.scale_is_public for r in run.contents.releases)
    if follows:
        told = f"In {follows} of {len(run.contents.releases)} steps the noise was scaled to the private batch (l2-max)."
        return _item("Noise scale", "open", f"{told} The noise scale reveals the data, so no epsilon holds.")
    if must_withhold(run):
        told = "The noise does not depend on the data, but the S_t in the ledger do: do not publish the ledger."
        return _item("Noise scale", "open", told)
    return _item(
        "Noise scale",
        "satisfied",
        "In every step a function of public settings and of values already released with noise.",
    )


def _stopping(run: RunFacts) -> Item:
    assert run.statement is not None
    header, proved, fixed = run.statement.header, run.statement.proved, run.statement.proved_if_fixed
    if header.stopping == "public":
        told = "The run declares that stopping did not depend on private data. Nothing here shows that."
        return _item("Stopping rule", "open", told)
    if proved.filter is not None:
        told = f"Training may stop on released values: charged the whole budget of a {proved.filter['theorem']}."
        return _item("Stopping rule", "satisfied", told)
    if proved.at_budget:
        told = f"Limited by its budget: charged for the {proved.steps_charged} steps that it allows, taken or not."
        return _item("Stopping rule", "satisfied", told)
    if header.stopping == "private" or fixed is not None:
        told = f"Training may stop on released values: all {header.steps} declared steps are charged, taken or not."
        return _item("Stopping rule", "satisfied", told)
    return _item("Stopping rule", "not applicable", "Training did not stop before its last declared step.")


def _always(run: RunFacts) -> Iterable[Item]:
    private = run.contents is None or run.contents.header.guarantee != "none"
    if private:
        yield _tuning(run)
        yield _item(
            "Metrics of the training data",
            "open" if any(m.get("loss") is not None for m in run.metrics) else "not applicable",
            "metrics.jsonl and this page contain the training loss, which no epsilon covers."
            if any(m.get("loss") is not None for m in run.metrics)
            else "None was recorded.",
        )
        yield _seeds(run)
        covered = run.contents is not None and is_covered(run.contents.header)
        yield _item(
            "Floating point",
            "satisfied" if covered else "open",
            "What is released lies on a public lattice, and how far the noise on it is from Gaussian is charged in "
            "addition to delta; that float32 arithmetic moves sums of clipped gradients by little is assumed."
            if covered
            else "The noise is drawn in finite precision and is Gaussian only nearly; what its last bits tell is not "
            "covered.",
        )
        yield _item("Side channels", "open", "Such as the time a step takes: not covered.")
    yield _access(run)


def _tuning(run: RunFacts) -> Item:
    name, path = "Hyper-parameter tuning", run.path / "tune.json"
    if run.bound(path):
        with contextlib.suppress(DataError):
            told = files.read_object(path)
            spent = files.number_or_none(told.get("epsilon"))
            if spent is not None:
                return _item(
                    name,
                    "satisfied",
                    f"Chosen by gradveil tune, and charged: epsilon = {at_most(spent)} with the search "
                    f"({told.get('theorem')}), given that {told.get('assumes')}.",
                )
    stated = run.about.get("tuning")
    said = f"Stated, not checked: {stated}. " if stated else "Not declared in the run directory. "
    return _item(name, "open", f"{said}Each run that was tried on the same data spent its own epsilon.")


def _seeds(run: RunFacts) -> Item:
    if run.contents is None:
        return _item("Seed", "open", "Unknown without a valid ledger.")
    if not run.contents.header.seeded:
        return _item("Seed", "satisfied", "None: noise and samples came from the operating system's entropy.")
    return _item(
        "Seed",
        "open",
        "The run was seeded. Anyone who knows or guesses the seed can subtract the noise; nothing shows that it stayed "
        "secret and was used once.",
    )


def _access(run: RunFacts) -> Item:
    """File modes only: what secret.json holds is never read."""
    files = RunDirectory(run.path)
    told, wide = [], []
    for path, may_be_read in ((files.ledger, True), (files.secret, False), *_picture_files(run)):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError:
            continue
        told.append(f"{path.relative_to(run.path)} {mode:04o}")
        if mode & (0o022 if may_be_read else 0o077):
            wide.append(str(path.relative_to(run.path)))
    if not told:
        return _item("Access to files", "not applicable", "There is no ledger and no secret.")
    if wide:
        verb = "is" if len(wide) == 1 else "are"
        open_to = (
            f"{' and '.join(wide)} {verb} accessible to others: a ledger they can write, or a secret they can read"
        )
        return _item("Access to files", "open", f"{'; '.join(told)}. {open_to}.")
    return _item(
        "Access to files",
        "satisfied",
        f"{'; '.join(told)}. Only the owner can write the ledger"
        + (" or read the secret." if files.secret.exists() else "; there is no seed on disk."),
    )


def _picture_files(run: RunFacts) -> list[tuple[Path, bool]]:
    return [(folder / PICTURES, False) for folder in dict.fromkeys(a.folder for a in run.attacks)]


def not_tested(run: RunFacts) -> list[str]:
    """What the attacks and the audit of this run leave open, in words."""
    found: list[str] = []
    if not run.attacks:
        found.append("No attack was run, so resistance to attacks is not shown. Run: gradveil attack RUN.")
    else:
        found += _attacks_left(run)
    if run.audit is None:
        found.append("No audit was run, so the implementation was not tested on this run. Run: gradveil audit RUN.")
    else:
        unit = run.audit.get("unit", "a whole run")
        found.append(
            f"The audit tested for a leak of {unit}, on its own data, with the statistics it names. A leak that these "
            "do not show would not be found."
        )
    found.append(
        "Attacks on the finished model (membership inference, extraction, attribute inference) are not on this page."
    )
    if run.state not in ("finished", "ledger invalid") and run.contents is not None and run.contents.ended is None:
        found.append("The run has not finished: later releases are not on this page.")
    return found


def _attacks_left(run: RunFacts) -> Iterable[str]:
    tried = {a.name for a in run.attacks}
    if missing := [name for name in ATTACKS if name not in tried]:
        yield f"Attacks not run: {', '.join(missing)}."
    if run.is_private and not tried & set(KNOWING):
        yield (
            "No attack used knowledge of the defence. Attacks without it (cpl, dlg) fail even on gradients that are "
            "only clipped, so this defence has hardly been tested: run map."
        )
    views = {str(_setting(run, i, "view")) for i in range(len(run.attacks))}
    if unseen := [view for view in VIEWS if view not in views]:
        yield f"Views not tried: {', '.join(unseen)}. Tried: {', '.join(sorted(views))}."
    if all(_setting(run, i, "steps_seen") in (None, 1) for i in range(len(run.attacks))):
        yield "No attack observed more than one step; an example in many steps is released many times."
    if all(_setting(run, i, "batch") in (None, 1) for i in range(len(run.attacks))):
        yield "Only gradients of single examples were attacked, no batches."
    steps: Sequence[int] = sorted(
        {s for i in range(len(run.attacks)) if isinstance(s := _setting(run, i, "step"), int)}
    )
    if steps:
        yield f"Only releases at step {', '.join(map(str, steps))} were attacked."
    victims = max(
        (v for i in range(len(run.attacks)) if isinstance(v := _setting(run, i, "victims"), int)), default=None
    )
    if victims is not None:
        yield f"At most {victims} victims were attacked: leaks that affect fewer than one in {victims} may be missed."


def _setting(run: RunFacts, index: int, name: str) -> object:
    return run.attacks[index].trial["settings"].get(name)
