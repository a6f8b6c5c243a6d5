"""What plain runs of the model on its first batch tell of its units, before any gradient is taken.

The model is run on the batch and on its first example alone, in eval mode and then as it is (layers may be called in
training only). From the inputs of each unit follows

- where the batch stands in them: an input of T positions and a batch of T examples look alike, but only one of them
  changes with the batch;
- whether the rows of all units are the same examples in the same order. A model that sorts its batch inside gives the
  right outputs, but an example's norm over several layers would be added up from rows of different examples. It is run
  on the batch upside down too: one that sorts cannot have the first example first in the one and last in the other.

The output of the last run on the batch is what the followed model must give as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradveil.clipping.units import Unit
from gradveil.errors import UnsupportedModelError

Shape = tuple[int, ...]


class Probe:
    """Notes the inputs of units in plain runs: of the first example alone, and then of the batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._run = ""
        self._shapes: dict[Unit, list[tuple[int, bool, Shape]]] = {}  # flat input, whether alone, and its shape
        self._alone: dict[Unit, list[Tensor]] = {}  # the first tensor of every call
        self._calls: dict[Unit, int] = {}  # in the present run
        self._moved: list[Unit] = []

    def start(self, run: str) -> None:
        """Which run comes next: "alone", "batch" or "reversed" (the batch upside down); others tell shapes only."""
        self._run, self._calls = run, {}

    def note(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """A call of a unit."""
        tensors = [(i, t) for i, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, Tensor) and t.dim() > 0]
        alone = self._run.startswith("alone")
        for i, tensor in tensors:
            self._shapes.setdefault(unit, []).append((i, alone, tuple(tensor.shape)))
        if not tensors:
            return
        first, number = tensors[0][1].detach(), self._calls.get(unit, 0)
        self._calls[unit] = number + 1
        if self._run == "alone":
            self._alone.setdefault(unit, []).append(first.clone())
        elif self._run in ("batch", "reversed") and number < len(self._alone.get(unit, ())):
            of_one, row = self._alone[unit][number], 0 if self._run == "batch" else self.batch - 1
            fits = of_one.shape == (1, *first.shape[1:]) and len(first) == self.batch
            if fits and _is_elsewhere(of_one, first, row):
                self._moved.append(unit)

    def learn(self, units: Iterable[Unit]) -> None:
        """Tell units that were called how their inputs follow the batch."""
        for unit in units:
            for i in {i for i, _, _ in self._shapes.get(unit, ())}:
                alone, together = self._shapes_of(unit, i, alone=True), self._shapes_of(unit, i, alone=False)
                if not alone or not together:
                    continue
                firsts = {shape[0] for shape in alone}, {shape[0] for shape in together}
                if firsts == ({1}, {self.batch}):
                    unit.inputs[i] = "examples"
                else:
                    unit.inputs[i] = "shared" if firsts[0] == firsts[1] and len(firsts[0]) == 1 else "other"
                dims = _batch_dims(alone, together, self.batch)
                if alone == together:
                    unit.batch_dims[i] = None
                elif len(dims) == 1:
                    unit.batch_dims[i] = dims[0]
                elif not dims and 1 in firsts[0] and self.batch in firsts[1]:
                    unit.inputs[i] = "mixed"  # some calls have the batch first, others something else
            unit.misread = self._was_misread(unit)

    def _was_misread(self, unit: Unit) -> bool:
        """Whether calls before this was known have taken something for the batch that is not."""
        if unit.rule is not None:
            return unit.inputs.get(0, "examples") != "examples" and self.batch in self.first_sizes(unit)
        known = {i: d for i, d in unit.batch_dims.items() if d is not None}
        return "mixed" in unit.inputs.values() or (bool(unit.batch_dims) and known != unit.assumed_dims)

    def first_sizes(self, unit: Unit) -> set[int]:
        """Of a unit's first input in the batch: the sizes of its first dimension."""
        return {shape[0] for shape in self._shapes_of(unit, 0, alone=False)}

    def _shapes_of(self, unit: Unit, place: int, *, alone: bool) -> set[Shape]:
        return {shape for i, by_itself, shape in self._shapes.get(unit, ()) if (i, by_itself) == (place, alone)}

    def check_rows_stay(self) -> None:
        """Refuse a model in which the first example is not where the batch has it, where norms span units or uses."""
        for unit in self._moved:
            if not unit.whole_groups or len(self._alone[unit]) > 1:
                raise UnsupportedModelError(
                    f"the rows that {unit.label} gets in a batch are not the examples in their order: the model "
                    "changes the order of the batch inside (sorting by length, say). An example's norm over several "
                    "layers, or several uses of one, would be added up from rows of different examples, and bound "
                    "nothing. Keep the order, or clip per layer."
                )


def _is_elsewhere(alone: Tensor, inputs: Tensor, row: int) -> bool:
    """Whether the first example, as it is alone, is another row of the batch than this one.

    Rounding moves it a little (more on a GPU, whose convolutions round their factors): another row must be nearer.
    """
    if alone.is_complex():
        return False
    rows = (inputs.double() - alone.double()).reshape(len(inputs), -1)
    apart = torch.linalg.vector_norm(rows, dim=1).nan_to_num(0.0)
    length = torch.linalg.vector_norm(alone.double())
    return bool((apart[row] > 1e-2 * length) & (apart.min() < 0.5 * apart[row]))


def _batch_dims(alone: set[Shape], together: set[Shape], batch: int) -> list[int]:
    """The dimensions that are 1 in every shape of one example, and the batch in every shape of the batch."""
    shapes = alone | together
    dims = range(min(map(len, shapes))) if len(set(map(len, shapes))) == 1 else range(0)
    return [d for d in dims if {s[d] for s in alone} == {1} and {s[d] for s in together} == {batch}]
