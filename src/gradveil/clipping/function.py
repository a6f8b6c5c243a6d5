"""Per-example gradients of any module through torch.func: the rule for layers without one of their own.

The module is run on each example alone, under vmap (or, where an operation cannot be vmapped, in a
loop), with parameters as explicit inputs. On the first call of each kind the result is compared with an
ordinary call on the whole batch: a module whose examples influence each other is caught there.

The ordinary call is the only one that counts: it advances buffers once, and its outputs are handed on (those of
single examples where it draws random numbers, as the draws must be the ones that are differentiated). The backward
pass runs the examples from the same state: inputs, buffers, random numbers and autocast as they were in the forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradveil.clipping._rng import RngState, rng_at, rng_state, same_rng
from gradveil.clipping.decomposable import outputs_agree
from gradveil.clipping.function_inputs import Stamps, batch_dims, refuse_joined_examples
from gradveil.clipping.function_outputs import KindPlan, OutputPlan, Result, has_gradient, to_hand_on
from gradveil.clipping.function_state import Attributes, Autocast, Buffers, no_autocast, no_saved_tensor_hooks
from gradveil.clipping.units import Unit
from gradveil.clipping.uses import MaterialisedUse
from gradveil.errors import UnsupportedModelError

__all__ = ["FunctionCall", "OutputPlan"]

Plain = Callable[..., Any]  # the module's own forward
Found = tuple[list[Tensor], list[Tensor], list[Tensor]]  # outputs, gradients of inputs, gradients of parameters
_CANNOT = (RuntimeError, NotImplementedError, ValueError)  # what vmap raises of operations it does not know


class FunctionCall:
    """One call of a unit, taken apart into flat inputs; runs it per example, forward and backward."""

    plan: KindPlan
    rng: RngState
    buffers: Buffers
    inputs_then: Stamps
    parameters_then: Stamps

    def __init__(self, unit: Unit, plain: Plain, args: Any, kwargs: Any, batch: int, plans: OutputPlan) -> None:
        refuse_joined_examples(unit, args, kwargs)
        self.unit, self.plain, self.batch, self.plans = unit, plain, batch, plans
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.dims = batch_dims(unit, args, kwargs, self.leaves, batch)  # by place among the leaves
        self.batched = list(self.dims)
        if not unit.inputs:
            unit.assumed_dims = dict(self.dims)
        self.differentiable = [i for i in self.batched if self.leaves[i].requires_grad]
        self.device = self.leaves[self.batched[0]].device
        self.autocast = Autocast(self.device)
        self.drew = False  # random numbers, in the forward
        self.vmapped = False  # the forward handed on what came from vmap

    @property
    def kind(self) -> Any:
        """What calls have in common that have the same outputs: structure, flags, and where the batch stands.

        Numbers may change with every call, and count by type alone.
        """

        def of_leaf(place: int, value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.dim(), self.dims.get(place)
            return value if value is None or isinstance(value, bool | str) else type(value)

        return self.spec, self.unit.module.training, [of_leaf(i, v) for i, v in enumerate(self.leaves)]

    def forward(self, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        """The module's outputs that are tensors, on the whole batch; the rest waits in the plans."""
        with no_saved_tensor_hooks():
            return self._forward(parameters)

    def _forward(self, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        self.rng, self.buffers = rng_state(self.device), Buffers(self.unit.module)
        tensors = [v for v in self.leaves if isinstance(v, Tensor)]
        self.inputs_then = Stamps(tensors)
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        result = Result(self.plain(*args, **kwargs))
        self._refuse_changed_inputs()
        self.parameters_then = Stamps(parameters)
        self.drew = not same_rng(self.rng, rng_state(self.device))
        plan = self.plans.find(self.kind, result, self.batch)
        self.plan = self._learn(parameters, result) if plan is None else plan
        outputs = result.tensors
        if self.drew:  # dropout inside: the draws must be those of backward
            found = self._each(parameters, None, leave_advanced=True)[0]
            self.vmapped = not self.plan.loop
            for place, of_examples in zip(self._per_example, found, strict=True):
                outputs[place] = of_examples
        self.plans.expect(result)
        return to_hand_on(outputs, [*tensors, *self.buffers.live()])

    def backward(self, parameters: list[Tensor], grads: tuple[Tensor, ...]) -> tuple[list[Tensor], MaterialisedUse]:
        """Gradients of the differentiable inputs, and the per-example gradients of the parameters."""
        self._refuse_changes_since_forward(parameters)
        wanted = [g for g, known in zip(grads, self.plan.differentiable, strict=True) if known]
        with no_saved_tensor_hooks():
            _, inputs, params = self._each(parameters, wanted)
        return inputs, MaterialisedUse(params)

    # ---- one example at a time

    @property
    def _per_example(self) -> list[int]:
        """The outputs that have a batch dimension."""
        return [i for i, d in enumerate(self.plan.batch_dims) if d is not None]

    def _each(self, parameters: list[Tensor], grads: list[Tensor] | None, leave_advanced: bool = False) -> Found:
        """Run every example by itself; given gradients of the differentiable outputs, differentiate it as well.

        All from the random numbers of the forward. Where vmap fails, now or in an earlier call, in a loop.
        """
        places = self._per_example if grads is None else [i for i, d in enumerate(self.plan.differentiable) if d]
        drawn_by_vmap = self.vmapped and grads is not None
        with no_autocast():  # the module itself is run as it was in the forward; what is around it, without
            if drawn_by_vmap or not self.plan.loop:
                try:
                    return self._tried(parameters, grads, places, leave_advanced)
                except _CANNOT as error:
                    if drawn_by_vmap:
                        raise  # a loop would draw other numbers than those the outputs came from
                    self.plan.loop = True
                    warnings.warn(
                        f"{self.unit.label} cannot be vectorised over examples ({str(error).splitlines()[0]}); "
                        "gradveil runs it one example at a time: right, but slow.",
                        stacklevel=2,
                    )
            with self._same_draws(leave_advanced):
                return self._looped(parameters, grads, places)

    def _tried(
        self, parameters: list[Tensor], grads: list[Tensor] | None, places: list[int], leave_advanced: bool
    ) -> Found:
        """By vmap; where that fails under autocast, once more with autocast around the derivative as well.

        Of some operations (attention with dropout) autograd keeps floats while autocast, below vmap, gives halves.
        """
        try:
            with self._same_draws(leave_advanced):
                return self._vmapped(parameters, grads, places)
        except _CANNOT:
            if grads is None or not self.autocast.on or self.plan.autocast_derivative:
                raise
        self.plan.autocast_derivative = True
        with self._same_draws(leave_advanced):
            return self._vmapped(parameters, grads, places)

    def _vmapped(self, parameters: list[Tensor], grads: list[Tensor] | None, places: list[int]) -> Found:
        values = [self.leaves[i].detach() for i in self.batched]
        wanted = [self.batched.index(i) for i in self.differentiable]

        def example(batched: list[Tensor], cotangents: list[Tensor] | None) -> Any:
            def run(p: list[Tensor], d: list[Tensor]) -> list[Tensor]:
                row = list(batched)
                for place, value in zip(wanted, d, strict=True):
                    row[place] = value
                return self._one(p, row, places)

            if cotangents is None:
                return run(parameters, [batched[w] for w in wanted]), [], []
            _, pull = cast(Any, vjp)(run, parameters, [batched[w] for w in wanted])
            with self.autocast.again() if self.plan.autocast_derivative else nullcontext():
                from_params, from_inputs = pull(cotangents)
            return [], from_inputs, from_params

        of_outputs = [self.plan.batch_dims[i] for i in places]
        in_dims: Any = (list(self.dims.values()), None if grads is None else of_outputs)
        out_dims: Any = (of_outputs, [], 0) if grads is None else ([], [self.dims[i] for i in self.differentiable], 0)
        found: Found = vmap(example, in_dims=in_dims, out_dims=out_dims, randomness="different")(values, grads)
        return found

    def _looped(self, parameters: list[Tensor], grads: list[Tensor] | None, places: list[int]) -> Found:
        """One example at a time with ordinary autograd."""
        of_outputs = [cast(int, self.plan.batch_dims[i]) for i in places]
        outputs: list[list[Tensor]] = []
        found: list[tuple[Tensor, ...]] = []
        for i in range(self.batch):
            with torch.enable_grad():
                weights = [p.detach().requires_grad_() for p in parameters]
                row = [
                    self.leaves[j].select(d, i).detach().requires_grad_(j in self.differentiable)
                    for j, d in self.dims.items()
                ]
                result = self._one(weights, row, places)
            if grads is None:
                outputs.append([o.detach() for o in result])
                continue
            sources = [*weights, *(r for r in row if r.requires_grad)]
            pairs = [(o, g.select(d, i)) for o, g, d in zip(result, grads, of_outputs, strict=True) if o.requires_grad]
            if not pairs:  # what is differentiated does not depend on anything that is
                found.append(tuple(torch.zeros_like(s) for s in sources))
                continue
            of, cotangents = zip(*pairs, strict=True)
            grads_of_one = torch.autograd.grad(of, sources, cotangents, allow_unused=True, materialize_grads=True)
            if any(g.is_sparse for g in grads_of_one):
                raise UnsupportedModelError(
                    f"{self.unit.label} makes sparse gradients (F.embedding with sparse=True, say): clipping and "
                    "Gaussian noise are defined here for dense ones. Leave out sparse=True."
                )
            found.append(grads_of_one)
        whole = [torch.stack(c, dim=d) for c, d in zip(zip(*outputs, strict=True), of_outputs, strict=False)]
        columns = list(zip(*found, strict=True))
        dims = [self.dims[i] for i in self.differentiable]
        inputs = [torch.stack(c, dim=d) for c, d in zip(columns[len(parameters) :], dims, strict=False)]
        return whole, inputs, [torch.stack(c) for c in columns[: len(parameters)]]

    def _one(self, parameters: list[Tensor], batched: list[Tensor], places: list[int]) -> list[Tensor]:
        """Some of the module's outputs for one example; ``batched`` are its inputs without the batch dimension."""
        leaves = list(self.leaves)
        for (i, d), value in zip(self.dims.items(), batched, strict=True):
            leaves[i] = value.unsqueeze(d)
        outputs = self._run_again(parameters, leaves).tensors
        if len(outputs) != len(self.plan.batch_dims):
            raise self._other_outputs(len(outputs), len(self.plan.batch_dims))
        return [outputs[i].select(cast(int, self.plan.batch_dims[i]), 0) for i in places]

    def _run_again(self, parameters: list[Tensor], leaves: list[Any]) -> Result:
        """A run beside the ordinary one: from the state before it, and without a trace."""
        args, kwargs = tree_unflatten(leaves, self.spec)
        swapped = {name: p for names, p in zip(self.unit.places, parameters, strict=True) for name in names}
        attributes = Attributes(self.unit.module)
        try:
            with (
                self.buffers.copied(),
                _reparametrize_module(self.unit.module, swapped),
                self.autocast.again(),
            ):
                return Result(self.plain(*args, **kwargs))
        finally:
            attributes.put_back()

    @contextmanager
    def _same_draws(self, leave_advanced: bool = False) -> Iterator[None]:
        if not self.drew:
            yield
            return
        with rng_at(self.rng, self.device, leave_advanced):
            yield

    # ---- the first call of a kind

    def _learn(self, parameters: list[Tensor], result: Result) -> KindPlan:
        """Where the batch stands in each output, whether vmap works, whether examples are apart."""
        self._refuse_gradients_from_elsewhere(parameters)
        differentiable = [has_gradient(t) for t in result.tensors]
        self.plan = plan = KindPlan(
            result.spec, set(result.constants), self._output_dims(parameters, differentiable), differentiable
        )
        outputs = self._each(parameters, None)[0]
        expected = [result.tensors[i] for i in self._per_example]
        if not plan.loop:
            zeros = [torch.zeros_like(t) for t, known in zip(result.tensors, differentiable, strict=True) if known]
            self._each(parameters, zeros)
        # Random layers differ between the two runs: nothing to compare.
        if not self.drew and not all(map(outputs_agree, outputs, expected)):
            raise UnsupportedModelError(
                f"{self.unit.label} gives other outputs for an example alone than in the batch: it mixes examples "
                "(or takes an input whose first dimension is not the batch): per-example gradients are undefined."
            )
        self.plans.add(self.kind, plan)
        return plan

    def _output_dims(self, parameters: list[Tensor], differentiable: list[bool]) -> list[int | None]:
        """Seen from a run on one example and a run on two copies of it."""
        sizes = []
        for copies in (1, 2):
            leaves = list(self.leaves)
            for i, d in self.dims.items():
                leaves[i] = leaves[i].detach().narrow(d, 0, 1).repeat_interleave(copies, d)
            with self._same_draws():
                sizes.append([tuple(o.shape) for o in self._run_again(parameters, leaves).tensors])
        if not len(sizes[0]) == len(sizes[1]) == len(differentiable):
            raise self._other_outputs(len(sizes[0]), len(differentiable))
        dims: list[int | None] = []
        for one, two, known in zip(*sizes, differentiable, strict=True):
            same = len(one) == len(two)
            differs = [d for d, pair in enumerate(zip(one, two, strict=False)) if pair == (1, 2)] if same else []
            if len(differs) != 1 and known:
                raise UnsupportedModelError(
                    f"{self.unit.label} returns a tensor of shape {two} for two examples and {one} for one: no "
                    "dimension of it is the batch, so its examples cannot be told apart."
                )
            dims.append(differs[0] if len(differs) == 1 else None)
        return dims

    # ---- refusals

    def _refuse_gradients_from_elsewhere(self, parameters: list[Tensor]) -> None:
        """What requires a gradient and is neither a parameter of the module nor an input would not get it."""
        leaves = [v.detach() if isinstance(v, Tensor) else v for v in self.leaves]
        with torch.enable_grad(), self._same_draws():
            outputs = self._run_again([p.detach() for p in parameters], leaves).tensors
        if any(t.requires_grad for t in outputs):
            raise UnsupportedModelError(
                f"{self.unit.label} uses something that needs a gradient and is neither a parameter of its own nor an "
                "input: a parameter of another module, or an activation that was kept as an attribute. It is followed "
                "as a whole, and that gradient would be lost. Give it as an argument, or use a parameter only in the "
                "module that owns it."
            )

    def _other_outputs(self, alone: int, together: int) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.unit.label} returns {together} tensors for the batch and {alone} for one example, so which example "
            "they are of cannot be told. Return tensors with the examples along one dimension."
        )

    def _refuse_changed_inputs(self) -> None:
        changed = self.inputs_then.changed()
        if changed is not None:
            raise UnsupportedModelError(
                f"{self.unit.label} changed its input of shape {tuple(changed.shape)} in place: gradveil runs it again "
                "on each example by itself, and would find another input there. Change a copy: inplace=False, or "
                "x = x * 2 instead of x *= 2."
            )

    def _refuse_changes_since_forward(self, parameters: list[Tensor]) -> None:
        """As autograd does with what it saved."""
        changed = self.inputs_then.changed()
        if changed is not None:
            raise RuntimeError(
                f"an input of {self.unit.label}, of shape {tuple(changed.shape)}, has been modified by an inplace "
                "operation since it was given to the module, which is run on it again in the backward pass: the "
                "gradient would be wrong. Change a copy: h = h * 2 instead of h.mul_(2)."
            )
        changed = self.parameters_then.changed()
        if changed is not None:
            name = next(n for n, p in zip(self.unit.names, parameters, strict=True) if p is changed)
            raise RuntimeError(
                f"parameter {name!r} of {self.unit.label} has been modified by an inplace operation between forward "
                "and backward: the gradient would be wrong. Call optimizer.step() after backward()."
            )
