"""How many further charges a budget affords: the search behind budgets, and behind what a run with one is charged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gradveil.accounting._compose import Accountant, Charge, Neighbours, composed_epsilon, why_no_bound


def largest(epsilon_after: Callable[[int], float], low: int, high: int, budget: float) -> int:
    """Largest n in [low, high) with epsilon_after(n) <= budget; low is known to fit and high not to.

    Interpolates on epsilon^2 (nearly linear in the number of steps) with a few steps of margin, and
    bisects where that does not shrink the interval.
    """
    at_low, at_high = epsilon_after(low), epsilon_after(high)
    guess_turn = True
    while high - low > 1:
        n = (low + high) // 2
        if guess_turn and math.isfinite(at_high) and at_high > at_low:
            share = (budget**2 - at_low**2) / (at_high**2 - at_low**2)
            n = min(high - 1, max(low + 1, low + math.floor(share * (high - low))))
        value = epsilon_after(n)
        shrunk = (high - n) if value <= budget else (n - low)
        guess_turn = not guess_turn or shrunk <= (high - low) // 4
        if value <= budget:
            low, at_low = n, value
        else:
            high, at_high = n, value
    return low


def affordable(
    spent: Sequence[Charge],
    planned: Sequence[Charge],
    *,
    budget: float,
    delta: float,
    neighbours: Neighbours,
    accountant: Accountant,
) -> int:
    """The largest n such that ``spent`` and the first n of ``planned`` compose to at most epsilon ``budget``.

    0 if ``spent`` is over the budget by itself, or if any of the charges has no bound under this view.
    """
    if any(why_no_bound(m, neighbours, accountant) for m in dict.fromkeys(m for m, _ in (*spent, *planned))):
        return 0
    known: dict[int, float] = {}

    def epsilon_after(n: int) -> float:
        if n not in known:
            charges = [*spent, *planned[:n]]
            known[n] = composed_epsilon(charges, delta=delta, neighbours=neighbours, accountant=accountant)
        return known[n]

    total = len(planned)
    if epsilon_after(total) <= budget:
        return total
    if epsilon_after(min(1, total)) > budget:  # the usual answer for a run that was held to its budget
        return 0
    return largest(epsilon_after, 1, total, budget)
