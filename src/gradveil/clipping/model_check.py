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
from gradveil.clipping.plain_runs import Arguments, Moment, PlainRun, plain_run
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
        self.passed = False
        self.probe: Probe | None = None  # which wants to know of calls of units, while a run is under way
        self.unprobed: list[Unit] = []  # units that were not called yet
        self.alone = True  # False: other processes must call the model as often as this one does

    def look(
        self, module: nn.Module, args: Any, kwargs: Any, batch: int, *, before: Moment | None = None
    ) -> list[Tensor] | None:
        """Refuse what cannot be followed, and teach the units; the output that the followed model must give.

        ``before``: after a pass that has called one of :attr:`unprobed`, the moment before it.
        """
        arguments = Arguments(args, kwargs, batch)

        def run(name: str, given: Any, *, evaluate: bool) -> PlainRun:
            assert self.probe is not None
            self.probe.start(name)
            with self._quietly():
                return plain_run(module, *given, evaluate=evaluate, starting_from=before)

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
                upside_down = None
                with suppress(Exception):  # of a model that is particular about the order
                    upside_down = run("reversed", arguments.reversed(batched), evaluate=True)
                probe.check_rows_stay()
                if upside_down is not None and len(upside_down.outputs) == len(alone.outputs):
                    # The first example comes last there: what mixes it with those before it shows.
                    check_examples_apart(upside_down.outputs, alone.outputs, batch, row=-1)
            if any(child.training for child in module.modules()):
                whole = run("batch, as it is", (args, kwargs), evaluate=False)
                alone = run("alone, as it is", arguments.first_example(batched), evaluate=False)
                check_buffers(module, whole.buffers, alone.buffers)
        finally:
            self.probe = None
        probe.learn(self._units if before is None else self.unprobed)
        # A module followed as a whole draws for every example by itself.
        comparable = not whole.drew or all(unit.rule is not None for unit in self._units)
        return whole.outputs if comparable else None

    def look_again(
        self, module: nn.Module, args: Any, kwargs: Any, batch: int, *, before: Moment, called: Sequence[Unit]
    ) -> list[Tensor] | None:
        """As :meth:`look`, after a pass in which these units were called for the first time."""
        found = self.look(module, args, kwargs, batch, before=before)
        for unit in called:
            if unit.misread or not unit.inputs:
                raise refusal("late", unit.label)
        return found

    def settle(self) -> None:
        """The followed model has given what it should."""
        self.passed = True
        # Over several processes all must call the model equally often, and a unit may be called late on one of them.
        self.unprobed = [unit for unit in self._units if not unit.inputs] if self.alone else []

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
