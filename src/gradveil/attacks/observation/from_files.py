"""A user's own files as a target: a model factory, its weights, gradients, and what is public about them.

    module = load_factory("package.module:function")         # called without arguments; gives an nn.Module
    seen = load_observation(module, read_tensors("gradients.safetensors"), input_shape=(1, 28, 28), clip=4.0, sigma=6.0)

Gradients are named as the model's parameters are, and have their shapes, or one dimension more in front: V victims.
Everything is compared with the model before an attack is given it.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from gradveil.attacks.observation.task import find_task
from gradveil.attacks.observation.views import VIEWS, GroundTruth, Observation, Public, ReleaseParams, StepObservation
from gradveil.clipping.groups import Clipping, make_groups
from gradveil.errors import ConfigError, DataError, UnknownNameError


def load_factory(spec: str, *, seed: int = 0) -> nn.Module:
    """What ``package.module:function`` returns, called without arguments and with torch's generator at ``seed``.

    Modules are looked for in the working directory too. Runs the user's code.
    """
    made = called(spec, "model", seed=seed)
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{spec}() returned a {type(made).__name__}, not a torch.nn.Module.")
    return made


def called(spec: str, what: str, *, seed: int = 0) -> Any:
    """What the function ``package.module:function`` returns, which makes ``what``. Runs the user's code."""
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"the {what} is {spec!r}; name a function that makes it, as package.module:function.")
    with _working_directory_importable():
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"module {error.name!r} of the {what} {spec!r} cannot be found. Install it, or call gradveil from the "
                "directory it lies in."
            ) from None
        except Exception as error:
            raise ConfigError(f"importing {module_name!r} failed with {type(error).__name__}: {error}.") from error
        factory = getattr(found, function_name, None)
        if factory is None:
            raise UnknownNameError(f"function in {module_name!r}:", function_name, _callables(found))
        if not callable(factory) or isinstance(factory, nn.Module):
            raise ConfigError(f"{spec!r} is a {type(factory).__name__}, not a function that makes a {what}.")
        torch.manual_seed(seed)
        try:
            return factory()
        except Exception as error:
            raise ConfigError(
                f"{spec}() failed with {type(error).__name__}: {error}. It is called without arguments and makes the "
                f"{what}."
            ) from error


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """As ``python -m`` has it, and a console script has not."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _callables(module: object) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return dict(safetensors.torch.load(path.read_bytes()))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} is not a safetensors file ({error}). Write it with safetensors.torch.save_file; pickles are not "
            "read."
        ) from None


def load_weights(module: nn.Module, path: Path) -> None:
    """A state of the model, from a safetensors file, into it."""
    tensors = read_tensors(path)
    check_state(module, tensors, str(path))
    module.load_state_dict(tensors, strict=False)  # of tied weights one name is enough


def load_observation(
    module: nn.Module,
    gradients: Mapping[str, Tensor],
    *,
    input_shape: tuple[int, ...],
    classes: int | None = None,
    view: str = "batch",
    clip: float | None = None,
    sigma: float | None = None,
    sensitivity: float | None = None,
    batch: int | None = None,
    batch_size: int | None = None,
    clipping: Clipping = "per-layer",
    public: Public | None = None,
    device: str | torch.device = "cpu",
    where: str = "the gradients",
) -> Observation:
    """Gradients that a user has, at the module's weights, with what is public about their release.

    view          what they are: "batch", the mean of B examples; the others are of one example (see observe.py)
    clip          each example's gradient was scaled down to this norm, group by group; None: it was not
    sigma         noise of sigma * S / B is on them; None: none
    sensitivity   S (default: ``clip``)
    batch         how many examples are behind a gradient (default: ``batch_size``, or 1)
    batch_size    B, by which the mean and its noise were divided (default: ``batch``)
    public        what the adversary knows of such data beforehand
    """
    if view not in VIEWS:
        raise UnknownNameError("view", view, VIEWS)
    for name, value in (("clip", clip), ("sigma", sigma), ("sensitivity", sensitivity)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} is {value!r}; give a positive number, or leave it out where there is none.")
    for name, number in (("batch", batch), ("batch size", batch_size), ("classes", classes)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}; give at least 1.")
    single = view != "batch"
    if single and batch not in (None, 1):
        raise ConfigError(f"view {view!r} is of one example, and {batch} were said to be behind each gradient.")
    noised_by = None if view == "per-example" or sigma is None else sensitivity or clip
    if sigma is not None and view != "per-example" and noised_by is None:
        raise ConfigError(
            f"sigma is {sigma:g}, and the noise is sigma times a sensitivity that was not given. Give clip, to which "
            "it defaults, or sensitivity."
        )
    module = module.to(device).eval()  # gradients as the attacker can compute them: no dropout
    examples = 1 if single else batch or batch_size or 1
    mean_over = float(batch_size or examples)
    groups = make_groups(module, clipping)
    private = clip is not None or noised_by is not None
    defence = ReleaseParams(
        groups=groups,
        clip=None if clip is None else (clip,) * len(groups),
        noise_std=None if noised_by is None or sigma is None else (sigma * noised_by / mean_over,) * len(groups),
        normaliser=1.0 if single else mean_over,
        strategy="as given" if private else "non-private",
        sensitivity_rule=("clip" if sensitivity in (None, clip) else None) if private else None,
    )
    sight = StepObservation(
        step=0,
        gradients=_by_victim(module, {n: t.to(device) for n, t in gradients.items()}, where),
        weights=state_of(module),
        defence=defence,
    )
    count = classes or count_classes(module, input_shape)
    return Observation(
        module=module, sights=(sight,), input_shape=input_shape, classes=count, batch=examples, public=public
    )


def _by_victim(module: nn.Module, gradients: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters())
    _check_names(module, gradients, where)
    one = all(t.dim() == parameters[n].dim() for n, t in gradients.items())
    seen = {n: (t.unsqueeze(0) if one else t).to(parameters[n].dtype) for n, t in gradients.items()}
    check_gradients(module, seen, where)
    return seen


def _check_names(module: nn.Module, gradients: Mapping[str, Tensor], where: str) -> None:
    """Refuse gradients that are not named as the model's trainable parameters are."""
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    missing, strange = [n for n in names if n not in gradients], [n for n in gradients if n not in names]
    if missing:
        raise ConfigError(
            f"{where}: no gradient for the parameter {missing[0]!r}{_others(missing)}; model and gradients do not "
            "belong together. Gradients are named as in model.named_parameters(); what does not train is frozen "
            "(requires_grad_(False))."
        )
    if strange:
        raise ConfigError(
            f"{where}: a gradient {strange[0]!r}{_others(strange)} that is of no trainable parameter of the model; "
            f"model and gradients do not belong together. The model has: {', '.join(names[:8])}"
            f"{' ...' if len(names) > 8 else ''}."
        )


def check_gradients(module: nn.Module, gradients: Mapping[str, Tensor], where: str) -> None:
    """Refuse gradients (V, *shape) that do not fit the model by name or shape, or are not finite."""
    _check_names(module, gradients, where)
    victims = len(next(iter(gradients.values())))
    for name, parameter in module.named_parameters():
        if name not in gradients:
            continue
        gradient = gradients[name]
        if gradient.shape[1:] != parameter.shape or len(gradient) != victims or not victims:
            raise ConfigError(
                f"{where}: the gradient of {name!r} has shape {tuple(gradient.shape[1:])} for each of {len(gradient)} "
                f"victim(s), the parameter has {tuple(parameter.shape)}: model and gradients do not belong together."
            )
        lost = int((~torch.isfinite(gradient)).sum())
        if lost:
            raise ConfigError(
                f"{where}: {lost} of {gradient.numel()} values of the gradient of {name!r} are not finite (NaN or "
                "infinite): nothing can be matched to them. Remove that victim, or export the gradients again."
            )


def check_state(module: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Refuse a state that is of another model. Of a tensor with several names (tied weights) one is enough."""
    own = module.state_dict()
    held = {own[n].data_ptr() for n in own if n in state and isinstance(own[n], Tensor) and own[n].numel()}
    wrong = [n for n in own if n not in state and not (isinstance(own[n], Tensor) and own[n].data_ptr() in held)] + [
        n for n in state if n not in own
    ]
    wrong += [n for n in own if n in state and isinstance(own[n], Tensor) and own[n].shape != state[n].shape]
    if wrong:
        raise ConfigError(
            f"{where}: the weights do not belong to this model: {wrong[0]!r}{_others(wrong)} is missing, unknown or of "
            "another shape. Give the factory of the model they were saved from."
        )


def state_of(module: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A model's state (default: its own), each tensor under one name: functional calls take no tied one twice."""
    once = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
    return {n: t.detach() for n, t in (state or module.state_dict()).items() if n in once}


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def count_classes(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """How many logits the model gives for an input; refused where it does not take one of that shape."""
    return find_task(module, input_shape).classes


def load_public(tensors: Mapping[str, Tensor], input_shape: tuple[int, ...], where: str) -> Public:
    """Examples that anyone may have: ``x`` (n, *shape) and, where they are known, ``y`` (n)."""
    x, y = tensors.get("x"), tensors.get("y")
    if x is None or tuple(x.shape[1:]) != input_shape or not len(x) or (y is not None and y.shape != x.shape[:1]):
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        raise DataError(
            f"{where} holds {shapes}; examples that are public are x of shape {('n', *input_shape)} and, if known, "
            "their labels y."
        )
    return Public(x.float(), None if y is None else y.long())


def load_ids(tensors: Mapping[str, Tensor], seen: Observation, vocabulary: int, where: str) -> Tensor:
    """The token ids behind the gradients, for scoring: ``x`` or ``input_ids`` as (V, B, T), or one row of them all."""
    ids = tensors.get("x", tensors.get("input_ids"))
    shape = (seen.victims, seen.batch, *seen.input_shape)
    if ids is None or ids.numel() != math.prod(shape) or ids.is_floating_point():
        shapes = {name: f"{tuple(t.shape)} of {t.dtype}" for name, t in tensors.items()}
        raise DataError(f"{where} holds {shapes}; the truth is x, token ids (whole numbers) of shape {shape}.")
    ids = ids.long().reshape(shape)
    if int(ids.min()) < -1 or int(ids.max()) >= vocabulary:
        raise DataError(
            f"{where}: ids run from {int(ids.min())} to {int(ids.max())}, and the model's vocabulary has {vocabulary} "
            "tokens. (-1 stands for no token.)"
        )
    return ids


def load_truth(tensors: Mapping[str, Tensor], seen: Observation, where: str) -> GroundTruth:
    """The examples behind the gradients, for scoring: ``x`` (V, B, *shape) and ``y`` (V, B), or one row of them all."""
    if "x" not in tensors or "y" not in tensors:
        raise DataError(f"{where} holds {sorted(tensors)}; the truth is two tensors, x and y.")
    whole = (seen.victims, seen.batch)
    x, y = tensors["x"].float(), tensors["y"].long()
    size = seen.victims * seen.batch
    if x.numel() != size * math.prod(seen.input_shape) or y.numel() != size:
        raise ConfigError(
            f"{where}: x has shape {tuple(x.shape)} and y {tuple(y.shape)}; for {seen.victims} victim(s) of "
            f"{seen.batch} example(s) they are {(*whole, *seen.input_shape)} and {whole}."
        )
    return GroundTruth(x.reshape(*whole, *seen.input_shape).to(seen.device), y.reshape(whole).to(seen.device))
