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

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradveil.clipping.decomposable import outputs_agree
from gradveil.clipping.units import Unit
from gradveil.errors import UnsupportedModelError

Shape = tuple[int, ...]


class Probe:
    """Notes the inputs of units in plain runs; ``run`` says which is under way."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.run = ""
        self._shapes: dict[Unit, dict[int, set[Shape]]] = {}
        self._first_rows: dict[str, dict[Unit, list[Tensor | None]]] = {}  # by run: of every call's first tensor

    def note(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """A call of a unit."""
        tensors = [(i, t) for i, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, Tensor) and t.dim() > 0]
        for i, tensor in tensors:
            self._shapes.setdefault(unit, {}).setdefault(i, set()).add(tuple(tensor.shape))
        row = tensors[0][1][:1].detach().clone() if tensors and len(tensors[0][1]) else None
        self._first_rows.setdefault(self.run, {}).setdefault(unit, []).append(row)

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

    def check_rows_stay(self, units: Iterable[Unit], in_batch: str, alone: str) -> None:
        """Refuse a model in which row 0 of some unit's input is not the first example, where norms span units."""
        rows = [self._first_rows.get(run, {}) for run in (in_batch, alone)]
        for unit in units:
            if unit.whole_groups or unit.inputs.get(0) != "examples":
                continue
            for a, b in zip(*(of_run.get(unit, []) for of_run in rows), strict=False):
                if a is not None and b is not None and a.shape == b.shape and not outputs_agree(a, b):
                    raise UnsupportedModelError(
                        f"the first row that {unit.label} gets in a batch is not the first example: the model changes "
                        "the order of the batch inside (sorting by length, say). An example's norm over several layers "
                        "would be added up from rows of different examples, and bound nothing. Keep the order, or clip "
                        "per layer."
                    )


def _dims_that_differ(shapes: set[Shape]) -> list[int]:
    """Among shapes with as many dimensions; where those differ, all of them."""
    lengths = {len(shape) for shape in shapes}
    return [d for d in range(max(lengths)) if len(lengths) > 1 or len({shape[d] for shape in shapes}) > 1]
