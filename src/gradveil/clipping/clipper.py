"""Per-example clipping inside one backward pass.

Formal guarantee. At the end of ``loss.backward()``, :meth:`Clipper.take_sums` gives, for every trainable
parameter, the sum over the examples of the batch of their clipped gradients: example i contributes, to
group g, its gradient of its own loss scaled by min(1, C_g / norm), so that its l2 norm over the parameters
of g is at most C_g. Adding or removing one example therefore changes the sums by at most C_g in group g.
The sums go to whoever set :attr:`Clipper.on_end`; autograd, and ``.grad``, get none of them.

    an example whose gradient is not finite in a group   contributes zero there (and in the other groups of the same
                                                         module), and is counted
    an example whose gradient is zero                     contributes zero
    an empty batch                                        the sums are exactly zero
    a parameter used several times in a pass              the norm is that of the sum of its uses
    an example with several views                         its gradient is the mean over them, clipped once
    a parameter used outside the model's forward          refused: that use could not be clipped
    the same pass differentiated twice                    refused: contributions would add up to 2 C_g
    several losses of one pass, differentiated apart      refused where they reach the same group
    two calls of the model in one backward pass           refused: a loss could mix their examples
    torch.autograd.grad with respect to a parameter       refused: nothing leaves without noise
    a backward pass that is to reach inputs only          clips nothing, and ends without sums
    a backward pass that fails                            leaves nothing behind
    a hook on a parameter's gradient                      refused: there is no gradient for it to see

How. While the model's forward runs, every operation that takes a parameter goes through an autograd function
(operations/): its backward gets the operation's input and output gradient, from which a rule (rules/)
computes norms and the clipped sum. The ordinary weight gradient is never computed, and none is returned for a
parameter. Groups that lie inside one operation are clipped on the spot; groups that span several, and parameters
that are used twice, are kept and clipped when the backward pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from gradveil.clipping.backends import cuda, programs
from gradveil.clipping.backends.layers import NativeWatch, layers
from gradveil.clipping.backward_pass import BackwardPass, Call, ClipStats, Padding
from gradveil.clipping.clip_factors import ClipFactors, as_parameter, together
from gradveil.clipping.clipped_functions import ModelHook, TrackedForward
from gradveil.clipping.groups import Group
from gradveil.clipping.model_call import ModelCall
from gradveil.clipping.operations.checkpoints import Recomputation
from gradveil.clipping.operations.plan import Plan
from gradveil.clipping.operations.sources import is_of_a_pass, of_parameters
from gradveil.clipping.parameter_guard import PythonWatch, Watch
from gradveil.clipping.per_sample_grads import PerSampleGrads
from gradveil.clipping.rules.conv_use import ConvGrads
from gradveil.clipping.sharding import any_sharded
from gradveil.clipping.tracked_modules import TiedWeights, TrackedModule, TrackedModules
from gradveil.clipping.tracked_parameters import TrackedParameters, check_no_hooks
from gradveil.clipping.validation.loss_watch import unclipped
from gradveil.clipping.validation.refusals import refusal
from gradveil.clipping.validation.rehearsal import Rehearsal
from gradveil.clipping.validation.spot_checks import SpotChecks
from gradveil.clipping.validation.support import check_module
from gradveil.clipping.validation.surroundings import no_autocast
from gradveil.clipping.views import of_examples


class Clipper:
    """Follows a model's units and turns their gradients into sums of clipped per-example gradients."""

    def __init__(
        self,
        module: nn.Module,
        groups: tuple[Group, ...],
        *,
        bounds: Sequence[float],
        loss_reduction: str,
        views: int = 1,
    ) -> None:
        check_module(module)
        check_no_hooks(module)
        self.module, self.groups, self.loss_reduction = module, groups, loss_reduction
        self.views = views  # rows of one example, one after the other (views.py)
        self.weighing = ClipFactors(len(groups), bounds)
        self.padding: Padding | None = None  # of the coming passes
        self.library = None if any_sharded(module) else layers()  # in C++ a layer's parameters are those it began with
        self.watch: Watch | NativeWatch = (
            PythonWatch(self.refuse) if self.library is None else self.library.watch_for(self)
        )
        self.parameters = TrackedParameters(module, self.watch)
        self.sharded = self.parameters.sharded
        self.plan = Plan()
        self.units = TrackedModules(groups, self.parameters, self.library, self.watch)
        self.passes: WeakValueDictionary[int, BackwardPass] = WeakValueDictionary()  # in C++, by number
        self.steps = 0  # that have ended
        self.quiet = False  # whether calls of the model are not followed
        self.on_call: Callable[[BackwardPass, Any, Any], None] | None = None  # of the model, with its arguments
        self.on_end: Callable[[], None] = self.to_gradients  # a backward pass has ended, and has left sums
        self.as_delivered: Callable[[str, Tensor], Tensor] = _unchanged  # the sum of a parameter, as it is kept
        self.agree: Callable[[bool], bool] = bool  # of processes that must call the model equally often
        self.call = ModelCall(self)
        self._differentiated: BackwardPass | None = None  # in its backward
        self._ended_sums: list[tuple[int, Tensor]] = []  # of passes in Python: slot, clipped sum
        self._rehearsal: Rehearsal | None = None  # of passes that are not to be released
        self._task = -1  # of autograd: the last backward pass that has come to an output of the model
        self._public = False  # whether untracked passes are differentiated
        self.checks = SpotChecks(module, views=views)
        self.checks.rehearse = self.rehearse
        self._handles: list[Any] = [
            register_module_parameter_registration_hook(self._note_registration),
            register_module_module_registration_hook(self._note_registration),
            Recomputation(),
        ]
        self._own_forward = vars(module).get("forward")
        module.forward = TrackedForward(self, self._own_forward)
        # Around what others wrap the forward in (accelerate's autocast, FSDP): checks call the model by themselves.
        self._handles += [
            module.register_forward_pre_hook(ModelHook(self._begin_apart), prepend=True, with_kwargs=True),
            module.register_forward_hook(ModelHook(self._end_apart), with_kwargs=True, always_call=True),
        ]

    # ---- attaching and detaching

    def _begin_apart(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.call.begin(args, kwargs) if self.call.is_followed else None

    def _end_apart(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self.call.is_under_way:
            return None
        return self.call.end(args, kwargs, output) if output is not None else self.call.give_up()

    def _note_registration(self, *_: Any) -> None:
        self.parameters.note_registration()
        self.checks.note_registration()

    def detach(self) -> None:
        """Leave the model as it was found."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self.parameters.forget()
            del self.module.forward
            if self._own_forward is not None:
                self.module.forward = self._own_forward
        self._handles = []

    def refuse(self, place: int, why: str) -> None:
        """What a watch, or a layer in C++, has found: of parameter or unit number ``place``."""
        if why in _OF_THE_PASS:
            raise refusal(why, "")
        raise refusal(why, self.name_of_slot(place) if why == "stranger" else self.units[place].label)

    def name_of_slot(self, slot: int) -> str:
        return self.parameters.named[slot][0]

    def parameter(self, slot: int) -> Tensor:
        return self.parameters.named[slot][1]

    # ---- the backward pass

    def collect(self, call: Call, use: PerSampleGrads, parameters: Sequence[tuple[Any, int]]) -> None:
        """Take one use's gradients: clipped sums where they can be had at once, otherwise kept for the end.

        ``parameters``: the edges of the autograd graph that lead to them.
        """
        current, unit = call.current, call.unit
        if call.done:
            self.refuse(unit.index, "twice")
        if not current.started:
            self.refuse(unit.index, "elsewhere")
        if not self._is_asked_for(unit, parameters):
            return
        call.done = current.asked = True
        if current.was_clipped(unit):
            self.refuse(unit.index, "checkpoints")
        sums = self._sums(unit, of_parameters(of_examples(use, call.fold * current.views), call.sources), current)
        for slot, total in zip(unit.slots, sums, strict=True) if sums is not None else ():
            current.deliver(slot, total)

    def _is_asked_for(self, unit: TrackedModule, parameters: Sequence[tuple[Any, int]]) -> bool:
        """Whether this backward pass is to reach the parameters; refused where autograd.grad would hand them out."""
        try:
            return any(torch._C._will_engine_execute_node(node) for node, _ in parameters if node is not None)
        except RuntimeError:  # torch's way of saying that autograd.grad was asked for the gradient of a leaf
            self.refuse(unit.index, "captured")
            raise

    def collect_elsewhere(
        self, current: int, unit: int, x: Tensor, weight: Tensor, kept: list[Tensor], g: Tensor
    ) -> list[Tensor]:
        """As :meth:`collect`, for a layer in C++ whose case is not the ordinary one; empty where it was kept."""
        found, of_pass = self.units[unit], self.passes.get(current)
        if of_pass is None:
            raise refusal("elsewhere", found.label)
        rule, layer = found.rule, found.native
        assert rule is not None and layer is not None
        needs = (False, True, len(found.parameters) == 2)
        if not x.is_cuda or not cuda.available() or layer.has_no_program(x, g):
            return self._sums(found, rule.backward(x, weight, tuple(kept), g, needs)[1], of_pass) or []
        bounds = self.weighing.bounds_on(x.device).inside
        with programs.recording([x, g, bounds, of_pass.flags(x.device), *kept]) as recorder:
            sums = self._sums(found, rule.backward(x, weight, tuple(kept), g, needs)[1], of_pass)
        layer.learn(x, g, recorder.program)
        return sums or []

    def _sums(self, unit: TrackedModule, use: PerSampleGrads, current: BackwardPass) -> list[Tensor] | None:
        """The clipped sums of a use, or None where they wait for the end of the pass."""
        if not unit.whole_groups or current.uses(unit) != 1:  # a tied unit's groups reach beyond it
            current.keep(unit, use)
            return None
        current.set_clipped(unit)
        sums = self.weighing.clip_alone(unit, use, current)
        return [self._delivered(*column) for column in zip(sums, unit.parameters, unit.names, strict=True)]

    def _delivered(self, total: Tensor, parameter: Tensor, name: str) -> Tensor:
        return self.as_delivered(name, as_parameter(total, parameter, name))

    def _being_differentiated(self) -> BackwardPass | None:
        """The pass whose backward is under way, by Python's account or by that of the C++ code."""
        if self._differentiated is not None or self.library is None:
            return self._differentiated
        return self.passes.get(self.watch.differentiating())

    def finish_pass(self, current: int) -> None:
        """The backward pass of a pass in C++ has ended, and some of its uses are kept here."""
        of_pass = self.passes[current]
        assert of_pass.library is not None
        for place, x, g, rows, biases, norms in zip(*of_pass.library.take_waiting(current), strict=True):
            unit = self.units[place]
            assert unit.rule is not None
            needs = (False, True, len(unit.parameters) == 2)
            use = unit.rule.backward(x, unit.parameters[0], (), g, needs)[1]
            if isinstance(use, ConvGrads):
                use.take_gradients(rows, biases, norms)
            of_pass.kept.append((unit, use))
        with no_autocast():
            self._clip_kept(of_pass)

    def start_backward(self, current: BackwardPass) -> None:
        """The gradient has reached the model's output: the backward pass of ``current`` begins."""
        task = torch._C._current_graph_task_id()
        if self._public:
            raise refusal("public", "")
        if current.step != self.steps:
            raise refusal("released", "")
        current.differentiated = True
        if task == self._task:  # a model with several outputs comes here for each of them
            if current is not self._differentiated:
                raise refusal("two passes", "")
            return
        self._task, self._differentiated = task, current
        self.look_at_leaves(self.watch.other_leaves())
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(current))

    def _finish(self, current: BackwardPass) -> None:
        """End of the backward pass: clip what was kept, and count what was not finite."""
        self._differentiated, self._task = None, -1
        if not current.asked:
            return
        current.asked = False
        with no_autocast():
            self._clip_kept(current)
        self._take_notes(current)
        clip_stats = self.weighing.clip_stats
        if not current.counted:
            current.counted = True
            clip_stats.passes += 1
            clip_stats.examples += 0 if current.empty else current.batch
        if current.lost is not None and not current.empty:
            clip_stats.lost.append(current.lost)
        self._ended_sums += current.sums
        current.sums = []
        self._pass_is_over()

    def look_at_leaves(self, leaves: Sequence[Tensor], current: BackwardPass | None = None) -> None:
        """Refuse a backward pass that also reaches trainable tensors which are not followed: they would get plain ones.

        An input of the model may have a gradient: that of each example is its own.
        """
        current = current or self._being_differentiated()
        inputs = current.inputs if current is not None else ()
        tracked = {id(p) for _, p in self.parameters.named} if self.sharded else ()
        others = [
            leaf
            for leaf in leaves
            if id(leaf) not in tracked
            and not is_of_a_pass(leaf)
            and (isinstance(leaf, nn.Parameter) or leaf.shape not in inputs)
        ]
        for leaf in others:
            leaf.grad = None  # it may have got its gradient already
        if others:
            raise unclipped(others[0])

    def _take_notes(self, current: BackwardPass) -> None:
        """What a pass has noted counts when it has ended: one that failed leaves nothing."""
        clip_stats, notes = self.weighing.clip_stats, current.notes
        current.notes = []
        for note in notes:
            clip_stats.note(*note)

    def pass_ended(self, current: int) -> None:
        """The backward pass of a pass in C++ has ended, and its sums can be taken."""
        self._take_notes(self.passes[current])
        self._pass_is_over()

    def _pass_is_over(self) -> None:
        if self._rehearsal is None:
            self.checks.backward_ended()
            self.on_end()
            return
        self._rehearsal.end(self.clip_stats.norms())
        self.take_sums()
        self.weighing.clip_stats = ClipStats(len(self.groups))

    @property
    def is_rehearsing(self) -> bool:
        """Whether passes are made whose sums are thrown away."""
        return self._rehearsal is not None

    def watch_rehearsed(self, output: Any, rows: int) -> None:
        if self._rehearsal is not None:
            self._rehearsal.watch(output, rows)

    def rehearse(self, step: Callable[[], Any]) -> list[Tensor] | None:
        """What a forward and backward pass tells of each example, (examples, ...) each; its sums are thrown away.

        None where there are no norms for some example and group, or where the step is not one pass.
        """
        kept = self.clip_stats
        rehearsal = self._rehearsal = Rehearsal(self.views)
        self.weighing.clip_stats = ClipStats(len(self.groups))
        try:
            step()
        finally:
            self._rehearsal = None
            self.take_sums()
            self.watch.gathered()
            self.weighing.clip_stats = kept
        return rehearsal.passes[0] if len(rehearsal.passes) == 1 else None

    def take_sums(self) -> dict[str, Tensor]:
        """By parameter: the clipped sums of the passes that have ended since they were last taken."""
        sums: dict[str, Tensor] = {}
        found, self._ended_sums = self._ended_sums, []
        for slot, total in (*found, *zip(*self.watch.take_sums(), strict=True)):
            name = self.parameters.named[slot][0]
            sums[name] = sums[name] + total if name in sums else total
        return sums

    def to_gradients(self) -> None:
        """Of a clipper by itself, without an engine: the sums become, or are added to, ``.grad``."""
        of = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, total in self.take_sums().items():
                grad = of[name].grad
                of[name].grad = total if grad is None else grad + total

    def _claim_groups(self, clipped: Iterable[TrackedModule | TiedWeights], current: BackwardPass) -> None:
        """Each group is clipped once in a pass: two backward() calls that reach different layers would add up."""
        one_of = {group: of.units[0] if isinstance(of, TiedWeights) else of for of in clipped for group in of.group_of}
        for group, unit in one_of.items():
            if not current.claim(group):
                self.refuse(unit.index, "apart")

    def _clip_kept(self, current: BackwardPass) -> None:
        by_unit: dict[TrackedModule | TiedWeights, list[tuple[TrackedModule, PerSampleGrads]]] = {}
        for unit, use in current.kept:
            by_unit.setdefault(unit.tie or unit, []).append((unit, use))
        current.kept = []
        if by_unit:
            self._claim_groups(by_unit, current)
            with torch.no_grad():
                work = [(of, together(of, kept)) for of, kept in by_unit.items()]
                alone = [(of, use) for of, use in work if of.whole_groups]
                others = [(of, use) for of, use in work if not of.whole_groups]
                clipped = chain(
                    (self.weighing.clip_alone(of, use, current) for of, use in alone),
                    self.weighing.clip_together(others, current),
                )
                for (of, _), sums in zip(alone + others, clipped, strict=True):
                    for slot, parameter, total, name in zip(of.slots, of.parameters, sums, of.names, strict=True):
                        current.deliver(slot, self._delivered(total, parameter, name))

    @property
    def clip_stats(self) -> ClipStats:
        """What the passes of this step add up to, beside the gradients."""
        passes, examples, groups, found, lost = self.watch.gathered()
        clip_stats = self.weighing.clip_stats
        clip_stats.passes += passes
        clip_stats.examples += examples
        clip_stats.lost += lost
        if groups:
            device = self.parameters.named[0][1].device
            bounds = self.weighing.bounds_on(device).exact_of if device.type == "cuda" else self.weighing.bounds
            clip_stats.note_layers(groups, found, bounds)
        return clip_stats

    def start_step(self) -> None:
        """A new step: nothing is gathered yet, and passes that began before it can no longer be differentiated."""
        self.steps += 1
        self._ended_sums = []
        self.weighing.clip_stats = ClipStats(len(self.groups))
        self.watch.start_step()

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Passes of the model in here are ordinary ones, and their gradients go to ``.grad``."""
        before, self._public = self._public, True
        self.watch.lenient(True)
        try:
            with self.quietly():
                yield
        finally:
            self._public = before
            self.watch.lenient(before)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Calls of the model, or parts of it, in here are not followed."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before


_OF_THE_PASS = ("public", "released", "two passes")


def _unchanged(name: str, total: Tensor) -> Tensor:
    return total
