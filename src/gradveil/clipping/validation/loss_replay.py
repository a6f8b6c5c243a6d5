"""The operations between a model's outputs and the loss, recorded so that they can be run again on other outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Reads of a value into Python. Reads of shapes and types are not among them: those stay the same.
_READS = frozenset(
    [
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__float__, Tensor.__int__),
        *(Tensor.__bool__, Tensor.__index__, Tensor.__contains__, Tensor.__complex__),
        *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero),
    ]
)
_ARRAYS = frozenset([Tensor.tolist, Tensor.numpy, Tensor.__array__])  # from which tensors are made again
_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
)
# Names without their underscores, as of add, add_, __radd__ and __iadd__.
_ARITHMETIC = frozenset(
    prefix + name
    for prefix in ("", "r", "i")
    for name in ("add", "sub", "mul", "div", "truediv", "pow", "true_divide", "multiply", "divide", "subtract")
)
_DIVISIONS = ("div", "truediv", "true_divide", "divide", "idiv", "itruediv")
_SETTERS = ("__setitem__", "__set__")
_SIZES = frozenset(["view", "reshape", "expand", "repeat", "unflatten", "narrow", "split"])


class CannotReplay(Exception):
    """What was recorded does not determine the loss, or does not run on other outputs."""


class AnotherBranch(CannotReplay):
    """The code of the loss decides by the outputs, and would have done something else."""


@dataclass(frozen=True)
class SomeRows:
    """A part of a batch of ``rows`` rows, and what constants of the whole batch become in it.

    Tensors with a row, or a block of rows, for each of them are cut; so are numbers that count rows, in arithmetic and
    in shapes (elsewhere they are dimensions, or classes). A number that is a multiple of the rows may count (tokens,
    say) or not: ``multiples``. ``numbers=False``: numbers stay as they are.
    """

    rows: int
    index: Tensor
    numbers: bool = True
    multiples: bool = False

    def of(self, leaf: Any, func: Callable[..., Any]) -> Any:
        """What an argument of ``func`` becomes."""
        if isinstance(leaf, Tensor):
            return self._of_tensor(leaf)
        if isinstance(leaf, int | float) and not isinstance(leaf, bool) and self.numbers and _counts_rows(func):
            return self._of_number(leaf)
        return leaf

    def _of_tensor(self, t: Tensor) -> Tensor:
        if t.dim() == 0:
            counts = self.numbers and not t.requires_grad and t.numel() == 1
            return t.new_tensor(self._of_number(t.item())) if counts else t
        if t.shape[0] % self.rows or not t.shape[0]:
            return t
        counts = t.dim() == 1 and t.dtype is not torch.bool
        if counts and torch.equal(t, torch.arange(len(t), dtype=t.dtype, device=t.device)):
            return t[: len(t) * len(self.index) // self.rows]  # places of rows, rather than something of each of them
        block = t.shape[0] // self.rows
        blocks = t.reshape(self.rows, block, *t.shape[1:]).index_select(0, self.index.to(t.device))
        return blocks.reshape(len(self.index) * block, *t.shape[1:])

    def _of_number(self, value: float) -> float:
        for known, becomes in ((self.rows, len(self.index)), (1 / self.rows, 1 / len(self.index))):
            if math.isclose(value, known, rel_tol=1e-6):
                return type(value)(becomes)
        if self.multiples and value and float(value).is_integer() and value % self.rows == 0:
            return type(value)(value * len(self.index) / self.rows)
        return value


class _Slot:
    """Stands for a value that the tape computes."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Overwritten(_Slot):
    """Stands for a tensor of the user's that an operation writes to, as it was before."""

    def __init__(self, number: int, before: Tensor) -> None:
        super().__init__(number)
        self.before = before


@dataclass
class _Operation:
    func: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    results: list[int | None]  # slots of the leaves of the result
    surroundings: _Surroundings
    drew: _Draws | None
    decided: bool | None  # a value that the user's code may have branched on
    links: bool = False  # a number was read, and a later operation takes it


class _Surroundings:
    """Autocast and gradient mode as an operation finds them."""

    def __init__(self, kind: str) -> None:
        self.grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self._kind = kind
        self._available = torch.amp.is_autocast_available(kind)
        self._on = self._available and torch.is_autocast_enabled(kind)
        self._dtype = torch.get_autocast_dtype(kind) if self._on else None

    def autocast(self, *, allowed: bool) -> AbstractContextManager[Any]:
        if not self._available:
            return nullcontext()
        return torch.autocast(self._kind, dtype=self._dtype, enabled=self._on and allowed, cache_enabled=False)


class _Draws:
    """Torch's generators, as they were before an operation. Operations on tensors use no others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def moved(self) -> bool:
        now = _Draws(self._device)
        same_cuda = self._cuda is None or now._cuda is None or torch.equal(self._cuda, now._cuda)
        return not (torch.equal(self._cpu, now._cpu) and same_cuda)

    def put(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class Tape:
    """The operations on the outputs of one call of a model. It keeps every intermediate result alive."""

    def __init__(self, outputs: Sequence[Tensor], detached: Sequence[Tensor] = ()) -> None:
        """``detached``: further outputs, which have no gradient."""
        self._values: list[Any] = []  # by slot; they are kept so that their ids stay theirs
        self._slots: dict[int, int] = {}  # by id
        self._operations: list[_Operation] = []
        self._broken = ""  # why it cannot be run again
        self._device, self._differentiated = outputs[0].device, len(outputs)
        outputs = [*outputs, *detached]
        self.originals = [t.detach().clone() for t in outputs]  # the user may change them in place
        self.output_slots = [self._new_slot(t) for t in outputs]

    def _new_slot(self, value: Any) -> int:
        self._values.append(value)
        self._slots[id(value)] = len(self._values) - 1
        return len(self._values) - 1

    def knows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._slots

    # ---- recording

    def record(
        self, func: Callable[..., Any], args: Any, kwargs: Any, compute: Callable[[], Any], mark: Callable[[Any], Any]
    ) -> Any:
        """Run ``compute``, the operation itself, and return its result with ``mark`` applied to new tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        before = self._before_writing(func, kwargs, leaves)
        versions = {i: t._version for i, t in enumerate(leaves) if self._is_users(t)}
        surroundings, draws = _Surroundings(self._device.type), _Draws(self._device)
        result = compute()
        found, result_spec = tree_flatten(result)
        if func is Tensor.register_hook:
            self._broken = "a hook may change the gradient on its way"
        if func in _READS:
            self._record_read(func, leaves, spec, surroundings, result)
            return result
        if not any(isinstance(t, Tensor) for t in found) and not before:
            return result  # a shape, a type, a hook
        written = [i for i, version in versions.items() if leaves[i]._version != version]
        if any(i not in before for i in written):
            self._broken = f"{_name(func)} writes to a tensor that is not an output"
        found = [t if not isinstance(t, Tensor) or self.knows(t) else mark(t) for t in found]
        recorded = [self._as_recorded(leaf, before.get(i) if i in written else None) for i, leaf in enumerate(leaves)]
        slots = [
            self._slots.get(id(t), -1) if self.knows(t) else self._new_slot(t) if isinstance(t, Tensor) else None
            for t in found
        ]
        self._operations.append(
            _Operation(func, recorded, spec, slots, surroundings, draws if draws.moved() else None, None)
        )
        return tree_unflatten(found, result_spec)

    def _is_users(self, t: Any) -> bool:
        return isinstance(t, Tensor) and not self.knows(t) and not t.is_inference()

    def _before_writing(self, func: Any, kwargs: Any, leaves: list[Any]) -> dict[int, Tensor]:
        """Copies of the user's own tensors that this operation may write to (a running mean, say)."""
        name = _name(func)
        writes = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or name in _SETTERS
        if not writes and kwargs.get("out") is None and not kwargs.get("inplace"):
            return {}
        return {
            i: t.detach().clone() if self._is_users(t) else t for i, t in enumerate(leaves) if isinstance(t, Tensor)
        }

    def _as_recorded(self, leaf: Any, before: Tensor | None) -> Any:
        if before is not None:
            return _Overwritten(self._new_slot(leaf), before)
        if isinstance(leaf, Tensor | float) and id(leaf) in self._slots:
            slot = self._slots[id(leaf)]
            if isinstance(leaf, float):
                self._read_by(slot).links = True
            return _Slot(slot)
        return leaf

    def _read_by(self, slot: int) -> _Operation:
        return next(op for op in self._operations if op.results == [slot])

    def _record_read(self, func: Any, leaves: list[Any], spec: TreeSpec, around: _Surroundings, result: Any) -> None:
        recorded = [self._as_recorded(leaf, None) for leaf in leaves]
        decided = result if isinstance(result, bool) else None
        # A float is a new object, so one that comes back as an argument is this one. Small integers are shared.
        slots: list[int | None] = [self._new_slot(result)] if type(result) is float else [None]
        self._operations.append(_Operation(func, recorded, spec, slots, around, None, decided))

    # ---- running it again

    def _up_to(self, loss: Tensor, gradient: Tensor | None) -> list[_Operation]:
        """The operations up to the last that wrote to the loss, or by which the code decided something.

        What comes later (a log) is no part of it.
        """
        wanted = {self._slots.get(id(t)) for t in (loss, gradient) if t is not None}
        if self._slots.get(id(loss)) is None:
            raise CannotReplay("the loss is not the result of a recorded operation")
        ends = [i for i, op in enumerate(self._operations) if op.decided is not None or wanted & {*op.results} - {None}]
        return self._operations[: ends[-1] + 1] if ends else []

    def check_complete(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Raise where a value may have reached the loss through Python numbers, which do not change in a replay."""
        if self._broken:
            raise CannotReplay(self._broken)
        read = arrays = False
        for op in self._up_to(loss, gradient):
            if op.func in _READS:
                read |= op.decided is None and not op.links
                arrays |= op.func in _ARRAYS
            elif read and (_takes_a_number(op) or (arrays and _takes_a_constant(op))):
                raise CannotReplay("a value was read into Python before the loss was complete, and may be part of it")

    def divides_by_a_tensor(self, loss: Tensor) -> bool:
        """Whether something is divided by a number that was computed outside, such as how many labels count."""
        return any(
            _name(op.func).strip("_") in _DIVISIONS
            and any(isinstance(leaf, Tensor) and leaf.dim() == 0 and not isinstance(leaf, _Slot) for leaf in op.leaves)
            for op in self._up_to(loss, None)
        )

    def replay(
        self,
        outputs: Sequence[Tensor],
        loss: Tensor,
        gradient: Tensor | None,
        *,
        autocast: bool = True,
        only: SomeRows | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss of these outputs, and its gradient with respect to those that have one.

        ``only``: the outputs are of these rows, and so are the constants that the operations take.
        """
        operations, last = self._up_to(loss, gradient), self._slots[id(loss)]
        leaves = [t.detach().clone().requires_grad_() for t in outputs]
        try:
            with self._undisturbed(operations), torch.enable_grad():
                values = self._run(operations, leaves, autocast=autocast, only=only)
                of, weights = values[last], gradient
                if gradient is not None and id(gradient) in self._slots:
                    weights = values[self._slots[id(gradient)]].detach()
                if weights is not None:
                    weights = weights.to(of.dtype)
                own = leaves[: self._differentiated]
                found = torch.autograd.grad(of, own, grad_outputs=weights, allow_unused=True)
        except CannotReplay:
            raise
        except Exception as error:  # whatever the user's operations raise on other outputs
            raise CannotReplay(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}") from error
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(own, found, strict=True)]
        return of.detach(), grads

    def _run(
        self, operations: list[_Operation], leaves: list[Tensor], *, autocast: bool, only: SomeRows | None
    ) -> list[Any]:
        values: list[Any] = [None] * len(self._values)
        for slot, leaf in zip(self.output_slots, leaves, strict=True):
            values[slot] = leaf.clone()  # a leaf could not be written to
        for op in operations:
            if op.func not in _READS or op.links or op.decided is not None:
                _run(op, values, autocast=autocast, only=only)
        return values

    @contextmanager
    def _undisturbed(self, operations: list[_Operation]) -> Iterator[None]:
        devices = [self._device] if self._device.type == "cuda" else []
        draws = any(op.drew is not None for op in operations)
        with torch.random.fork_rng(devices, enabled=draws), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's operations have warned already
            yield


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _counts_rows(func: Any) -> bool:
    """Whether a number among the arguments may be how many rows there are."""
    return _name(func) in _SIZES or _name(func).strip("_") in _ARITHMETIC


def _takes_a_constant(op: _Operation) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in op.leaves)


def _takes_a_number(op: _Operation) -> bool:
    if _name(op.func).strip("_") not in _ARITHMETIC:
        return False
    return any(
        (isinstance(leaf, int | float) and not isinstance(leaf, bool)) or (isinstance(leaf, Tensor) and leaf.dim() == 0)
        for leaf in op.leaves
    )


def _run(op: _Operation, values: list[Any], *, autocast: bool, only: SomeRows | None = None) -> None:
    given = []
    for leaf in op.leaves:
        if isinstance(leaf, _Overwritten):
            values[leaf.number] = leaf.before.clone()
        constant = leaf if only is None else only.of(leaf, op.func)
        given.append(values[leaf.number] if isinstance(leaf, _Slot) else constant)
    args, kwargs = tree_unflatten(given, op.spec)
    if op.drew is not None:
        op.drew.put()
    with torch.set_grad_enabled(op.surroundings.grad), op.surroundings.autocast(allowed=autocast):
        result = op.func(*args, **kwargs)
    if op.decided is not None and result is not op.decided:
        raise AnotherBranch("the code of the loss branches on the outputs of the batch")
    for slot, value in zip(op.results, tree_flatten(result)[0], strict=True):
        if slot is not None:
            values[slot] = value
