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
from itertools import chain, count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import _pop_mode
from torch.utils._pytree import tree_leaves, tree_map

from gradveil.clipping import performance
from gradveil.clipping.backends import cuda, programs
from gradveil.clipping.backends.layers import Layers, NativeWatch, layers
from gradveil.clipping.backward_pass import BackwardPass, Call, ClipStats, Padding
from gradveil.clipping.clip_factors import ClipFactors
from gradveil.clipping.clipped_functions import (
    ModelHook,
    RefusedFunction,
    TrackedForward,
    is_refused,
    tap_input,
    tap_layer,
    tap_output,
)
from gradveil.clipping.groups import Group
from gradveil.clipping.native_layers import NativeLayer, native_layer
from gradveil.clipping.operations.checkpoints import Recomputation
from gradveil.clipping.operations.layout import Layout
from gradveil.clipping.operations.plan import Base, Plan, Site
from gradveil.clipping.operations.sources import Source, is_of_a_pass, of_parameters, slots_of
from gradveil.clipping.operations.table import LayerOperation, Statics
from gradveil.clipping.operations.tracking import Tracking
from gradveil.clipping.outputs import map_tensors, tensors_in
from gradveil.clipping.parameter_guard import PythonWatch, Watch
from gradveil.clipping.per_sample_grads import CombinedGrads, PerSampleGrads
from gradveil.clipping.rules.conv_use import ConvGrads
from gradveil.clipping.rules.linear import LinearGrads
from gradveil.clipping.sharding import any_sharded
from gradveil.clipping.tied_weights import TiedGrads
from gradveil.clipping.tracked_modules import TiedWeights, TrackedModule, TrackedModules
from gradveil.clipping.validation.example_independence import check_same_output
from gradveil.clipping.validation.loss_watch import is_marked, leaves_behind, unclipped, unmarked
from gradveil.clipping.validation.model_validation import ModelCheck
from gradveil.clipping.validation.own_loss import OwnLosses
from gradveil.clipping.validation.refusals import refusal
from gradveil.clipping.validation.rehearsal import Rehearsal
from gradveil.clipping.validation.shadow_forward import Moment
from gradveil.clipping.validation.spot_checks import SpotChecks
from gradveil.clipping.validation.support import check_module, half_precision, normalisations
from gradveil.clipping.validation.surroundings import no_autocast
from gradveil.clipping.views import of_examples
from gradveil.errors import ConfigError, UnsupportedModelError


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
        for name, parameter in module.named_parameters():  # the C++ watch would take Python's hooks off
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise refusal("hook", name)
        self.module, self.groups, self.loss_reduction = module, groups, loss_reduction
        self.views = views  # rows of one example, one after the other (views.py)
        self.weighing = ClipFactors(len(groups), bounds)
        self.padding: Padding | None = None  # of the coming passes
        self._frozen = [(n, p) for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]
        self._registered = False  # whether some module, anywhere, has got a parameter or a child since the last look
        self._norms = normalisations(module)  # over the batch, while they train
        self._current: BackwardPass | None = None  # in its forward
        self._differentiated: BackwardPass | None = None  # in its backward
        self.plan = Plan()
        self.sources: dict[int, Source] = {}  # by id of the parameter
        self._plain_output: list[Tensor] | None = None  # what the current pass must give, in its first batch
        self._late: list[tuple[tuple[Base, int], Site, str]] = []  # operations of this pass that no plan knows yet
        self._before: tuple[Any, Any, Moment] | None = None  # the call, and what was before it
        self._checking = False  # whether it is looked at in the current pass
        self._handles: list[Any] = []
        self._own_forward: Any = None
        self._slots: dict[int, int] = {}  # by parameter
        self._slot_named: dict[str, int] = {}  # where what stands for a parameter is another tensor in every pass
        self._watched: list[tuple[str, Tensor]] = []  # by slot
        self._layers = layers()  # None: everything in Python
        self._told: Any = None  # what it goes by
        self.sharded = any_sharded(module)
        if self.sharded:
            self._layers = None  # in C++ a layer's parameters are those it began with
        self.units = TrackedModules(groups, self._watched)
        self._model = ModelCheck(self)
        self._holders: list[tuple[dict[str, Any], str, Tensor, str]] = []  # where each parameter stands
        self._gradients: Watch | NativeWatch = (
            PythonWatch(self.refuse) if self._layers is None else self._layers.watch_for(self)
        )
        self.on_end: Callable[[], None] = self.to_gradients  # a backward pass has ended, and has left sums
        self.as_delivered: Callable[[str, Tensor], Tensor] = _unchanged  # the sum of a parameter, as it is kept
        self.agree: Callable[[bool], bool] = bool  # of processes that must call the model equally often
        self._passes: WeakValueDictionary[int, BackwardPass] = WeakValueDictionary()
        self._ended_sums: list[tuple[int, Tensor]] = []  # of passes in Python: slot, clipped sum
        self._rehearsal: Rehearsal | None = None  # of passes that are not to be released
        self._steps = 0  # that have ended
        self._task = -1  # of autograd: the last backward pass that has come to an output of the model
        self._asked_for_native: set[int] = set()  # units
        self.quick: dict[tuple[int, ...], NativeLayer] = {}  # see Operations
        self._quiet = False
        self._public = False  # whether untracked passes are differentiated
        self.checks = SpotChecks(module, views=views)
        self.checks.rehearse = self.rehearse
        self._attach()

    # ---- attaching and detaching

    def _attach(self) -> None:
        self._handles += [
            self.module.register_forward_pre_hook(ModelHook(self._begin), prepend=True, with_kwargs=True),
            self.module.register_forward_hook(ModelHook(self._end), with_kwargs=True, always_call=True),
            register_module_parameter_registration_hook(self._note_registration),
            register_module_module_registration_hook(self._note_registration),
            Recomputation(),
        ]
        if not self.sharded:
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad:
                    self._slot_of(name, parameter)
            for prefix, child in self.module.named_modules():
                for leaf, held in child._parameters.items():
                    if held is not None and held.requires_grad:
                        self._holders.append((child._parameters, leaf, held, f"{type(child).__name__} {prefix!r}"))
        self._own_forward = vars(self.module).get("forward")
        self.module.forward = TrackedForward(self, self._own_forward)

    def _slot_of(self, name: str, parameter: Tensor) -> int:
        """Its place in the watch over gradients; a parameter that several units share is watched once."""
        known = self._slots.get(id(parameter))
        if known is None:
            known = self._slots[id(parameter)] = self._gradients.follow(parameter)
            self._watched.append((name, parameter))
            self.sources[id(parameter)] = Source(parameter, known, (known,))
        return known

    def adopt(self, parameter: Tensor) -> Source | None:
        """Of a model that is cut over processes: what stands for one of its parameters while it is whole."""
        found = self.sources.get(id(parameter))
        if found is not None:
            return found
        name = next((name for name, live in self.module.named_parameters() if live is parameter), None)
        if name is None:
            return None
        self._slot_of(name, parameter)
        slot = self._slot_named.setdefault(name, self._slots[id(parameter)])
        found = self.sources[id(parameter)] = Source(parameter, slot, (slot,))
        return found

    def name_of_slot(self, slot: int) -> str:
        return self._watched[slot][0]

    def parameter(self, slot: int) -> Tensor:
        return self._watched[slot][1]

    def detach(self) -> None:
        """Leave the model as it was found."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            for slot, (_, parameter) in enumerate(self._watched):
                self._gradients.forget(parameter, slot)
            del self.module.forward
            if self._own_forward is not None:
                self.module.forward = self._own_forward
        self._handles = []

    def refuse(self, place: int, why: str) -> None:
        """What a watch, or a layer in C++, has found: of parameter or unit number ``place``."""
        raise refusal(
            why,
            self._watched[place][0]
            if why == "stranger"
            else self.units[place].label
            if why not in _OF_THE_PASS
            else "",
        )

    # ---- the model's call

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._quiet or not torch.is_grad_enabled():
            return None
        self._check_parameters()
        leaves = args if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.dim() > 0]
        if not tensors:
            raise UnsupportedModelError(
                "the model was called without a tensor that has a batch dimension, so its examples cannot be told "
                "apart. Pass the batch as a tensor with the examples along the first dimension."
            )
        was_marked = False
        if any(type(t) is not Tensor and is_marked(t) for t in tensors):  # an output of before, fed back
            args, kwargs = tree_map(unmarked, args), tree_map(unmarked, kwargs)
            was_marked = True
            tensors = [unmarked(t) for t in tensors]
        rows = tensors[0].shape[0]
        if rows % self.views:
            raise ConfigError(
                f"the model was called with {rows} rows, and views is {self.views}: an example has {self.views} rows, "
                "one after the other, so which rows are whose cannot be told. Give all views of every example: "
                "torch.stack(views, dim=1).flatten(0, 1)."
            )
        looks = not self._model.passed and self._rehearsal is None
        checking = looks and self.agree(rows > 1)
        to_look = checking or (self.sharded and looks)  # there all processes look, or none
        if rows == 0:
            args, kwargs = tree_map(
                lambda t: t.new_zeros((1, *t.shape[1:])) if isinstance(t, Tensor) and t.dim() and not len(t) else t,
                (args, kwargs),
            )
            if to_look:
                self._model.look(args, kwargs, 1)
            self._start(BackwardPass(1, empty=True), checking)
            return args, kwargs
        plain = self._model.look(args, kwargs, rows) if to_look else None
        before = None
        if self._model.passed and self._model.is_incomplete and rows > 1 and not _is_capturing(tensors[0]):
            before = args, kwargs, Moment(module)
        if self.padding is None and self._rehearsal is None:
            self.checks.before_call(args, kwargs, rows, quietly=self.quietly, alone=self.agree is bool)
        current = BackwardPass(rows // self.views, empty=False, views=self.views, padding=self.padding)
        self._start(current, checking, plain, before)
        if self._layers is not None and self.padding is None and self.weighing.only_clips and self.views == 1:
            self._follow_in_cpp(self._layers, current, tensors[0].device)
        current.inputs = {t.shape for t in tensors}
        if any(t.requires_grad for t in tensors):
            self.look_at_leaves([leaf for t in tensors for leaf in leaves_behind(t)], current)
        if any(t.requires_grad for t in tensors):  # what leaves through the inputs is the gradient of the user's loss
            back = 1.0 / self._output_scale(current)
            return tree_map(
                lambda t: tap_input(t, back) if isinstance(t, Tensor) and t.requires_grad else t, (args, kwargs)
            )
        return (args, kwargs) if was_marked else None

    def _start(
        self,
        current: BackwardPass,
        checking: bool,
        plain: list[Tensor] | None = None,
        before: tuple[Any, Any, Moment] | None = None,
    ) -> None:
        current.step = self._steps
        self._current, self._checking, self._plain_output = current, checking, plain
        self._late, self._before = [], before

    def _output_scale(self, current: BackwardPass) -> float:
        """d(mean)/d(row) is 1/B of the gradient of that example's own loss; of K rows of an example, 1/(B K)."""
        return float(current.batch) if self.loss_reduction == "mean" else 1.0 / current.views

    @property
    def followed(self) -> BackwardPass | None:
        """The pass whose layers may run in C++, while the model is called."""
        current = self._current
        return None if current is None or current.library is None or self._quiet else current

    def _follow_in_cpp(self, library: Layers, current: BackwardPass, device: torch.device) -> None:
        """Layers of this pass may run in C++: nothing is padded or whitened, and an example is one row."""
        clipper, number = self._gradients.number, library.next_number()
        settings = (self.weighing.bounds, device, performance.settings().kept_elements)
        if settings != self._told:
            on_device = self.weighing.bounds_on(device).inside if device.type == "cuda" else None
            library.set_settings(clipper, self.weighing.bounds_inside, on_device, settings[2])
            self._told = settings
        self._passes[number] = current
        library.begin(clipper, number, current.batch, len(self.units))
        current.library, current.number = library, number

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._quiet or self._current is None:
            return None
        current, self._current = self._current, None
        plain, self._plain_output = self._plain_output, None
        before, self._before = self._before, None
        late, self._late = self._late, []
        if output is None:  # the forward has failed
            return None
        if late:
            given, named, moment = before or (args, kwargs, None)
            found = self._model.look(given, named, current.rows, before=moment, all_rows=True)
            plain = None if moment is None else found
            for place, site, label in late:
                known = self.plan.get(*place)
                if known is None or (known.kind, known.layouts) != (site.kind, site.layouts):
                    raise refusal("late", label)
        if plain is not None:
            check_same_output(output, plain)
        if self._checking:
            self._model.passed = True
        self._check_order(current)
        for tie in self.units.ties:
            if current.library is not None and any(current.uses(unit) for unit in tie.units):
                current.library.keeps_uses(current.number)
        if current.empty:
            output = map_tensors(lambda t: self._tapped_output(t, current, 1.0), output)
            return map_tensors(lambda t: t[:0] if t.dim() and len(t) == 1 else t, output)
        if not isinstance(output, Tensor) and not tensors_in(output):
            raise UnsupportedModelError(
                f"the model returned a {type(output).__name__}, in which no tensor was found, so that it cannot be "
                "followed. Return tensors, or tuples, lists and dictionaries of them (a class of your own can be "
                "registered with torch.utils._pytree, as torch.export does it)."
            )
        if isinstance(output, Tensor) and output.dim() > 0 and len(output) != current.rows:
            raise UnsupportedModelError(
                f"the model turned a batch of {current.rows} examples into an output of shape {tuple(output.shape)}: "
                "its rows are not the examples, so the loss cannot be told apart by example. Keep the batch dimension."
            )
        scale = self._output_scale(current)
        if self._model.mixed_outputs and current.rows > 1:
            mixed, number = self._model.mixed_outputs, count()
            output = map_tensors(lambda t: _refused(t, "compared") if next(number) in mixed else t, output)
        if self._rehearsal is not None:
            self._rehearsal.watch(output, current.rows)
        output = map_tensors(lambda t: self._tapped_output(t, current, scale), output)
        if self._rehearsal is None and current.rows > 1 and not (isinstance(output, Tensor) and output.dim()):
            places, losses = count(), self.checks.own_losses
            output = map_tensors(lambda t: _own_loss(t, next(places), losses), output)
        if self.padding is not None or self._rehearsal is not None:
            return output
        mean = self.loss_reduction == "mean"
        return self.checks.after_call(output, current.rows, scaled=scale != 1.0, mean=mean)

    def _tapped_output(self, t: Any, current: BackwardPass, scale: float) -> Any:
        if not isinstance(t, Tensor) or not t.requires_grad or is_refused(t):
            return t
        if current.library is not None and type(t) is Tensor:
            tapped = current.library.output(t, current.number, scale)
            node: Any = tapped.grad_fn
            node.metadata["gradveil"] = current  # it lives as long as the graph that leads to it
            return tapped
        return tap_output(t, self, current, scale)

    @property
    def tracks(self) -> bool:
        """Whether the call of the model under way is followed."""
        return self._current is not None and not self._quiet and torch.is_grad_enabled()

    def run(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The model's forward, with its operations followed."""
        assert self._current is not None
        depth = torch._C._len_torch_function_stack()
        try:
            with Tracking(self, self._current) as tracking:
                output = plain(*args, **kwargs)
        finally:
            while torch._C._len_torch_function_stack() > depth:  # an interrupt between entering and being entered
                _pop_mode()
        held = (output,) if isinstance(output, Tensor) else tensors_in(output)
        if not any(map(tracking.tracks, held)):
            return output
        return map_tensors(
            lambda t: (
                _refused(t, "stranger", self.name_of_slot(tracking.known[id(t)].slots[0])) if tracking.tracks(t) else t
            ),
            output,
        )

    # ---- operations

    def unit_for(
        self, op: LayerOperation, statics: Statics, sources: Sequence[Source], weight: Tensor, bias: Tensor | None
    ) -> TrackedModule:
        """The unit of a layer operation."""
        key = (op.name, statics, *(source.key for source in sources))
        known = len(self.units)
        unit = self.units.get(
            key, lambda: (self._label(op.name, slots_of(sources)), slots_of(sources), op.make_rule(statics))
        )
        if len(self.units) > known:
            self.quick.clear()  # it may share parameters with one of them
        if unit.native is None and unit.index not in self._asked_for_native:
            self._asked_for_native.add(unit.index)
            whole = all(source.is_parameter for source in sources)
            if whole and self._layers is not None and isinstance(self._gradients, NativeWatch):
                unit.native = native_layer(self._layers, unit, self._gradients, weight, bias)
        return unit

    def unit_of_copies(self, source: Source) -> TrackedModule:
        return self.unit_of_operation("copies", [source], way="copies")

    def unit_of_operation(self, name: str, sources: Sequence[Source], *, way: str) -> TrackedModule:
        key = (name, *(source.key for source in sources))
        known = len(self.units)
        unit = self.units.get(key, lambda: (self._label(name, slots_of(sources)), slots_of(sources), None))
        if len(self.units) > known:
            self.quick.clear()
        unit.way = way
        return unit

    def _label(self, operation: str, slots: Sequence[int]) -> str:
        """The module that holds the parameters, where it is one; otherwise the operation and the parameters."""
        held = [{label for _, _, p, label in self._holders if p is self.parameter(slot)} for slot in slots]
        common = set.intersection(*held) if held else set()
        if len(common) == 1:
            return common.pop()
        return f"{operation} of {', '.join(repr(self.name_of_slot(slot)) for slot in slots)}"

    def unplanned(
        self, place: tuple[Base, int], tracked: Sequence[Source], others: Sequence[Tensor], current: BackwardPass
    ) -> Site:
        """An operation that came up in no earlier run: taken to have the batch first, and looked at after the pass.

        With the arguments of this pass, and from the moment before it where some parameter was still to come up.
        """
        if self.sharded:
            raise refusal("late", self._label("an operation", slots_of(tracked)))
        first = [len(t.shape) > 0 and t.shape[0] == current.rows for t in others]
        site = Site("meeting" if any(first) else "derived", tuple(Layout(0, 1) if f else None for f in first))
        self._late.append((place, site, self._label("an operation", slots_of(tracked))))
        return site

    def _check_order(self, current: BackwardPass) -> None:
        for unit in current.moved:
            if not unit.whole_groups or current.uses(unit) > 1:
                raise UnsupportedModelError(
                    f"the rows that {unit.label} gets in a batch are not the examples in their order: the model "
                    "changes the order of the batch inside (sorting by length, say). An example's norm over several "
                    "layers, or several uses of one, would be added up from rows of different examples, and bound "
                    "nothing. Keep the order, or clip per layer."
                )

    def tap(
        self,
        tracking: Tracking,
        unit: TrackedModule,
        sources: Sequence[Source],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fold: int,
    ) -> Tensor:
        """A layer operation with the examples first, through its autograd function."""
        call = Call(unit, tracking.current, again=tracking.again, sources=sources, fold=fold)
        return tap_layer(self, call, unit.rule, x, weight, bias)

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
        found, of_pass = self.units[unit], self._passes.get(current)
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
        return self.as_delivered(name, _as_parameter(total, parameter, name))

    def _being_differentiated(self) -> BackwardPass | None:
        """The pass whose backward is under way, by Python's account or by that of the C++ code."""
        if self._differentiated is not None or self._layers is None:
            return self._differentiated
        return self._passes.get(self._gradients.differentiating())

    def finish_pass(self, current: int) -> None:
        """The backward pass of a pass in C++ has ended, and some of its uses are kept here."""
        of_pass = self._passes[current]
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
        if current.step != self._steps:
            raise refusal("released", "")
        current.differentiated = True
        if task == self._task:  # a model with several outputs comes here for each of them
            if current is not self._differentiated:
                raise refusal("two passes", "")
            return
        self._task, self._differentiated = task, current
        self.look_at_leaves(self._gradients.other_leaves())
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
        tracked = {id(p) for _, p in self._watched} if self.sharded else ()
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
        self._take_notes(self._passes[current])
        self._pass_is_over()

    def _pass_is_over(self) -> None:
        if self._rehearsal is None:
            self.checks.backward_ended()
            self.on_end()
            return
        self._rehearsal.end(self.clip_stats.norms())
        self.take_sums()
        self.weighing.clip_stats = ClipStats(len(self.groups))

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
            self._gradients.gathered()
            self.weighing.clip_stats = kept
        return rehearsal.passes[0] if len(rehearsal.passes) == 1 else None

    def take_sums(self) -> dict[str, Tensor]:
        """By parameter: the clipped sums of the passes that have ended since they were last taken."""
        sums: dict[str, Tensor] = {}
        found, self._ended_sums = self._ended_sums, []
        for slot, total in (*found, *zip(*self._gradients.take_sums(), strict=True)):
            name = self._watched[slot][0]
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
                work = [(of, _together(of, kept)) for of, kept in by_unit.items()]
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
        passes, examples, groups, found, lost = self._gradients.gathered()
        clip_stats = self.weighing.clip_stats
        clip_stats.passes += passes
        clip_stats.examples += examples
        clip_stats.lost += lost
        if groups:
            device = self._watched[0][1].device
            bounds = self.weighing.bounds_on(device).exact_of if device.type == "cuda" else self.weighing.bounds
            clip_stats.note_layers(groups, found, bounds)
        return clip_stats

    def start_step(self) -> None:
        """A new step: nothing is gathered yet, and passes that began before it can no longer be differentiated."""
        self._steps += 1
        self._ended_sums = []
        self.weighing.clip_stats = ClipStats(len(self.groups))
        self._gradients.start_step()

    def _check_parameters(self) -> None:
        """Refuse hooks on gradients, which would see none, and parameters that no longer train."""
        own = self._gradients.own_hooks
        for name, parameter in self._watched:
            hooks = parameter._backward_hooks
            if (hooks and len(hooks) > own) or parameter._post_accumulate_grad_hooks:
                raise refusal("hook", name)
            if not parameter.requires_grad:
                raise refusal("frozen", name)
        for place, leaf, held, label in self._holders:
            if place.get(leaf) is not held:
                raise refusal("replaced", label)
        for norm in self._norms:
            if norm.training:
                raise refusal("batch norm", type(norm).__name__)
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise refusal("unfrozen", name)
        if self._registered and not self.sharded:
            tracked = {id(p) for _, p in self._watched}
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad and id(parameter) not in tracked:
                    raise refusal("unfrozen", name)
            self._registered = False

    def _note_registration(self, *_: Any) -> None:
        self._registered = True
        self.checks.note_registration()

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Passes of the model in here are ordinary ones, and their gradients go to ``.grad``."""
        before, self._public = self._public, True
        self._gradients.lenient(True)
        try:
            with self.quietly():
                yield
        finally:
            self._public = before
            self._gradients.lenient(before)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Calls of the model, or parts of it, in here are not followed."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


_OF_THE_PASS = ("public", "released", "two passes")


def _refused(t: Tensor, why: str, what: str = "") -> Tensor:
    refused: Tensor = RefusedFunction.apply(t, why, what) if t.requires_grad else t
    return refused


def _own_loss(t: Tensor, place: int, losses: OwnLosses) -> Tensor:
    return losses.tap(place, t) if t.dim() == 0 and t.requires_grad and not is_refused(t) else t


def _is_capturing(t: Tensor) -> bool:
    """Whether a CUDA graph is being captured: what it calls was called before, eagerly."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _as_parameter(total: Tensor, parameter: Tensor, name: str) -> Tensor:
    """A sum in the type of the parameter. FSDP may have made that a narrower one."""
    if total.dtype == parameter.dtype:
        return total
    if parameter.dtype in (torch.float16, torch.bfloat16):
        raise half_precision(name, parameter.dtype)
    return total.to(parameter.dtype)


def _together(of: TrackedModule | TiedWeights, kept: Sequence[tuple[TrackedModule, PerSampleGrads]]) -> PerSampleGrads:
    """What an example adds to the parameters of a unit, or of units that share some, in all their uses of a pass."""
    if isinstance(of, TiedWeights):
        return TiedGrads([use for _, use in kept], [of.places(unit) for unit, _ in kept], of.parameters)
    uses = [use for _, use in kept]
    if len(uses) == 1:
        return uses[0]
    return LinearGrads.joined(uses) or CombinedGrads(uses)


def _unchanged(name: str, total: Tensor) -> Tensor:
    return total
