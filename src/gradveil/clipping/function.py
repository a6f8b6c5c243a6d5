"""Per-example gradients of any module through torch.func: the rule for layers without one of their own.

The module is run on each example alone, under vmap (or, where an operation cannot be vmapped, in a
loop), with parameters as explicit inputs. On its first call the result is compared with an ordinary
call on the whole batch: a module whose examples influence each other is caught there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gradveil.clipping._rng import rng_at, rng_state, same_rng
from gradveil.clipping.decomposable import outputs_agree
from gradveil.clipping.units import Unit
from gradveil.clipping.uses import MaterialisedUse
from gradveil.errors import UnsupportedModelError

Plain = Callable[..., Any]  # the module's own forward


class FunctionCall:
    """One call of a unit, taken apart into flat inputs; runs it per example, forward and backward."""

    def __init__(self, unit: Unit, plain: Plain, args: Any, kwargs: Any, batch: int, plan: OutputPlan) -> None:
        self.unit, self.plain, self.batch, self.plan = unit, plain, batch, plan
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.batched = [
            i
            for i, v in enumerate(self.leaves)
            if isinstance(v, Tensor)
            and v.dim() > 0
            and v.shape[0] == batch
            and unit.inputs.get(i, "examples") == "examples"
        ]
        if not self.batched:
            shapes = [tuple(v.shape) for v in self.leaves if isinstance(v, Tensor)]
            raise UnsupportedModelError(
                f"{unit.label} was called with inputs of shape {shapes}, none with the batch of {batch} first, so its "
                "examples cannot be told apart. Put the batch dimension first (batch_first=True)."
            )
        self.differentiable = [i for i in self.batched if self.leaves[i].requires_grad]
        self.device = self.leaves[self.batched[0]].device
        self.rng: tuple[Tensor, Tensor | None] | None = None

    def one(self, parameters: list[Tensor], *batched: Tensor) -> tuple[Tensor, ...]:
        """The module's flat outputs for one example; ``batched`` are its inputs without the batch dimension."""
        leaves = list(self.leaves)
        for i, value in zip(self.batched, batched, strict=True):
            leaves[i] = value.unsqueeze(0)
        outputs = self.whole(parameters, leaves)
        return tuple(o.select(d, 0) for o, d in zip(outputs, self.plan.batch_dims or (), strict=True))

    def whole(self, parameters: list[Tensor], leaves: list[Any]) -> list[Tensor]:
        args, kwargs = tree_unflatten(leaves, self.spec)
        prefix = len(self.unit.name) + 1 if self.unit.name else 0
        swapped = {name[prefix:]: p for name, p in zip(self.unit.names, parameters, strict=True)}
        with _reparametrize_module(self.unit.module, swapped, tie_weights=True):
            result = self.plain(*args, **kwargs)
        leaves, self.plan.spec = tree_flatten(result)
        self.plan.constants = {i: v for i, v in enumerate(leaves) if not isinstance(v, Tensor)}
        return [v for v in leaves if isinstance(v, Tensor)]

    def forward(self, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        with _no_saved_tensor_hooks():
            return self._forward(parameters)

    def _forward(self, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        self.rng = rng_state(self.device)
        plain = self.whole(parameters, self.leaves)
        drew = not same_rng(self.rng, rng_state(self.device))
        if self.plan.batch_dims is None:
            self._learn(parameters, plain, drew)
        if not drew:
            return tuple(plain)
        with rng_at(self.rng, self.device, leave_advanced=True):  # dropout inside: the draws must be those of backward
            return self._each(parameters, None)[0]

    def backward(self, parameters: list[Tensor], grads: tuple[Tensor, ...]) -> tuple[list[Tensor], MaterialisedUse]:
        """Gradients of the differentiable inputs, and the per-example gradients of the parameters."""
        assert self.rng is not None
        with _no_saved_tensor_hooks(), rng_at(self.rng, self.device):
            _, inputs, params = self._each(parameters, grads)
        return inputs, MaterialisedUse(params)

    def _each(
        self, parameters: list[Tensor], grads: tuple[Tensor, ...] | None
    ) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
        """Run (and, given output gradients, differentiate) every example by itself."""
        if self.plan.loop:
            return self._looped(parameters, grads)
        values = [self.leaves[i].detach() for i in self.batched]
        wanted = [self.batched.index(i) for i in self.differentiable]
        dims = tuple(self.plan.batch_dims or ())

        def example(batched: list[Tensor], cotangents: tuple[Tensor, ...] | None) -> Any:
            def run(p: list[Tensor], d: list[Tensor]) -> tuple[Tensor, ...]:
                row = list(batched)
                for place, value in zip(wanted, d, strict=True):
                    row[place] = value
                return self.one(p, *row)

            if cotangents is None:
                return run(parameters, [batched[w] for w in wanted]), [], []
            outputs, pull = cast(Any, vjp)(run, parameters, [batched[w] for w in wanted])
            from_params, from_inputs = pull(cotangents)
            return outputs, from_inputs, from_params

        in_dims: Any = (0, None if grads is None else dims)
        out_dims: Any = (dims, 0, 0)
        mapped = vmap(example, in_dims=in_dims, out_dims=out_dims, randomness="different")
        outputs, inputs, params = mapped(values, grads)
        return outputs, inputs, params

    def _looped(
        self, parameters: list[Tensor], grads: tuple[Tensor, ...] | None
    ) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
        """One example at a time with ordinary autograd."""
        dims = tuple(self.plan.batch_dims or ())
        outputs, inputs, params = [], [], []
        for i in range(self.batch):
            with torch.enable_grad():
                weights = [p.detach().requires_grad_() for p in parameters]
                row = [self.leaves[j][i].detach().requires_grad_(j in self.differentiable) for j in self.batched]
                result = self.one(weights, *row)
            outputs.append([o.detach() for o in result])
            if grads is not None:
                sources = [*weights, *(r for r in row if r.requires_grad)]
                cotangents = [g.select(d, i) for g, d in zip(grads, dims, strict=True)]
                found = torch.autograd.grad(result, sources, cotangents, allow_unused=True, materialize_grads=True)
                params.append(found[: len(weights)])
                inputs.append(found[len(weights) :])
        whole = tuple(torch.stack(c, dim=d) for c, d in zip(zip(*outputs, strict=True), dims, strict=True))
        return (
            whole,
            [torch.stack(c) for c in zip(*inputs, strict=True)],
            [torch.stack(c) for c in zip(*params, strict=True)],
        )

    def _learn(self, parameters: list[Tensor], plain: list[Tensor], drew: bool) -> None:
        """First call: where the batch stands in each output, whether vmap works, whether examples are apart."""
        with rng_at(rng_state(self.device), self.device):
            sizes = []
            for copies in (1, 2):
                leaves = list(self.leaves)
                for i in self.batched:
                    leaves[i] = leaves[i].detach()[:1].repeat_interleave(copies, 0)
                sizes.append([tuple(o.shape) for o in self.whole(parameters, leaves)])
            dims = []
            for one, two in zip(*sizes, strict=True):
                differs = [d for d, (a, b) in enumerate(zip(one, two, strict=True)) if (a, b) == (1, 2)]
                if len(differs) != 1:
                    raise UnsupportedModelError(
                        f"{self.unit.label} returns a tensor of shape {two} for two examples and {one} for one: no "
                        "dimension of it is the batch, so its examples cannot be told apart."
                    )
                dims.append(differs[0])
            self.plan.batch_dims = dims
            try:
                outputs = self._each(parameters, None)[0]
                self._each(parameters, tuple(torch.zeros_like(o) for o in outputs))
            except (RuntimeError, NotImplementedError, ValueError) as error:
                self.plan.loop = True
                warnings.warn(
                    f"{self.unit.label} cannot be vectorised over examples ({str(error).splitlines()[0]}); gradveil "
                    "runs it one example at a time: right, but slow.",
                    stacklevel=2,
                )
                outputs = self._each(parameters, None)[0]
        if drew:
            return  # random layers differ between the two runs; nothing to compare
        for got, expected in zip(outputs, plain, strict=True):
            if not outputs_agree(got, expected):
                raise UnsupportedModelError(
                    f"{self.unit.label} gives other outputs for an example alone than in the batch: it mixes examples "
                    "(or takes an input whose first dimension is not the batch): per-example gradients are undefined."
                )


@contextmanager
def _no_saved_tensor_hooks() -> Iterator[None]:
    """Take off hooks on saved tensors, such as those of activation checkpointing, while examples are run by themselves.

    What is saved in here never leaves; a checkpoint would count it, and torch.func refuses to run under such hooks.
    """
    autograd = cast(Any, torch._C._autograd)
    taken = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


class OutputPlan:
    """What calls of a unit taught about its outputs."""

    def __init__(self) -> None:
        self.batch_dims: list[int] | None = None
        self.spec: TreeSpec | None = None
        self.constants: dict[int, Any] = {}  # outputs that are not tensors, such as None
        self.loop = False

    def assemble(self, tensors: tuple[Tensor, ...]) -> Any:
        """The module's result, put together again."""
        assert self.spec is not None
        rest = iter(tensors)
        leaves = [self.constants[i] if i in self.constants else next(rest) for i in range(self.spec.num_leaves)]
        return tree_unflatten(leaves, self.spec)
