"""Any other operation: the gradients of its parameters example by example, through torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradveil.clipping.backward_pass import Call
from gradveil.clipping.operations.layout import Layout
from gradveil.clipping.operations.plan import Site
from gradveil.clipping.operations.sources import Source
from gradveil.clipping.operations.table import writes_in_place
from gradveil.clipping.per_sample_grads import MaterializedGrads, at_least_float32
from gradveil.clipping.validation.surroundings import Autocast, no_autocast, no_saved_tensor_hooks
from gradveil.errors import UnsupportedModelError

if TYPE_CHECKING:
    from gradveil.clipping.operations.tracking import Tracking

_WARNED: set[str] = set()


class Operation:
    """One call of an operation: its function with all arguments but the tensors bound."""

    def __init__(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [self.leaves[i] for i in self.places]
        self.out_spec: Any = None

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        leaves = list(self.leaves)
        for place, t in zip(self.places, tensors, strict=True):
            leaves[place] = t
        args, kwargs = tree_unflatten(leaves, self.spec)
        found, self.out_spec = tree_flatten(self.func(*args, **kwargs))
        return found


class OperationFunction(torch.autograd.Function):
    """The operation, with gradients of its batch data as ever, and those of its parameters apart by example."""

    @staticmethod
    def forward(ctx: Any, tap: _Tap, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tap, ctx.tensors = tap, tensors
        out = [t.clone() if t._is_view() else t for t in tap.operation([t.detach() for t in tensors])]
        ctx.mark_non_differentiable(*(t for t in out if not (t.is_floating_point() or t.is_complex())))
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tap: _Tap = ctx.tap
        with no_autocast(), no_saved_tensor_hooks(), tap.autocast.again(), torch.enable_grad():
            try:
                to_inputs = tap.input_gradients(ctx.tensors, grads, ctx.needs_input_grad[1:])
                found = tap.per_example(ctx.tensors, grads)
            except Exception as error:  # what torch.func cannot do, or the operation on one example
                reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
                raise UnsupportedModelError(
                    f"{tap.name}() uses a parameter and has no rule, and its gradients could not be computed example "
                    f"by example either ({reason}). Write it with operations that have a rule."
                ) from error
        edges = [ctx.next_functions[i] for i in tap.tracked]  # of tensors only
        with no_autocast():
            tap.clipper.collect(tap.call, MaterializedGrads([at_least_float32(g.detach()) for g in found]), edges)
        return None, *to_inputs


class _Tap:
    """What an :class:`OperationFunction` goes by. ``layouts``: of all tensors, and of the results."""

    def __init__(
        self,
        tracking: Tracking,
        call: Call,
        operation: Operation,
        tracked: Sequence[int],
        layouts: Sequence[Layout | None],
        out: Layout | None,
    ) -> None:
        self.clipper, self.call, self.operation, self.rows = tracking.clipper, call, operation, tracking.current.rows
        self.tracked, self.layouts, self.out = list(tracked), list(layouts), out
        self.autocast, self.name = Autocast(operation.tensors[0].device), call.unit.label

    def input_gradients(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        wanted = [i for i, need in enumerate(needs) if need and i not in self.tracked]
        found: list[Tensor | None] = [None] * len(tensors)
        if wanted:
            leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
            pairs = [(o, g) for o, g in zip(self.operation(leaves), grads, strict=True) if o.requires_grad]
            outs, given = [o for o, _ in pairs], [g for _, g in pairs]
            for i, g in zip(
                wanted, torch.autograd.grad(outs, [leaves[i] for i in wanted], given, allow_unused=True), strict=True
            ):
                found[i] = g
        return found

    def per_example(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Of every tracked tensor, (B, ...)."""
        parameters = [tensors[i].detach() for i in self.tracked]
        others = [t.detach() for i, t in enumerate(tensors) if i not in self.tracked]
        apart = [layout for i, layout in enumerate(self.layouts) if i not in self.tracked]
        given = [i for i, g in enumerate(grads) if g.is_floating_point() or g.is_complex()]

        def of_one(xs: tuple[Tensor, ...], gs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            def run(*ps: Tensor) -> tuple[Tensor, ...]:
                rest, mine = iter(xs), iter(ps)
                out = self.operation([next(mine) if i in self.tracked else next(rest) for i in range(len(tensors))])
                return tuple(out[i] for i in given)

            pull: Any = torch.func.vjp(run, *parameters)[1]
            found: tuple[Tensor, ...] = pull(gs)
            return found

        gs = [grads[i] for i in given]
        if self.rows == 1:
            return [g.unsqueeze(0) for g in of_one(tuple(others), tuple(gs))]
        xs = [_examples(x, layout, self.rows) for x, layout in zip(others, apart, strict=True)]
        gs = [_examples(g, self.out, self.rows) for g in gs]
        dims = tuple(None if layout is None else 0 for layout in apart)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return list(
                    torch.func.vmap(of_one, in_dims=(dims, (0,) * len(gs)), randomness="same")(tuple(xs), tuple(gs))
                )
        except RuntimeError:
            found = [
                of_one(tuple(x if d is None else x[i] for x, d in zip(xs, dims, strict=True)), tuple(g[i] for g in gs))
                for i in range(self.rows)
            ]
            return [torch.stack(column) for column in zip(*found, strict=True)]


def _examples(t: Tensor, layout: Layout | None, rows: int) -> Tensor:
    """(B, ...) with as many further dimensions as the tensor has: what each example holds of it."""
    if layout is None:
        return t
    apart = layout.front(t, rows)
    assert apart is not None
    front, more = apart[0], apart[0].dim() - t.dim()
    if more == 0:
        return front.unsqueeze(layout.dim + 1)
    return front.flatten(layout.dim + 1, layout.dim + 2) if more == 2 else front


def run(
    tracking: Tracking,
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    site: Site,
    tracked: Sequence[Source],
    others: Sequence[Tensor],
) -> Any:
    """The operation, followed example by example."""
    from gradveil.clipping.operations.mode import name_of

    operation = Operation(func, args, kwargs)
    name, rows = name_of(func), tracking.current.rows
    layouts = iter(site.layouts)
    all_layouts = [None if tracking.tracks(t) else next(layouts, None) for t in operation.tensors]
    sizes_fit = all(
        layout is None or layout.front(t, rows) is not None
        for layout, t in zip(all_layouts, operation.tensors, strict=True)
    )
    if writes_in_place(func) or (rows > 1 and (site.out is None or not sizes_fit)):
        raise tracking.refusal(func, tracked, "there is no rule for it", "Write it with operations that have one")
    if name not in _WARNED:
        _WARNED.add(name)
        warnings.warn(
            f"gradveil has no rule for {name}(): the gradients of its parameters are computed example by example "
            "through torch.func, which is slow and takes the memory of one gradient per example.",
            stacklevel=2,
        )
    places = [i for i, t in enumerate(operation.tensors) if tracking.tracks(t)]
    sources = [tracking.known[id(operation.tensors[i])] for i in places]
    unit = tracking.clipper.units.of_operation(name, sources, way="torch.func")
    call = Call(unit, tracking.current, again=tracking.again, sources=sources)
    tap = _Tap(tracking, call, operation, places, all_layouts, site.out)
    given = [tracking.known[id(t)].given() if tracking.tracks(t) else t for t in operation.tensors]
    out = OperationFunction.apply(tap, *given)
    return tree_unflatten(list(out), operation.out_spec)
