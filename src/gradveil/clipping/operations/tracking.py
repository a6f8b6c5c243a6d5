"""Follows parameters through the operations of a model's forward pass.

A torch function mode sees every operation that takes a parameter, whatever module or function calls it. Of each it is
known from the plan what it does with the batch (plan.py), and so which way its parameters' gradients are found:

    derived       of parameters and constants alone: the result is followed like a parameter (sources.py)
    a rule        linear layers, convolutions, embeddings, norms (table.py, rules/)
    decomposed    into operations that have rules: attention, recurrent layers, products (decompositions.py)
    copies        in an operation that broadcasts, the parameter is replaced by one copy per example, and autograd's own
                  gradient of the copies is what each example adds (copies.py)
    last resort   anything else, example by example through torch.func (last_resort.py)

All other operations run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from gradveil.clipping.backward_pass import Call
from gradveil.clipping.clipped_functions import tap_layer
from gradveil.clipping.operations import copies, last_resort
from gradveil.clipping.operations.layout import Layout
from gradveil.clipping.operations.mode import Operations, name_of, tensors
from gradveil.clipping.operations.plan import Base, Site
from gradveil.clipping.operations.recurrent import RecurrentFunction
from gradveil.clipping.operations.routing import Owners, Routes
from gradveil.clipping.operations.sources import Lookup, Region, Source, leaf_like
from gradveil.clipping.operations.table import (
    BATCHED_PRODUCTS,
    BROADCASTING,
    COPYING,
    EXPANDING,
    LAYERS,
    LOOKUPS,
    LayerOperation,
    writes_in_place,
)
from gradveil.clipping.validation.surroundings import no_saved_tensor_hooks
from gradveil.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gradveil.clipping.backward_pass import BackwardPass
    from gradveil.clipping.clipper import Clipper
    from gradveil.clipping.tracked_modules import TrackedModule

_PLAIN_BATCH = Layout(0, 1)
_AN_OTHER = "Write it with operations that have one"


class Tracking(Operations):
    """One pass of the model: every use of a parameter goes through an autograd function that clips it."""

    def __init__(self, clipper: Clipper, current: BackwardPass, *, again: bool = False) -> None:
        super().__init__(clipper.plan, clipper.parameters.sources)
        self.clipper, self.current, self.again = clipper, current, again
        self.aliases: dict[int, Tensor] = {}  # by slot: what stands for a parameter in what is derived from it
        self.copied: dict[int, Tensor] = {}  # by id of its source: the copies of a parameter
        if current.library is not None and not again and not clipper.plan.routed:
            self.quick, self.rows = clipper.units.quick, current.rows
        if clipper.sharded:
            self.adopt = clipper.parameters.adopt
        self.rows_of_losses = current.rows
        if clipper.plan.routed and current.rows > 1:
            self.routes = Routes(clipper.plan, current.rows)

    def are_constant(self, others: Sequence[Tensor], place: tuple[Base, int]) -> bool:
        site = self.plan.get(*place)
        return not others or (site is not None and site.kind == "derived" and self.current.rows > 1)

    def again_later(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, to be run again in the backward pass as it is run now."""
        counts = dict(self.counts)

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:
                return function(*args, **kwargs)
            again = Tracking(self.clipper, self.current, again=True)
            again.counts, again.known, again.aliases = dict(counts), dict(self.known), self.aliases
            with again:
                return function(*args, **kwargs)

        return run

    def operate(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        layer = LAYERS.get(func)
        if layer is not None:
            return self._layer(func, layer, args, kwargs)
        tracked, others = self.parts(func, args, kwargs)
        self._refuse_lost(func, tracked, others)
        owned = self.owners(others)
        if owned is not None:
            found = copies.routed(self, func, args, kwargs, *owned) if func in BROADCASTING else NotImplemented
            if found is not NotImplemented:
                return found
            raise self.refusal(func, tracked, "its rows were chosen by what is in them, and it has no rule", _AN_OTHER)
        place = self.place(func, tracked)
        site = self.site(func, place, tracked, others)
        if site.kind == "derived":
            return self._derive(func, args, kwargs, place, tracked)
        if site.kind == "expansion":
            if func in EXPANDING and len(tracked) == 1:
                return copies.expanded(self, func, tracked[0], args, kwargs, site)
            raise self.refusal(
                func, tracked, "makes one copy for each example in a way that is not known here", "Use expand()"
            )
        if self.current.rows == 1 or func in BROADCASTING or getattr(func, "__name__", "") == "__setitem__":
            found = copies.broadcast(self, func, args, kwargs, site, others, least=1)
        elif func in BATCHED_PRODUCTS:
            found = copies.broadcast(self, func, args, kwargs, site, others, least=3)
        else:
            found = NotImplemented
        return (
            found if found is not NotImplemented else last_resort.run(self, func, args, kwargs, site, tracked, others)
        )

    def _refuse_lost(self, func: Any, tracked: Sequence[Source], others: Sequence[Tensor]) -> None:
        if self.routes is not None and any(map(self.routes.is_lost, others)):
            raise self.refusal(
                func,
                tracked,
                "its rows were chosen by what is in them, and after other operations it is not known whose they are",
                "Take them back to the batch's order (index_add, or the inverse of the order) first",
            )

    def site(self, func: Any, place: tuple[Base, int], tracked: Sequence[Source], others: Sequence[Tensor]) -> Site:
        """What is known of an operation, or taken to be until it is (see ModelCall.unplanned)."""
        found = self.plan.get(*place)
        if self.current.rows == 1 and (found is None or found.kind == "unknown"):  # everything is that one example's
            return Site("meeting" if others else "derived", tuple(Layout() for _ in others))
        if found is None:
            found = self.clipper.call.unplanned(place, tracked, others, self.current)
        if found.kind == "unknown":
            raise self.refusal(func, tracked, found.why, "Keep the examples apart, along one dimension of every tensor")
        return found

    def refusal(self, func: Any, tracked: Sequence[Source], why: str, fix: str) -> UnsupportedModelError:
        names = [self.clipper.name_of_slot(slot) for source in tracked for slot in source.slots]
        listed = ", ".join(repr(name) for name in dict.fromkeys(names))
        return UnsupportedModelError(
            f"{name_of(func)}() uses parameter {listed} and batch data in a way that cannot be clipped per example: "
            f"{why}. {fix}."
        )

    # ---- layers with rules

    def _layer(self, func: Any, op: LayerOperation, args: Any, kwargs: Mapping[str, Any]) -> Any:
        x, weight, bias, statics = op.bind(*args, **kwargs)
        known, current = self.known, self.current
        sources = [known[id(t)] for t in (weight, bias) if t is not None and id(t) in known]
        tracked = sources if id(x) not in known else [known[id(t)] for t in tensors(args, kwargs) if id(t) in known]
        given_weights = (weight is None or id(weight) in known or not weight.requires_grad) and (
            bias is None or id(bias) in known or not bias.requires_grad
        )
        if (weight is not None and weight.is_complex()) or x.is_complex():
            given_weights = False  # rules are for real numbers
        self._refuse_lost(func, sources, [x])
        owned = self.owners([x])
        if owned is not None and given_weights and sources and weight is not None:
            unit = self.clipper.units.of_layer(op, statics, sources, weight, bias)
            return self._ruled(func, op, statics, unit, sources, x, weight, bias, owned[1])
        place = self.place(func, tracked)
        if id(x) in known:  # of parameters alone
            if given_weights:
                return self._derive(func, args, kwargs, place, tracked)
            others = [t for t in tensors(args, kwargs) if id(t) not in known]
            site = self.site(func, place, tracked, others)
            return last_resort.run(self, func, args, kwargs, site, tracked, others)
        site = self.site(func, place, sources, [x])
        if site.kind == "derived":
            return self._derive(func, args, kwargs, place, sources)
        if not given_weights or not sources or weight is None:
            others = [t for t in tensors(args, kwargs) if id(t) not in known]
            return last_resort.run(self, func, args, kwargs, site, sources, others)
        unit = self.clipper.units.of_layer(op, statics, sources, weight, bias)
        if site.moved:
            current.moved.append(unit)
        layout = site.layouts[0] if site.layouts else None
        native = unit.native
        plain = (layout == _PLAIN_BATCH or current.rows == 1) and x.shape[:1] == (current.rows,)
        if plain and native is not None and current.library is not None and unit.tie is None and native.takes(x):
            if self.again:
                return native.run_again(x, weight, bias, current.number)
            if func is F.linear and layout == _PLAIN_BATCH and not site.moved and self.plan.is_always(place[0], site):
                self.clipper.units.quick[tuple(map(id, args[1:]))] = native
            return native.run(x, weight, bias)
        return self._ruled(func, op, statics, unit, sources, x, weight, bias, layout)

    def _ruled(
        self,
        func: Any,
        op: LayerOperation,
        statics: Any,
        unit: TrackedModule,
        sources: Sequence[Source],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layout: Layout | Owners | None,
    ) -> Tensor:
        """With the examples first, as rules have them."""
        rows = self.current.rows
        if op.by_rows:
            least = unit.rule.least_dims if unit.rule is not None else 2
            single = rows == 1 and x.dim() == least - 1
            if single:
                x = x.unsqueeze(0)
            if layout is None or (layout.dim != 0 and rows > 1) or x.dim() < least:
                raise self.refusal(
                    func, sources, f"its input of shape {tuple(x.shape)} has no batch first", "Keep it first"
                )
            apart = layout.front(x, rows)
            if apart is None:
                raise self._other_size(func, sources, x)
            front, undo = apart
            inside = front.shape[1 : front.dim() - x.dim() + 1]
            fold = math.prod(inside)
            out = self._tapped(unit, sources, front.flatten(0, len(inside)) if inside else front, weight, bias, fold)
            out = undo(out.unflatten(0, (rows, *inside)) if inside else out)
            return out.squeeze(0) if single else out
        if rows == 1:
            if x.dim() > op.trailing(statics) and x.shape[0] == 1:
                return self._tapped(unit, sources, x, weight, bias, 1)
            return self._tapped(unit, sources, x.unsqueeze(0), weight, bias, 1).squeeze(0)
        if layout is None or layout.dim >= x.dim() - op.trailing(statics):
            raise self.refusal(func, sources, "it adds up over the examples", "Keep the batch out of the features")
        apart = layout.front(x, rows)
        if apart is None:
            raise self._other_size(func, sources, x)
        return apart[1](self._tapped(unit, sources, apart[0], weight, bias, 1))

    def _other_size(self, func: Any, sources: Sequence[Source], x: Tensor) -> UnsupportedModelError:
        return self.refusal(
            func,
            sources,
            f"its input of shape {tuple(x.shape)} does not fit a batch of {self.current.rows} as in the first batch",
            "Keep the batch where it is",
        )

    def _tapped(
        self, unit: TrackedModule, sources: Sequence[Source], x: Tensor, weight: Tensor, bias: Tensor | None, fold: int
    ) -> Tensor:
        given = {id(source.tensor): source.given() for source in sources}
        rule = unit.rule
        assert rule is not None
        call = Call(unit, self.current, again=self.again, sources=sources, fold=fold)
        mine = given.get(id(weight), weight), None if bias is None else given.get(id(bias), bias)
        return tap_layer(self.clipper, call, rule, rule.prepare(x), *mine)

    def as_data(self, t: Any) -> Any:
        if self.current.rows != 1 or not self.tracks(t):
            return t
        return copies.take(self, self.known[id(t)]).squeeze(0)

    def tap_steps(
        self, like: Tensor, weight: Tensor, bias: Tensor | None, time: int, backwards: bool
    ) -> tuple[Tensor, list[Tensor]] | None:
        given = [t for t in (weight, bias) if t is not None]
        sources = [self.known[id(t)] for t in given if id(t) in self.known]
        if len(sources) != len(given) or not all(source.is_parameter for source in sources):
            return None
        site = self.plan.get((F.linear, tuple(source.key for source in sources)), 0)
        first = like.shape[1 - time] == self.current.rows
        if site is None or site.moved or site.layouts[:1] != (_PLAIN_BATCH,) or not first or like.dim() != 3:
            return None
        op = LAYERS[F.linear]
        unit = self.clipper.units.of_layer(op, (), sources, weight, bias)
        call = Call(unit, self.current, again=self.again, sources=sources)
        fed: list[Tensor] = []
        found: Tensor = RecurrentFunction.apply(self.clipper, call, fed, time, backwards, like, weight, bias)
        return found, fed

    # ---- derived parameters

    def alias(self, slot: int) -> Tensor:
        if slot not in self.aliases:
            whole = self.live.get(slot)
            whole = self.clipper.parameter(slot) if whole is None else whole
            alias = self.aliases[slot] = leaf_like(whole)
            refuse = self.clipper.refuse  # not self, which would keep itself alive so
            alias.register_post_accumulate_grad_hook(lambda _: refuse(slot, "stranger"))
        return self.aliases[slot]

    def _derive(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], place: tuple[Base, int], tracked: Sequence[Source]
    ) -> Any:
        def inner(t: Any) -> Any:
            source = self.known.get(id(t)) if isinstance(t, Tensor) else None
            return self.alias(source.slots[0]) if source is not None and source.is_parameter else t

        if writes_in_place(func):
            self._check_write(func, args[0], tracked)
        with no_saved_tensor_hooks():
            given, named = tree_map(inner, (tuple(args), dict(kwargs)))
            result = func(*given, **named)
        for source in tracked:
            if source.is_parameter and result is self.aliases.get(source.slots[0]):
                return source.tensor  # there was nothing to do
        self.register(func, given, result, place, tracked)
        return result

    def _check_write(self, func: Any, t: Any, tracked: Sequence[Source]) -> None:
        """Refuse a write that brings another parameter into memory that several tensors share: they would not know."""
        own = self.known.get(id(t))
        slots = {slot for source in tracked for slot in source.slots}
        if not isinstance(t, Tensor) or (own is not None and slots <= set(own.slots)):
            return
        shares = t._is_view() or any(source.tensor._base is t for source in self.known.values())
        if shares and getattr(func, "__name__", "") != "__setitem__":
            raise self.refusal(func, tracked, "it writes to a view, or to what has views", "Make a new tensor instead")

    def derived(self, func: Any, args: Any, t: Tensor, key: int, parents: Sequence[Source]) -> Source:
        found = super().derived(func, args, t, key, parents)
        found.aliases = tuple(self.alias(slot) for slot in found.slots)
        parent = parents[0]
        found.keeps_norms, found.region = False, None
        if len(found.slots) == 1 and len(parents) == 1:
            found.region = Region.of(t, found.aliases[0])
            if found.region is None and func in COPYING and t.numel() == parent.tensor.numel():
                found.region = parent.region if not parent.is_parameter else Region.whole(parent.tensor)
            found.keeps_norms = found.region is not None
            found.lookup = parent.lookup or _lookup(func, args, t, parent)
        return found


def _lookup(func: Any, args: Any, rows: Tensor, parent: Source) -> Lookup | None:
    """Of a result that holds rows of a parameter, at places that an index gives."""
    if func not in LOOKUPS or not parent.is_parameter or parent.tensor.dim() != 2:
        return None
    shape = (parent.tensor.shape[0], parent.tensor.shape[1])
    index = [a for a in args if isinstance(a, Tensor) and not a.is_floating_point()]
    if len(index) != 1 or index[0].dtype is torch.bool or rows.shape != (*index[0].shape, shape[1]):
        return None
    return Lookup(rows, index[0] % shape[0], shape)
