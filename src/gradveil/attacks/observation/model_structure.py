"""A model's layers as an adversary and as clipping see them: what leaks, what mixes examples, how each is followed.

What a gradient gives away without any search, of one example:

    input      a linear layer with a bias, fed with the input itself: the input, exactly (analytic.py)
    features   a linear layer with a bias, fed with one vector of each example: that vector, exactly
    tokens     an embedding: which rows were looked up
    labels     the last linear layer, with as many outputs as there are classes: the label

Found by running the model on random inputs and looking at what each layer is fed with, and not by its names.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.attacks.observation.made_to_leak import MadeToLeak, made_to_leak
from gradveil.attacks.observation.task import Task, logits_of, loss_of
from gradveil.clipping import Clipper, check_module, fix, make_groups
from gradveil.clipping.operations.table import LAYERS
from gradveil.clipping.tracked_modules import TrackedModule
from gradveil.errors import UnsupportedModelError

_EXAMPLES = 3
_WITH_FORMULAS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MIXES = "mixes examples"  # what every refusal of that kind says


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module whose parameters are clipped by one rule; ``leaks`` is empty where nothing can be read off."""

    name: str
    kind: str
    parameters: int
    clipped_by: str  # "rank-one", "gram", "direct" (rules/linear.py, rules/conv_use.py), "own formula", "torch.func"
    refused: bool
    leaks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    parts: tuple[Part, ...]
    parameters: int
    frozen: int
    groups: int  # with per-layer clipping
    tied: tuple[tuple[str, ...], ...]  # names of one and the same parameter
    leaks: tuple[tuple[str, str], ...]  # layer, and what it gives away
    mixes: tuple[str, ...] = ()  # why examples of a batch are not apart, layer by layer
    unsupported: tuple[str, ...] = ()  # why else private training would be refused
    warnings: tuple[str, ...] = ()
    made_to_leak: tuple[MadeToLeak, ...] = ()  # weights that a server has prepared

    @property
    def can_be_trained(self) -> bool:
        return not (self.mixes or self.unsupported)

    @property
    def can_be_mended(self) -> bool:
        """Whether gradveil.fix does away with everything that is refused."""
        return all("gradveil.fix" in reason for reason in (*self.mixes, *self.unsupported))

    def leaking(self, what: str) -> list[str]:
        return [layer for layer, leak in self.leaks if leak == what]


@dataclass
class _Trial:
    """What came of one private pass on random inputs."""

    refused: str | None = None
    warnings: list[str] = field(default_factory=list)
    units: list[TrackedModule] = field(default_factory=list)


def examine(
    module: nn.Module, *, input_shape: tuple[int, ...], classes: int, seed: int = 0, task: Task | None = None
) -> ModelStructure:
    """Look at a model; it is copied, and left as it is. ``task`` (default: numbers in, classes out): see task.py."""
    module = copy.deepcopy(module)
    task = task or Task(tokens=False, per_token=False, classes=classes)
    generator = torch.Generator().manual_seed(seed)
    if task.tokens:
        x = torch.randint(task.vocabulary, (_EXAMPLES, *input_shape), generator=generator)
    else:
        x = torch.rand(_EXAMPLES, *input_shape, generator=generator).to(next(module.parameters()).dtype)
    leaks = _leaks(module, x, classes)
    refusals = _refusals(module)
    trial = _private_pass(fix(module) if refusals else module, x, task)  # what is left when that is mended?
    reasons = [why for why in dict.fromkeys([*refusals.values(), trial.refused]) if why is not None]
    groups = make_groups(module, "per-layer")
    every = dict(module.named_parameters())
    formulas = _formulas(module, x)
    parts = []
    for group in groups:
        name = "" if group.name == "(root)" else group.name
        parts.append(
            Part(
                name=group.name,
                kind=type(module.get_submodule(name)).__name__,
                parameters=sum(every[n].numel() for n in group.parameters),
                clipped_by=_clipped_by(
                    name, [u for u in trial.units if set(u.names) & set(group.parameters)], formulas
                ),
                refused=name in refusals,
                leaks=tuple(sorted({what for n, what in leaks if n == name})),
            )
        )
    return ModelStructure(
        parts=tuple(parts),
        parameters=sum(p.numel() for p in every.values()),
        frozen=sum(p.numel() for p in every.values() if not p.requires_grad),
        groups=len(groups),
        tied=_tied(module),
        leaks=tuple(leaks),
        mixes=tuple(why for why in reasons if _MIXES in why),
        unsupported=tuple(why for why in reasons if _MIXES not in why),
        warnings=tuple(trial.warnings),
        made_to_leak=tuple(made_to_leak(module)),
    )


def _clipped_by(name: str, units: list[TrackedModule], formulas: Mapping[str, str]) -> str:
    if any(unit.tie is not None for unit in units):
        return "with the layers that share its weight"
    ways = {unit.way for unit in units if unit.rule is None}
    return "torch.func" if "torch.func" in ways else formulas.get(name, "own formula")


def _tied(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(same) for same in names.values() if len(same) > 1)


def _refusals(module: nn.Module) -> dict[str, str]:
    """What check_module has against the model, by layer: it stops at the first, so each is asked by itself."""
    found = {}
    for name, child in module.named_modules():
        if not any(True for _ in child.children()) and (why := _refusal(child)) is not None:
            named = why.replace(" ''", f" {name!r}")
            found[name] = named.replace("parameter '", f"parameter '{name}.") if name else named
    if not found and (why := _refusal(module)) is not None:
        found[""] = why
    return found


def _refusal(module: nn.Module) -> str | None:
    try:
        check_module(module)
    except UnsupportedModelError as error:
        return str(error)
    return None


def _leaks(module: nn.Module, x: Tensor, classes: int) -> list[tuple[str, str]]:
    """(layer, what it gives away), from what the layers are fed with."""
    found: list[tuple[str, str]] = []
    calls: dict[str, int] = {}
    last: list[str] = []

    def look(name: str, layer: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            fed = args[0] if args else None
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                if x.is_floating_point() or (isinstance(fed, Tensor) and torch.equal(fed.flatten(), x.flatten())):
                    found.append((name, "tokens"))  # others look up positions
                return
            if output.shape[-1] == classes:
                last[:] = [name]
            if not isinstance(fed, Tensor) or getattr(layer, "bias", None) is None or fed.numel() % len(x):
                return
            if (
                fed.numel() == x.numel()
                and x.is_floating_point()
                and torch.equal(fed.reshape(len(x), -1), x.flatten(1))
            ):
                # Where it is fed with several rows of each example (tokens, patches), only their weighted sum shows.
                if fed.shape[-1] == x[0].numel():
                    found.append((name, "input"))
            elif fed.numel() == len(x) * fed.shape[-1]:
                found.append((name, "features"))

        return hook

    kinds = nn.Linear | nn.Embedding | nn.EmbeddingBag
    # The gradient of a tied weight is the sum over its uses: no single one can be read off it, but for tokens.
    shared = {name.rpartition(".")[0] for names in _tied(module) for name in names}
    layers = {n: m for n, m in module.named_modules() if isinstance(m, kinds) and _trains(m)}
    layers = {n: m for n, m in layers.items() if n not in shared or not isinstance(m, nn.Linear)}
    handles = [m.register_forward_hook(look(n, m)) for n, m in layers.items()]
    _run_with_hooks(module, x, handles)
    once = [(name, what) for name, what in found if calls[name] == 1 or what == "tokens"]
    return once + [(name, "labels") for name in last]


def _formulas(module: nn.Module, x: Tensor) -> dict[str, str]:
    """Which way each layer with a choice of formulas takes to its norms, by the sizes it meets."""
    found: dict[str, str] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(layer: Any, args: tuple[Any, ...], output: Any) -> None:
            rest: tuple[Any, ...] = ()
            if isinstance(layer, nn.Linear):
                op = LAYERS[F.linear]
            else:
                op = LAYERS[{1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(layer.kernel_size)]]
                rest = (layer.stride, layer.padding, layer.dilation, layer.groups)
            fed, weight, bias, statics = op.bind(args[0], layer.weight, layer.bias, *rest)
            rule = op.make_rule(statics)
            assert weight is not None
            out, kept = rule.forward(fed, weight, bias)
            _, use = rule.backward(fed, weight, kept, out, (False, True, bias is not None))
            found[name] = str(getattr(use, "formula", "own formula"))

        return hook

    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, _WITH_FORMULAS) and _trains(m)]
    _run_with_hooks(module, x, [m.register_forward_hook(look(n)) for n, m in layers])
    return found


def _run_with_hooks(module: nn.Module, x: Tensor, handles: list[Any]) -> None:
    modes = {child: child.training for child in module.modules()}
    try:
        with torch.no_grad():
            module.eval()(x)
    finally:
        for child, mode in modes.items():
            child.training = mode
        for handle in handles:
            handle.remove()


def _trains(layer: nn.Module) -> bool:
    return all(p.requires_grad for p in layer.parameters())


def _private_pass(module: nn.Module, x: Tensor, task: Task) -> _Trial:
    """One clipped backward pass, as training would do it: what is refused, and what is only warned of."""
    module = copy.deepcopy(module).train()
    groups = make_groups(module, "per-layer")
    y = torch.arange(len(x)) % task.classes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            clipper = Clipper(module, groups, bounds=(1.0,) * len(groups), loss_reduction="mean")
            loss_of(task, logits_of(module(x)), x, y).backward()
        except UnsupportedModelError as error:
            return _Trial(refused=str(error))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return _Trial(refused=f"a private pass fails: {(str(error).splitlines() or [type(error).__name__])[0]}")
    return _Trial(warnings=[str(w.message) for w in caught if "gradveil" in str(w.message)], units=list(clipper.units))
