"""Outputs of a module that is followed as a whole: what its calls taught about them, and how they are handed on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Result:
    """What a module returned, taken apart: its tensors, and the rest."""

    def __init__(self, returned: Any) -> None:
        leaves, self.spec = tree_flatten(returned)
        self.constants = {i: v for i, v in enumerate(leaves) if not isinstance(v, Tensor)}
        self.tensors: list[Tensor] = [v for v in leaves if isinstance(v, Tensor)]


def has_gradient(t: Tensor) -> bool:
    """Whether an output of this type can have one; integers and bools cannot."""
    return t.is_floating_point() or t.is_complex()


@dataclass(eq=False)
class KindPlan:
    """What calls of one kind taught about their outputs; the lists run over those that are tensors."""

    spec: TreeSpec
    constants: set[int]  # which of all outputs are not tensors
    batch_dims: list[int | None]  # None: integers or bools that are not per example
    differentiable: list[bool]
    loop: bool = False  # it cannot be vmapped
    autocast_derivative: bool = False  # under autocast it is differentiated under autocast as well

    def fits(self, result: Result, batch: int) -> bool:
        """Whether a call of this kind had outputs of the same kind."""
        return (
            len(result.tensors) == len(self.batch_dims)
            and result.constants.keys() == self.constants
            and all(has_gradient(t) == known for t, known in zip(result.tensors, self.differentiable, strict=True))
            and all(
                d is None or t.shape[d : d + 1] == (batch,)
                for t, d in zip(result.tensors, self.batch_dims, strict=True)
            )
            and result.spec == self.spec
        )


class OutputPlan:
    """What calls of a unit taught about its outputs, by kind of call, and the result of the call under way."""

    def __init__(self) -> None:
        self._plans: list[tuple[Any, KindPlan]] = []
        self._result: Result | None = None

    def find(self, kind: Any, result: Result, batch: int) -> KindPlan | None:
        """The plan for such a call; None: nothing was learned of it yet."""
        return next((plan for known, plan in self._plans if known == kind and plan.fits(result, batch)), None)

    def add(self, kind: Any, plan: KindPlan) -> None:
        self._plans.append((kind, plan))

    def expect(self, result: Result) -> None:
        """The whole batch's result, which :meth:`assemble` is to give next, with other tensors in it."""
        result.tensors = []  # whoever holds on to a result must not keep a graph alive
        self._result = result

    def assemble(self, tensors: tuple[Tensor, ...]) -> Any:
        """The module's result, put together again."""
        assert self._result is not None
        result, self._result = self._result, None
        rest, constants = iter(tensors), result.constants
        leaves = [constants[i] if i in constants else next(rest) for i in range(result.spec.num_leaves)]
        return tree_unflatten(leaves, result.spec)


def to_hand_on(outputs: Iterable[Tensor], held: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The outputs as an autograd function may return them and others may change them in place.

    Copies of what is a view, a parameter, or held elsewhere (an input, a buffer); all else as it is.
    """
    taken = {id(t) for t in held}
    return tuple(o.clone() if o._is_view() or id(o) in taken or isinstance(o, nn.Parameter) else o for o in outputs)
