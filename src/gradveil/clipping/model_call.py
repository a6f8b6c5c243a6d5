"""A call of the tracked model: what is looked at before it, its forward with its operations followed, its output.

begin   how many examples there are; on the first batch, the plan; on some, whether examples are independent
run     the forward, under the mode that sees every operation (operations/tracking.py)
end     the output is tapped: its gradient is turned into that of each example's own loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import _pop_mode
from torch.utils._pytree import tree_leaves, tree_map

from gradveil.clipping import performance
from gradveil.clipping.backends.layers import Layers
from gradveil.clipping.backward_pass import BackwardPass
from gradveil.clipping.clipped_functions import RefusedFunction, is_refused, tap_input, tap_output
from gradveil.clipping.operations.layout import Layout
from gradveil.clipping.operations.plan import Base, Site
from gradveil.clipping.operations.sources import Source, slots_of
from gradveil.clipping.operations.tracking import Tracking
from gradveil.clipping.outputs import map_tensors, tensors_in
from gradveil.clipping.validation.example_independence import check_same_output
from gradveil.clipping.validation.loss_watch import is_marked, leaves_behind, unmarked
from gradveil.clipping.validation.model_validation import ModelCheck
from gradveil.clipping.validation.own_loss import OwnLosses
from gradveil.clipping.validation.refusals import refusal
from gradveil.clipping.validation.shadow_forward import Moment
from gradveil.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from gradveil.clipping.clipper import Clipper


class ModelCall:
    """Calls of one model, one at a time."""

    def __init__(self, clipper: Clipper) -> None:
        self._clipper = clipper
        self.model = ModelCheck(clipper)
        self.current: BackwardPass | None = None  # in its forward
        self._told: Any = None  # what the C++ library goes by
        self._plain_output: list[Tensor] | None = None  # what the current pass must give, in its first batch
        self._late: list[tuple[tuple[Base, int], Site, str]] = []  # operations of this pass that no plan knows yet
        self._before: tuple[Any, Any, Moment] | None = None  # the call, and what was before it
        self._checking = False  # whether the model is looked at in the current pass
        self._buffers: list[tuple[str, int, int]] = []  # as they were before the current pass

    @property
    def is_followed(self) -> bool:
        """Whether a call of the model now would be followed."""
        return not self._clipper.quiet and torch.is_grad_enabled()

    @property
    def is_under_way(self) -> bool:
        """Whether the call of the model under way is followed."""
        return self.current is not None and self.is_followed

    # ---- before the forward

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Start a pass; other arguments to call the model with, if any."""
        clipper = self._clipper
        clipper.parameters.check()
        tensors, was_marked = _batched_tensors(args, kwargs), False
        if any(type(t) is not Tensor and is_marked(t) for t in tensors):  # an output of before, fed back
            args, kwargs = tree_map(unmarked, args), tree_map(unmarked, kwargs)
            was_marked = True
            tensors = [unmarked(t) for t in tensors]
        rows = tensors[0].shape[0]
        if rows % clipper.views:
            raise ConfigError(
                f"the model was called with {rows} rows, and views is {clipper.views}: an example has {clipper.views} "
                "rows, one after the other, so rows cannot be assigned to examples. Give all views of every example: "
                "torch.stack(views, dim=1).flatten(0, 1)."
            )
        rehearsed = clipper.is_rehearsing
        looks = not self.model.passed and not rehearsed
        checking = looks and clipper.agree(rows > 1)
        to_look = checking or (clipper.sharded and looks)  # there all processes look, or none
        if rows == 0:
            args, kwargs = tree_map(_one_row, (args, kwargs))
            if to_look:
                self.model.look(args, kwargs, 1)
            self._start(BackwardPass(1, empty=True), checking)
            return args, kwargs
        plain = self.model.look(args, kwargs, rows) if to_look else None
        before = None
        if self.model.passed and self.model.is_incomplete and rows > 1 and not _is_capturing(tensors[0]):
            before = args, kwargs, Moment(clipper.module)
        if clipper.padding is None and not rehearsed:
            clipper.checks.before_call(args, kwargs, rows, quietly=clipper.quietly, alone=clipper.agree is bool)
        current = BackwardPass(rows // clipper.views, empty=False, views=clipper.views, padding=clipper.padding)
        self._start(current, checking, plain, before)
        library = clipper.library
        if library is not None and clipper.padding is None and clipper.weighing.only_clips and clipper.views == 1:
            self._follow_in_cpp(library, current, tensors[0].device)
        current.inputs = {t.shape for t in tensors}
        if clipper.on_call is not None and not rehearsed:
            clipper.on_call(current, args, kwargs)
        if any(t.requires_grad for t in tensors):
            clipper.look_at_leaves([leaf for t in tensors for leaf in leaves_behind(t)], current)
            back = 1.0 / self._output_scale(current)  # for the gradient of the user's loss in the inputs
            taken = tree_map(
                lambda t: tap_input(t, back) if isinstance(t, Tensor) and t.requires_grad else t, (args, kwargs)
            )
            return taken[0], taken[1]
        return (args, kwargs) if was_marked else None

    def _start(
        self,
        current: BackwardPass,
        checking: bool,
        plain: list[Tensor] | None = None,
        before: tuple[Any, Any, Moment] | None = None,
    ) -> None:
        current.step, self._buffers = self._clipper.steps, self._clipper.parameters.buffer_versions()
        self.current, self._checking, self._plain_output = current, checking, plain
        self._late, self._before = [], before

    def _output_scale(self, current: BackwardPass) -> float:
        """d(mean)/d(row) is 1/B of the gradient of that example's own loss; of K rows of an example, 1/(B K)."""
        return float(current.batch) if self._clipper.loss_reduction == "mean" else 1.0 / current.views

    def _follow_in_cpp(self, library: Layers, current: BackwardPass, device: torch.device) -> None:
        """Layers of this pass may run in C++: nothing is padded or whitened, and an example is one row."""
        clipper = self._clipper
        weighing, watch, number = clipper.weighing, clipper.watch.number, library.next_number()
        settings = (weighing.bounds, device, performance.settings().kept_elements)
        if settings != self._told:
            on_device = weighing.bounds_on(device).inside if device.type == "cuda" else None
            library.set_settings(watch, weighing.bounds_inside, on_device, settings[2])
            self._told = settings
        clipper.passes[number] = current
        library.begin(watch, number, current.batch, len(clipper.units))
        current.library, current.number = library, number

    # ---- the forward

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The model's forward, with its operations followed."""
        assert self.current is not None
        depth = torch._C._len_torch_function_stack()
        try:
            with Tracking(self._clipper, self.current) as tracking:
                output = forward(*args, **kwargs)
        finally:
            while torch._C._len_torch_function_stack() > depth:  # an interrupt between entering and being entered
                _pop_mode()
        held = (output,) if isinstance(output, Tensor) else tensors_in(output)
        if not any(map(tracking.tracks, held)):
            return output
        name_of = self._clipper.name_of_slot
        return map_tensors(
            lambda t: _refused(t, "stranger", name_of(tracking.known[id(t)].slots[0])) if tracking.tracks(t) else t,
            output,
        )

    def unplanned(
        self, place: tuple[Base, int], tracked: Sequence[Source], others: Sequence[Tensor], current: BackwardPass
    ) -> Site:
        """An operation that came up in no earlier run: taken to have the batch first, and looked at after the pass.

        With the arguments of this pass, and from the moment before it where some parameter was still to come up.
        """
        label = self._clipper.parameters.label("an operation", slots_of(tracked))
        if self._clipper.sharded:
            raise refusal("late", label)
        first = [len(t.shape) > 0 and t.shape[0] == current.rows for t in others]
        site = Site("meeting" if any(first) else "derived", tuple(Layout(0, 1) if f else None for f in first))
        self._late.append((place, site, label))
        return site

    # ---- after the forward

    def give_up(self) -> None:
        """The forward has failed."""
        self._take_down()

    def _take_down(self) -> tuple[BackwardPass | None, list[Tensor] | None, Any, Any]:
        found = self.current, self._plain_output, self._before, self._late
        self.current = self._plain_output = self._before = None
        self._late = []
        return found

    def end(self, args: Any, kwargs: Any, output: Any) -> Any:
        """The output of the model, as the user gets it."""
        clipper = self._clipper
        current, plain, before, late = self._take_down()
        assert current is not None
        if late:
            plain = self._look_at_late(late, before, args, kwargs, current)
        if plain is not None:
            check_same_output(output, plain)
        if self._checking:
            self.model.passed = True
        if self._buffers and not clipper.sharded:
            self._check_buffers(args, kwargs, current)
        _check_order(current)
        for tie in clipper.units.ties:
            if current.library is not None and any(current.uses(unit) for unit in tie.units):
                current.library.keeps_uses(current.number)
        if current.empty:
            output = map_tensors(lambda t: self._tapped(t, current, 1.0), output)
            return map_tensors(lambda t: t[:0] if t.dim() and len(t) == 1 else t, output)
        _check_output(output, current)
        scale = self._output_scale(current)
        if self.model.mixed_outputs and current.rows > 1:
            mixed, number = self.model.mixed_outputs, count()
            output = map_tensors(lambda t: _refused(t, "compared") if next(number) in mixed else t, output)
        clipper.watch_rehearsed(output, current.rows)
        output = map_tensors(lambda t: self._tapped(t, current, scale), output)
        rehearsed = clipper.is_rehearsing
        if not rehearsed and current.rows > 1 and not (isinstance(output, Tensor) and output.dim()):
            places, losses = count(), clipper.checks.own_losses
            output = map_tensors(lambda t: _own_loss(t, next(places), losses), output)
        if clipper.padding is not None or rehearsed:
            return output
        mean = clipper.loss_reduction == "mean"
        return clipper.checks.after_call(output, current.rows, scaled=scale != 1.0, mean=mean)

    def _check_buffers(self, args: Any, kwargs: Any, current: BackwardPass) -> None:
        """Refuse a call that writes to a buffer, unless runs of the model show that it is not of the examples."""
        after = self._clipper.parameters.buffer_versions()
        written = {now[0] for before, now in zip(self._buffers, after, strict=False) if before != now}
        if not self.model.passed or written <= self.model.written:
            return
        if current.rows > 1:
            self.model.look(args, kwargs, current.rows)  # in another mode than before, say
        if unknown := sorted(written - self.model.written):
            raise refusal("buffer", unknown[0])

    def _look_at_late(self, late: Any, before: Any, args: Any, kwargs: Any, current: BackwardPass) -> Any:
        """Learn the plan of operations that came up in this pass; the output the model must have given, if known."""
        given, named, moment = before or (args, kwargs, None)
        found = self.model.look(given, named, current.rows, before=moment, all_rows=True)
        for place, site, label in late:
            known = self._clipper.plan.get(*place)
            if known is None or (known.kind, known.layouts) != (site.kind, site.layouts):
                raise refusal("late", label)
        return None if moment is None else found

    def _tapped(self, t: Any, current: BackwardPass, scale: float) -> Any:
        if not isinstance(t, Tensor) or not t.requires_grad or is_refused(t):
            return t
        if current.library is not None and type(t) is Tensor:
            tapped = current.library.output(t, current.number, scale)
            node: Any = tapped.grad_fn
            node.metadata["gradveil"] = current  # it lives as long as the graph that leads to it
            return tapped
        return tap_output(t, self._clipper, current, scale)


def _batched_tensors(args: Any, kwargs: Any) -> list[Tensor]:
    leaves = args if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else tree_leaves((args, kwargs))
    tensors = [t for t in leaves if isinstance(t, Tensor) and t.dim() > 0]
    if not tensors:
        raise UnsupportedModelError(
            "the model was called without a tensor that has a batch dimension, so examples cannot be distinguished. "
            "Pass the batch as a tensor with the examples along the first dimension."
        )
    return tensors


def _one_row(t: Any) -> Any:
    """For an empty batch: one row of zeros stands in."""
    return t.new_zeros((1, *t.shape[1:])) if isinstance(t, Tensor) and t.dim() and not len(t) else t


def _check_order(current: BackwardPass) -> None:
    for unit in current.moved:
        if not unit.whole_groups or current.uses(unit) > 1:
            raise UnsupportedModelError(
                f"the rows that {unit.label} gets in a batch are not the examples in their order: the model changes "
                "the order of the batch inside (sorting by length, say). An example's norm over several layers, or "
                "several uses of one, would be added up from rows of different examples, and bound nothing. Keep the "
                "order, or clip per layer."
            )


def _check_output(output: Any, current: BackwardPass) -> None:
    if not isinstance(output, Tensor):
        if not tensors_in(output):
            raise UnsupportedModelError(
                f"the model returned a {type(output).__name__}, in which no tensor was found, so that it cannot be "
                "followed. Return tensors, or tuples, lists and dictionaries of them (a class of your own can be "
                "registered with torch.utils._pytree, as torch.export does it)."
            )
    elif output.dim() > 0 and len(output) != current.rows:
        raise UnsupportedModelError(
            f"the model turned a batch of {current.rows} examples into an output of shape {tuple(output.shape)}: its "
            "rows are not the examples, so the loss cannot be attributed to examples. Keep the batch dimension."
        )


def _refused(t: Tensor, why: str, what: str = "") -> Tensor:
    refused: Tensor = RefusedFunction.apply(t, why, what) if t.requires_grad else t
    return refused


def _own_loss(t: Tensor, place: int, losses: OwnLosses) -> Tensor:
    return losses.tap(place, t) if t.dim() == 0 and t.requires_grad and not is_refused(t) else t


def _is_capturing(t: Tensor) -> bool:
    """Whether a CUDA graph is being captured: what it calls was called before, eagerly."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()
