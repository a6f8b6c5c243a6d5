"""What plain runs of the model on its first batch tell of its units, before any gradient is taken.

The model is run on the batch and on its first example alone, in eval mode and then as it is (layers may be called in
training only). From the inputs of each unit follows

- where the batch stands in them: an input of T positions and a batch of T examples look alike, but only one of them
  changes with the batch;
- whether the rows of all units are the same examples in the same order. A model that sorts its batch inside gives the
  right outputs, but an example's norm over several layers would be added up from rows of different examples.

The output of the last run on the batch is what the followed model must give as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradveil.clipping.units import Unit
from gradveil.errors import UnsupportedModelError

Shape = tuple[int, ...]


class Probe:
    """Notes the inputs of units in plain runs; ``run`` says which is under way: "alone" first, and then "batch"."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.run = ""
        self._shapes: dict[Unit, dict[int, set[Shape]]] = {}
        self._alone: dict[Unit, list[Tensor]] = {}  # the first tensor of every call, not yet met in the batch
        self._moved: list[Unit] = []

    def note(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """A call of a unit."""
        tensors = [(i, t) for i, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, Tensor) and t.dim() > 0]
        for i, tensor in tensors:
            self._shapes.setdefault(unit, {}).setdefault(i, set()).add(tuple(tensor.shape))
        if self.run == "alone" and tensors:
            self._alone.setdefault(unit, []).append(tensors[0][1].detach().clone())
        if self.run == "batch" and tensors and self._alone.get(unit):
            alone, inputs = self._alone[unit].pop(0), tensors[0][1].detach()
            if alone.shape == (1, *inputs.shape[1:]) and len(inputs) == self.batch and _is_elsewhere(alone, inputs):
                self._moved.append(unit)

    def learn(self) -> None:
        """Tell the units how their inputs follow the batch."""
        sizes = {1, self.batch}
        for unit, shapes in self._shapes.items():
            for i, found in shapes.items():
                first = {shape[0] for shape in found}
                unit.inputs[i] = "examples" if first == sizes else "shared" if len(first) == 1 else "other"
                differ = _dims_that_differ(found)
                if not differ:
                    unit.batch_dims[i] = None
                elif len(differ) == 1 and {shape[differ[0]] for shape in found} == sizes:
                    unit.batch_dims[i] = differ[0]

    def check_rows_stay(self) -> None:
        """Refuse a model in which row 0 of some unit's input is not the first example, where norms span units."""
        for unit in self._moved:
            if not unit.whole_groups:
                raise UnsupportedModelError(
                    f"the first row that {unit.label} gets in a batch is not the first example: the model changes the "
                    "order of the batch inside (sorting by length, say). An example's norm over several layers would "
                    "be added up from rows of different examples, and bound nothing. Keep the order, or clip per "
                    "layer."
                )


def _is_elsewhere(alone: Tensor, inputs: Tensor) -> bool:
    """Whether the first example, as it is alone, is another row of the batch than the first.

    Rounding moves it a little (more on a GPU, whose convolutions round their factors): another row must be nearer.
    """
    if alone.is_complex():
        return False
    rows = (inputs.double() - alone.double()).reshape(len(inputs), -1)
    apart = torch.linalg.vector_norm(rows, dim=1).nan_to_num(0.0)
    length = torch.linalg.vector_norm(alone.double())
    return bool((apart[0] > 1e-2 * length) & (apart[1:].min() < 0.5 * apart[0]))


def _dims_that_differ(shapes: set[Shape]) -> list[int]:
    """Among shapes with as many dimensions; where those differ, all of them."""
    lengths = {len(shape) for shape in shapes}
    return [d for d in range(max(lengths)) if len(lengths) > 1 or len({shape[d] for shape in shapes}) > 1]
