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
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from gradveil.clipping.backward_pass import Call
from gradveil.clipping.operations import copies, last_resort
from gradveil.clipping.operations.decompositions import DECOMPOSED, RECURRENT
from gradveil.clipping.operations.layout import Layout
from gradveil.clipping.operations.plan import Base, Plan, Record, Site, copy_of
from gradveil.clipping.operations.recurrent import RecurrentFunction
from gradveil.clipping.operations.routing import Owners, Routes, chooses_rows, finds_rows, is_number, is_packing
from gradveil.clipping.operations.sources import Lookup, Region, Source, leaf_like, mark_of_a_pass
from gradveil.clipping.operations.table import (
    BATCHED_PRODUCTS,
    BROADCASTING,
    COPYING,
    EXPANDING,
    LAYERS,
    LOOKUPS,
    PLAIN,
    LayerOperation,
    writes_in_place,
)
from gradveil.clipping.validation.own_loss import OWN as OWN_LOSSES
from gradveil.clipping.validation.own_loss import cross_entropy
from gradveil.clipping.validation.surroundings import no_saved_tensor_hooks
from gradveil.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gradveil.clipping.backward_pass import BackwardPass
    from gradveil.clipping.clipper import Clipper
    from gradveil.clipping.native_layers import NativeLayer
    from gradveil.clipping.tracked_modules import TrackedModule

_LISTS = (list, tuple)
_PLAIN_BATCH = Layout(0, 1)
_MAKE_LEAVES = {Tensor.requires_grad_, cast(Any, Tensor.requires_grad).__set__}
_AN_OTHER = "Write it with operations that have one"


def tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors of a call, in order."""
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            yield a
        elif type(a) in _LISTS or type(a) is dict:
            yield from (t for t in tree_leaves(a) if isinstance(t, Tensor))


def name_of(func: Any) -> str:
    """As a person would call it."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name.strip("_")


class Operations(TorchFunctionMode):
    """What tracking and tracing have in common: which operations they look at."""

    def __init__(self, plan: Plan, parameters: Mapping[int, Source]) -> None:
        super().__init__()
        self.plan = plan
        self.known: dict[int, Source] = dict(parameters)  # by id of the tensor
        self.counts: dict[Base, int] = {}
        self.live: dict[int, Tensor] = {}  # by slot, of a model that is cut over processes

    adopt: Callable[[Tensor], Source | None] | None = None  # of a model that is cut over processes
    # Linear layers in C++ whose every call has the batch first, by the ids of their parameters: small ones feel each
    # look that is taken at them.
    quick: Mapping[tuple[int, ...], NativeLayer] = {}
    rows = -1
    rows_of_losses = 0  # of the batch, where the gradient of a loss inside the model is taken per example
    routes: Routes | None = None  # where rows are chosen by what is in them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs:
            quick = self.quick.get(tuple(map(id, args[1:])))
            if quick is not None and quick.takes(args[0]) and args[0].shape[0] == self.rows and torch.is_grad_enabled():
                return quick.run(*args)
        if self.routes is None:
            return self.look(func, args, kwargs)
        result = self.look(func, args, kwargs)
        self.routes.note(func, args, kwargs or {}, result)
        return result

    def look(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = self.known
        if self.adopt is not None:
            self._adopt_all(args, kwargs or {})
        for a in args:
            if id(a) in known or (type(a) in _LISTS and any(id(b) in known for b in a)):
                return self.meet(func, args, kwargs or {})
        if func in _MAKE_LEAVES:  # of an activation, as for checkpointing
            mark_of_a_pass(args[0])
        if not kwargs:
            return func(*args)
        for a in kwargs.values():
            if id(a) in known or (type(a) in _LISTS and any(id(b) in known for b in a)):
                return self.meet(func, args, kwargs)
        if func in OWN_LOSSES and self.rows_of_losses:
            return cross_entropy(func, args, kwargs, self.rows_of_losses)
        return func(*args, **kwargs)

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """An operation of a decomposition: looked at like one of the model's own."""
        return self.__torch_function__(func, (), args, kwargs)

    def _adopt_all(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        assert self.adopt is not None
        for t in tensors(args, kwargs):
            if type(t) is nn.Parameter and id(t) not in self.known and t.requires_grad:
                source = self.adopt(t)
                if source is not None:
                    self.known[id(t)], self.live[source.slots[0]] = source, t

    def tracks(self, t: Any) -> bool:
        return id(t) in self.known

    def meet(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """An operation that takes something tracked."""
        if func in PLAIN or not self.differentiates():
            return func(*args, **kwargs)
        decomposed = DECOMPOSED.get(func)
        if decomposed is not None:
            if func in RECURRENT:  # whose many small steps take no parameter but through call()
                if self.is_of_constants(func, args, kwargs):
                    return self.operate(func, args, kwargs)
                return decomposed(self, *tree_map(self.as_data, tuple(args[:2])), *args[2:], **kwargs)
            with self:
                found = decomposed(self, *args, **kwargs)
            if found is not NotImplemented:
                return found
        elif func not in LAYERS and func not in BROADCASTING and _is_written_in_python(func):
            with self:
                return _body(func)(*args, **kwargs)
        return self.operate(func, args, kwargs)

    def differentiates(self) -> bool:
        return torch.is_grad_enabled()

    def as_data(self, t: Any) -> Any:
        """What is tracked, in a batch of one: that example's own copy."""
        return t

    def is_of_constants(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation that is made of others takes parameters and constants alone."""
        tracked, others = self.parts(func, args, kwargs)
        return self.are_constant(others, self.place(("inputs", func), tracked))

    def are_constant(self, others: Sequence[Tensor], place: tuple[Base, int]) -> bool:
        raise NotImplementedError

    def tap_steps(
        self, like: Tensor, weight: Tensor, bias: Tensor | None, time: int, backwards: bool
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Of a recurrent layer: see recurrent.py. None: its steps are looked at one by one."""
        return None

    def operate(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def parts(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[list[Source], list[Tensor]]:
        """The tensors of a call: what is tracked, and the others."""
        given, known = list(tensors(args, kwargs)), self.known
        tracked = [known[id(t)] for t in given if id(t) in known]
        return tracked, [t for t in given if id(t) not in known and not is_number(func, t)]

    def owners(self, others: Sequence[Tensor]) -> tuple[Tensor, Owners] | None:
        """Of the first tensor whose rows were chosen by what is in them."""
        if self.routes is None:
            return None
        return next(((t, found) for t in others if (found := self.routes.of(t)) is not None), None)

    def own_in_order(self, t: Tensor) -> None:
        """The rows of a tensor are the examples' (of bags: there is one for each)."""
        if self.routes is not None:
            self.routes.set_in_order(t)

    def own(self, t: Tensor, like: Tensor, dim: int) -> None:
        """The rows of a tensor along a dimension have the owners of the first rows of another."""
        if self.routes is not None and (found := self.routes.of(like)) is not None:
            self.routes.set(t, Owners(dim, found.rows[: t.shape[dim]]))

    def place(self, func: Any, tracked: Sequence[Source]) -> tuple[Base, int]:
        base = (func, tuple(source.key for source in tracked))
        nth = self.counts.get(base, 0)
        self.counts[base] = nth + 1
        return base, nth

    def register(self, func: Any, args: Any, result: Any, place: tuple[Base, int], parents: Sequence[Source]) -> None:
        """Follow the results of an operation on parameters and constants; of one in place, its first argument."""
        in_place = writes_in_place(func) and isinstance(args[0], Tensor)
        found = [args[0]] if in_place else [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for number, t in enumerate(found):
            if self.is_followed(t) and (in_place or id(t) not in self.known):  # not what it was given
                self.known[id(t)] = self.derived(func, args, t, self.plan.number((*place, number)), parents)

    def is_followed(self, t: Tensor) -> bool:
        return t.requires_grad

    def derived(self, func: Any, args: Any, t: Tensor, key: int, parents: Sequence[Source]) -> Source:
        slots = tuple(dict.fromkeys(slot for parent in parents for slot in parent.slots))
        return Source(t, key, slots)


def _is_written_in_python(func: Any) -> bool:
    """What calls super() would come back to the mode under its own name."""
    is_function = isinstance(func, types.FunctionType) and func.__module__.startswith("torch")
    return is_function and "__class__" not in func.__code__.co_freevars


@lru_cache(maxsize=1024)
def _body(func: types.FunctionType) -> types.FunctionType:
    """A function of torch's that is written in Python, without its own look for modes: they see what it calls."""
    no: Any = lambda *_: False  # noqa: E731
    unasked = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), no)
    made = types.FunctionType(
        func.__code__, {**func.__globals__, **unasked}, func.__name__, func.__defaults__, func.__closure__
    )
    made.__kwdefaults__ = func.__kwdefaults__
    return made


class Tracing(Operations):
    """Notes what operations with parameters were given, in a run of the model beside the user's own."""

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[int, Source],
        *,
        rows: int,
        differentiates: bool = True,
        changed: int | None = None,
    ) -> None:
        """``rows`` of the batch, and which of them was replaced by another."""
        super().__init__(plan, parameters)
        self._changed = changed
        self.records: dict[tuple[Base, int], Record] = {}
        self.needs_grad = differentiates
        self._without_grad = not differentiates
        self._selections, self._rows = Routes(plan, rows), rows
        self._found: dict[int, Any] = {}  # places that were found by what is in a tensor
        self.routes = self._selections if plan.routed else None

    def differentiates(self) -> bool:
        return self._without_grad or torch.is_grad_enabled()

    def is_followed(self, t: Tensor) -> bool:
        return t.requires_grad or (self._without_grad and t.is_floating_point())

    def look(self, func: Any, args: Any, kwargs: Any) -> Any:
        if chooses_rows(func, args, kwargs or {}) and isinstance(args[0], Tensor) and id(args[0]) not in self.known:
            self.records[self._selections.place(func, args[0])] = Record([copy_of(args[0])])
            by = [t for t in tree_leaves(args[1:]) if isinstance(t, Tensor)]
            found = any(id(t) in self._found or t.dtype is torch.bool for t in by)
            listed = func is Tensor.__getitem__ and isinstance(args[1], list)  # an order that Python has found
            self.plan.finds_rows |= found or listed or is_packing(func)
        result = super().look(func, args, kwargs)
        if finds_rows(func, args):
            self._found |= {id(t): t for t in tree_leaves(result)}
        return result

    def operate(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        tracked, others = self.parts(func, args, kwargs)
        if self.owners(others) is not None:
            self.plan.routed_slots.update(slot for source in tracked for slot in source.slots)
            return func(*args, **kwargs)
        place = self.place(func, tracked)
        record = self.records[place] = Record([copy_of(t) for t in others])
        result = func(*args, **kwargs)
        known = self.plan.get(*place)
        if known is not None and known.kind == "expansion":
            result = self._with_another_copy(result, known)
        if getattr(func, "__name__", "") == "__setitem__":
            record.results = [copy_of(args[0][args[1]])]
        else:
            record.results = [copy_of(t) for t in tree_leaves(result) if isinstance(t, Tensor)]
        site = self.plan.get(*place)
        record.derived = site.kind == "derived" if site is not None else self._looks_constant(others)
        if record.derived:
            self.register(func, args, result, place, tracked)
        return result

    def are_constant(self, others: Sequence[Tensor], place: tuple[Base, int]) -> bool:
        record = self.records[place] = Record([copy_of(t) for t in others])
        site = self.plan.get(*place)
        record.derived = site.kind == "derived" if site is not None else self._looks_constant(others)
        return record.derived

    def _looks_constant(self, others: Sequence[Tensor]) -> bool:
        """What is taken to be derived until it is known: it would take one more round of runs for each operation."""
        return all(n % self._rows for t in others for n in t.shape)

    def _with_another_copy(self, result: Any, site: Site) -> Any:
        """A parameter that is expanded to the batch: the copy of the replaced example is another one too, so that it is
        seen what becomes of it. (In the other runs the same is done with ones, so that they round alike.)
        """
        apart = site.out.front(result, self._rows) if isinstance(result, Tensor) and site.out is not None else None
        if apart is None or not result.is_floating_point():
            return result
        front, undo = apart
        scale = torch.ones(self._rows, dtype=result.dtype, device=result.device)
        if self._changed is not None:
            scale[self._changed] = 1.125
        return undo(front * scale.view(-1, *[1] * (front.dim() - 1)) + (scale - 1).view(-1, *[1] * (front.dim() - 1)))


class Tracking(Operations):
    """One pass of the model: every use of a parameter goes through an autograd function that clips it."""

    def __init__(self, clipper: Clipper, current: BackwardPass, *, again: bool = False) -> None:
        super().__init__(clipper.plan, clipper.sources)
        self.clipper, self.current, self.again = clipper, current, again
        self.aliases: dict[int, Tensor] = {}  # by slot: what stands for a parameter in what is derived from it
        self.copied: dict[int, Tensor] = {}  # by id of its source: the copies of a parameter
        if current.library is not None and not again and not clipper.plan.routed:
            self.quick, self.rows = clipper.quick, current.rows
        if clipper.sharded:
            self.adopt = clipper.adopt
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
        """What is known of an operation, or taken to be until it is (see Clipper._late)."""
        found = self.plan.get(*place)
        if self.current.rows == 1 and (found is None or found.kind == "unknown"):  # everything is that one example's
            return Site("meeting" if others else "derived", tuple(Layout() for _ in others))
        if found is None:
            found = self.clipper.unplanned(place, tracked, others, self.current)
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
            unit = self.clipper.unit_for(op, statics, sources, weight, bias)
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
        unit = self.clipper.unit_for(op, statics, sources, weight, bias)
        if site.moved:
            current.moved.append(unit)
        layout = site.layouts[0] if site.layouts else None
        native = unit.native
        plain = (layout == _PLAIN_BATCH or current.rows == 1) and x.shape[:1] == (current.rows,)
        if plain and native is not None and current.library is not None and unit.tie is None and native.takes(x):
            if self.again:
                return native.run_again(x, weight, bias, current.number)
            if func is F.linear and layout == _PLAIN_BATCH and not site.moved and self.plan.is_always(place[0], site):
                self.clipper.quick[tuple(map(id, args[1:]))] = native
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
        return self.clipper.tap(
            self,
            unit,
            sources,
            rule.prepare(x),
            given.get(id(weight), weight),
            None if bias is None else given.get(id(bias), bias),
            fold,
        )

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
        unit = self.clipper.unit_for(op, (), sources, weight, bias)
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
