"""The torch function mode that sees every operation of a model's forward pass: what tracking and tracing share."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from gradveil.clipping.operations.decompositions import DECOMPOSED, RECURRENT
from gradveil.clipping.operations.plan import Base, Plan
from gradveil.clipping.operations.routing import Owners, Routes, is_number
from gradveil.clipping.operations.sources import Source, mark_of_a_pass
from gradveil.clipping.operations.table import (
    BROADCASTING,
    LAYERS,
    PLAIN,
    writes_in_place,
)
from gradveil.clipping.validation.own_loss import OWN as OWN_LOSSES
from gradveil.clipping.validation.own_loss import cross_entropy

if TYPE_CHECKING:
    from gradveil.clipping.native_layers import NativeLayer

_LISTS = (list, tuple)
_MAKE_LEAVES = {Tensor.requires_grad_, cast(Any, Tensor.requires_grad).__set__}


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
