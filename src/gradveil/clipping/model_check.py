"""Whether a model can be followed, and how its inputs follow the batch: what plain runs on its first batch tell.

The runs are in plain_runs.py, what they are judged by in decomposable.py, and what is noted of units in probe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from torch import Tensor, nn

from gradveil.clipping.decomposable import (
    check_buffers,
    check_examples_apart,
    examples_are_apart,
    same_shapes_but_for_the_batch,
)
from gradveil.clipping.plain_runs import Arguments, PlainRun, plain_run
from gradveil.clipping.probe import Probe
from gradveil.clipping.refusals import refusal
from gradveil.clipping.units import Unit
from gradveil.errors import UnsupportedModelError


class ModelCheck:
    """Of one model. It is made on the first batch of more than one example.

    A unit that is not called there is looked at when it first is: after that pass, and before it is differentiated.
    """

    def __init__(self, units: Sequence[Unit], quietly: Callable[[], AbstractContextManager[None]]) -> None:
        self._units, self._quietly = units, quietly
        self.probe: Probe | None = None  # which wants to know of calls of units, while a run is under way
        self.unprobed: list[Unit] = []  # units that were not called yet
        self.alone = True  # False: other processes must call the model as often as this one does

    def look(
        self, module: nn.Module, args: Any, kwargs: Any, batch: int, drawn_from: Any = None
    ) -> list[Tensor] | None:
        """Refuse what cannot be followed, and teach the units; the output that the followed model must give.

        ``drawn_from``: after a pass that has called one of :attr:`unprobed`, the generators as they were before it.
        """
        arguments = Arguments(args, kwargs, batch)

        def run(name: str, given: Any, *, evaluate: bool) -> PlainRun:
            assert self.probe is not None
            self.probe.start(name)
            with self._quietly():
                return plain_run(module, *given, evaluate=evaluate, drawn_from=drawn_from)

        def both(batched: list[int]) -> tuple[PlainRun, PlainRun]:
            self.probe = Probe(batch)
            try:
                alone = run("alone", arguments.first_example(batched), evaluate=True)
            except UnsupportedModelError:
                raise
            except Exception as error:
                if len(batched) < 2:
                    raise
                raise UnsupportedModelError(
                    f"the model cannot be called with its first example alone ({str(error).splitlines()[0]}), by which "
                    f"it is seen that examples are apart. Of the arguments of shapes {arguments.shapes()} one row was "
                    "given: those with the size of the batch first. What is the same for all examples should have "
                    "another size there: register it as a buffer, or give it a first dimension of 1."
                ) from error
            return alone, run("batch", (args, kwargs), evaluate=True)

        try:
            batched, alone, whole = self._reading_that_fits(arguments, both, batch)
            probe = self.probe
            assert probe is not None
            if not (whole.drew or alone.drew):  # otherwise two calls differ whatever the batch
                check_examples_apart(whole.outputs, alone.outputs, batch)
                if any(not unit.whole_groups for unit in self._units):
                    with suppress(Exception):  # of a model that is particular about the order
                        run("reversed", arguments.reversed(batched), evaluate=True)
                probe.check_rows_stay()
            if any(child.training for child in module.modules()):
                whole = run("batch, as it is", (args, kwargs), evaluate=False)
                check_buffers(module, whole, run("alone, as it is", arguments.first_example(batched), evaluate=False))
        finally:
            self.probe = None
        if drawn_from is None:
            probe.learn(self._units)
        else:
            probe.learn(self.unprobed)
            self._refuse_misread(probe)
        self.unprobed = [unit for unit in self._units if not unit.inputs] if self.alone else []
        # A module followed as a whole draws for every example by itself.
        comparable = not whole.drew or all(unit.rule is not None for unit in self._units)
        return whole.outputs if comparable else None

    def _reading_that_fits(
        self, arguments: Arguments, both: Callable[[list[int]], tuple[PlainRun, PlainRun]], batch: int
    ) -> tuple[list[int], PlainRun, PlainRun]:
        """Which arguments follow the batch, with the runs on one example and on the batch by which it is seen."""
        readings = arguments.readings()
        for reading in readings if len(readings) > 1 and self.alone else ():
            try:
                alone, whole = both(reading)
            except UnsupportedModelError:
                continue
            apart = whole.drew or alone.drew or examples_are_apart(whole.outputs, alone.outputs)
            alike = reading is readings[0] or same_shapes_but_for_the_batch(whole.outputs, alone.outputs, batch)
            if apart and alike:
                return reading, alone, whole
        return readings[0], *both(readings[0])  # the only one; or none fits, and this one says what is wrong

    def _refuse_misread(self, probe: Probe) -> None:
        """Of units that were called before it was known how their inputs follow the batch."""
        for unit in self.unprobed:
            if unit.rule is not None:
                misread = unit.inputs.get(0, "examples") != "examples" and probe.batch in probe.first_sizes(unit)
            else:
                known = {i: d for i, d in unit.batch_dims.items() if d is not None}
                misread = "mixed" in unit.inputs.values() or (bool(unit.batch_dims) and known != unit.assumed_dims)
            if misread:
                raise refusal("late", unit.label)
