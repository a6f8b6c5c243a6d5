"""From charged steps to one epsilon: which bounds exist for which sampler, and their composition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from gradveil.accounting._pld import FIXED_SIZE, Mechanism
from gradveil.accounting._pld_fft import Part, pld_epsilon, resolves
from gradveil.accounting._quantize import Array, cells
from gradveil.accounting._rdp import (
    PROVED_ORDERS,
    WHOLE_ORDERS,
    rdp_poisson,
    rdp_without_replacement,
    tight_epsilon,
)
from gradveil.errors import UnknownNameError
from gradveil.mechanism.records import UNPROVED_SAMPLINGS

Neighbours = Literal["add-remove", "replace-one"]
Accountant = Literal["PLD", "RDP"]
Charge = tuple[Mechanism, float]

_ROUGH_ORDERS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)

SAMPLERS = ("poisson", "full", *FIXED_SIZE, *UNPROVED_SAMPLINGS)


def default_view(sampler: str) -> tuple[Neighbours, Accountant]:
    """The neighbours and the accountant that a statement leads with.

    >>> default_view("poisson"), default_view("without-replacement")
    (('add-remove', 'PLD'), ('replace-one', 'PLD'))
    """
    return ("replace-one", "PLD") if sampler in FIXED_SIZE else ("add-remove", "PLD")


def check_view(neighbours: str, accountant: str) -> None:
    """Refuse an unknown neighbouring relation or accountant."""
    if neighbours not in ("add-remove", "replace-one"):
        raise UnknownNameError("neighbouring relation", neighbours, ["add-remove", "replace-one"])
    if accountant not in ("PLD", "RDP"):
        raise UnknownNameError("accountant", accountant, ["PLD", "RDP"])


def why_no_bound(mechanism: Mechanism, neighbours: Neighbours, accountant: Accountant) -> str | None:
    """Why this sampler has no finite bound under these neighbours and this accountant; None if it has."""
    sampler = mechanism.sampler
    if sampler in UNPROVED_SAMPLINGS:
        return UNPROVED_SAMPLINGS[sampler]
    if sampler in ("poisson", "full"):
        return None
    if sampler not in FIXED_SIZE:
        return f"no bound is known for the sampler {sampler!r}. Use Poisson sampling"
    if neighbours == "add-remove":
        return (
            f"batches of a fixed size (sampler {sampler!r}) fix the number of examples, so adding or "
            "removing one is not defined for them. Ask for replace-one, or use Poisson sampling"
        )
    if not 0 < mechanism.batch_size <= mechanism.population and sampler == "without-replacement":
        return (
            f"a batch of {mechanism.batch_size} cannot be drawn without replacement from "
            f"{mechanism.population} examples, so the records do not describe the sampling"
        )
    if mechanism.batch_size < 1 or mechanism.population < 1:
        return f"the records give no whole batch size and population for the sampler {sampler!r}"
    if sampler == "with-replacement" and accountant == "RDP":
        return "sampling with replacement has no RDP bound here. Ask for the PLD accountant"
    return None


def parts_of(charges: Iterable[Charge], **limits: int) -> tuple[Part, ...]:
    """``charges`` with near-equal multipliers grouped, to the safe side (:mod:`gradveil.accounting._quantize`)."""
    by_mechanism: dict[Mechanism, list[float]] = {}
    for mechanism, z in charges:
        by_mechanism.setdefault(mechanism, []).append(z)
    return tuple((m, z, count) for m, zs in by_mechanism.items() for z, count in cells(zs, **limits))


def rough_epsilon(parts: Iterable[Part], *, replace: bool, delta: float) -> float:
    """The size of epsilon, to choose a grid by; it never falls when a step is added."""
    total = np.zeros(len(_ROUGH_ORDERS))
    for mechanism, z, count in parts:
        fixed = mechanism.sampler in FIXED_SIZE  # nearly a Poisson step of twice the sensitivity
        one = rdp_poisson(mechanism.rate, z / 2 if fixed else z, _ROUGH_ORDERS, replace and not fixed)
        total = total + count * one
    return tight_epsilon(_ROUGH_ORDERS, total, delta)


def usable_accountant(charges: Sequence[Charge], *, delta: float, accountant: Accountant) -> Accountant:
    """``accountant``, or RDP where ``delta`` is so small that rounding could hide in a PLD's tail."""
    return accountant if resolves(delta, len(charges)) else "RDP"


def composed_epsilon(
    charges: Sequence[Charge], *, delta: float, neighbours: Neighbours, accountant: Accountant
) -> float:
    """Epsilon at ``delta`` of all ``charges``; each must have a bound (:func:`why_no_bound`) and z > 0.

    Guaranteed: an upper bound (for the PLD with a measured, not proved, margin for the rounding of
    Fourier transforms: :mod:`gradveil.accounting._pld_fft`); it never falls when a charge is added. Where
    delta is too small for that margin, the RDP bound stands in; infinity where there is none.
    """
    if usable_accountant(charges, delta=delta, accountant=accountant) != accountant:
        accountant = "RDP"
        if any(why_no_bound(m, neighbours, accountant) for m in dict.fromkeys(m for m, _ in charges)):
            return math.inf
    if not charges:
        return 0.0
    limits = {} if accountant == "PLD" else renyi_steps(dict.fromkeys(m for m, _ in charges), neighbours)[2]
    return _parts_epsilon(parts_of(charges, **limits), delta, neighbours, accountant)


@lru_cache(maxsize=64)  # a statement, and the search for what a budget affords, ask for the same ones again
def _parts_epsilon(parts: tuple[Part, ...], delta: float, neighbours: Neighbours, accountant: Accountant) -> float:
    if accountant == "PLD":
        replace = neighbours == "replace-one"
        size = rough_epsilon(parts, replace=replace, delta=delta)
        return pld_epsilon(parts, replace=replace, delta=delta, size=size)
    orders, rdp_of, _ = renyi_steps(dict.fromkeys(m for m, _, _ in parts), neighbours)
    total = np.zeros(len(orders))
    for mechanism, z, count in parts:
        total = total + count * rdp_of(mechanism, z)
    return tight_epsilon(orders, total, delta)


def renyi_steps(
    mechanisms: Iterable[Mechanism], neighbours: Neighbours
) -> tuple[tuple[float, ...], Callable[[Mechanism, float], Array], dict[str, int]]:
    """The orders for steps drawn so, the divergence of one step at them, and how finely to group multipliers."""
    slow = any(m.sampler in FIXED_SIZE for m in mechanisms)
    orders = WHOLE_ORDERS if slow else PROVED_ORDERS

    def rdp_of(mechanism: Mechanism, z: float) -> Array:
        if mechanism.sampler == "without-replacement":
            return rdp_without_replacement(mechanism.population, mechanism.batch_size, z, orders)
        return rdp_poisson(mechanism.rate, z, orders, neighbours == "replace-one")

    # The RDP of fixed-size sampling costs .2 s a cell: fewer, coarser cells.
    return orders, rdp_of, ({"exact_limit": 8, "cell_limit": 32} if slow else {})
