"""The first screen of the page: for each run, in plain words, whether it is private, how much, and what came back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradveil.accounting._rounding import at_most
from gradveil.reports.facts import AttackFacts, RunFacts

# Ponomareva et al., "How to DP-fy ML" (2023): what a proved epsilon is worth, for one example added or removed.
TIERS = (
    (1.0, "strong", "tier 1: strong formal guarantee"),
    (10.0, "reasonable", "tier 2: reasonable guarantee"),
    (math.inf, "weak", "tier 3: weak guarantee"),
)
_RECOGNISABLE = 20.0  # dB: from here on, small pictures look like the original
_INVALID = "What was released cannot be told: the records were damaged, changed or mixed up."
ABOUT = {
    "purpose": "Purpose",
    "data": "Data",
    "unit": "Unit of privacy",
    "tuning": "Tuning runs on the same data",
    "owner": "Who answers for it",
    "sign_off": "Sign-off",
}

GLOSSARY = {
    "differential privacy": "A promise about the training algorithm: what it releases is nearly as likely with any one "
    "example as without it. So nobody who sees the result learns much about whether that example was used, or what "
    "it held.",
    "epsilon": "How near 'nearly' is: with and without one example, the chance of any result differs by a factor of at "
    "most e^epsilon, up to delta. 0 is perfect; 1 is strong; above 10 little is promised.",
    "delta": "The chance with which the promise may fail. It should be far below one over the number of examples.",
    "proved, as published, audited": "A proved epsilon is an upper bound that follows from the record. A published "
    "one comes from a formula in a paper and promises nothing here. An audited one is a lower bound that was measured.",
    "mu (Gaussian DP)": "Another measure of the same: telling whether one example was used is at least as hard as "
    "telling two bell curves apart whose means differ by mu standard deviations (at false-positive rates of "
    "0.01 to 50 %).",
    "true-positive rate": "Of the examples that were used, the share that a test finds, if it wrongly accuses a given "
    "share of those that were not (the false-positive rate).",
    "neighbours": "Which two data sets are compared: one example added or removed (add-remove), or its content "
    "replaced (replace-one).",
    "clip bound, sigma": "Each example's gradient is cut to the clip bound C; then noise of sigma times C is added to "
    "their sum. More noise is more private.",
    "gradient": "The direction in which one training step moves the model. Without noise it can give the example away.",
    "reconstruction, PSNR": "An attack that computes the example back from its gradient. PSNR, in decibels (dB), says "
    "how near it comes: 10 is a blur, from about 20 on one recognises the picture, 30 is a copy.",
    "ledger": "The record that training writes before each release; every line carries the hash of the one before it.",
    "bound": "Named in the ledger with its hash: a later change to the file is noticed.",
}


@dataclass(frozen=True, kw_only=True)
class Plain:
    """``tag`` is shown, ``kind`` colours it: strong, reasonable, weak, none. ``leak``: whether an attack succeeded."""

    kind: str
    tag: str
    private: str
    attacked: str
    leak: bool


def plain(run: RunFacts) -> Plain:
    """One run in plain words."""
    kind, tag, private = _private(run)
    attacked, leak = _attacked(run)
    return Plain(kind=kind, tag=tag, private=private, attacked=attacked, leak=leak)


def _private(run: RunFacts) -> tuple[str, str, str]:
    if run.ledger_problem is not None or run.contradictions:
        return (
            "none",
            "evidence invalid",
            "What was released cannot be told: the records were damaged, changed or mixed up.",
        )
    if run.statement is None:
        return "none", "nothing released", "Nothing was released yet."
    proved = run.statement.proved
    if run.statement.header.guarantee == "none":
        return "none", "not private", "Not private: anyone who sees the training may learn everything about an example."
    if not math.isfinite(proved.epsilon):
        return "none", "nothing proved", "No privacy is proved, although noise was added: its amount follows the data."
    if proved.steps_charged == 0:
        return "none", "nothing released", "Nothing was released yet."
    _, kind, tag = next(tier for tier in TIERS if proved.epsilon <= tier[0])
    words = {
        "strong": "Private: seeing everything that was released, one learns hardly anything about a single example.",
        "reasonable": "Private to a degree: what one can learn about a single example is limited, and not negligible.",
        "weak": "Hardly private by proof: the limit is so high that much about a single example may be learned.",
    }
    return kind, tag, words[kind]


def _attacked(run: RunFacts) -> tuple[str, bool]:
    strongest = run.strongest
    if strongest is None or strongest.psnr is None:
        tried = "The attacks that were run had no images to recover" if run.attacks else "No attack was tried on it"
        return f"{tried}, so what an attacker gets back is not known.", False
    if (why := run.misfit(strongest)) is not None:
        return f"The attack on file does not fit the run: {why}.", True
    told = f"{strongest.name} reached {strongest.psnr:.1f} dB{_guess(strongest)}"
    if leaks(strongest):
        share = strongest.result.get("success_rate")
        some = f" for {share:.0%} of the victims" if isinstance(share, float) and 0 < share < 1 else ""
        return f"An attack got training examples back{some}: {told}.", True
    guess = strongest.result.get("guess_psnr_median")
    nearer = isinstance(guess, int | float) and strongest.psnr > guess + 1.0
    what = "came nearer than a guess, but got no example back" if nearer else "got no more than a guess"
    return f"The strongest attack tried {what}: {told}. That proves nothing about others.", False


def _guess(attack: AttackFacts) -> str:
    guess = attack.result.get("guess_psnr_median")
    return f", where guessing gives {guess:.1f}" if isinstance(guess, int | float) else ""


def leaks(attack: AttackFacts) -> bool:
    """Whether an attack shows that examples come back: near enough to recognise, or nearer than any guess."""
    success = attack.result.get("success_rate")
    often = isinstance(success, int | float) and success > 0
    return bool(often or (attack.psnr or 0.0) >= _RECOGNISABLE)


def percent(share: float) -> str:
    """A bound on a rate, rounded up."""
    return f"{at_most(100 * share, digits=3)} %"
