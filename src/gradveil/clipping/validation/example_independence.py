"""What is compared, or looked at, on checked batches: outputs, buffers, and two ways in which a loss mixes examples.

Clipping bounds an example's influence only if the gradient of example i's loss depends on example i alone. A loss that
compares examples (contrastive, ranking, batch-normalised losses) breaks that silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.clipping.outputs import tensors_in
from gradveil.clipping.validation.row_differences import are_masks
from gradveil.clipping.validation.surroundings import same_value
from gradveil.errors import UnsupportedModelError


def check_state(of_batch: Mapping[str, Any], of_others: Mapping[str, Any]) -> None:
    """Refuse state that a forward pass computes from the examples: it leaves with the model, and no noise covers it.

    Given is what a pass has changed of the model, by name, and what a pass on other examples has.
    """
    for name in {**of_batch, **of_others}:
        if name in of_batch and name in of_others and same_value(of_batch[name], of_others[name]):
            continue
        raise UnsupportedModelError(
            f"{name!r} is computed from the examples of the batch (a running mean, a count or a first value, say): it "
            "is part of the model's state_dict, and nothing bounds or noises what it tells of them. Put its module "
            "into eval mode, or leave it out."
        )


def check_same_output(followed: Any, plain: list[Tensor]) -> None:
    """Refuse a model that computes something else when it is followed."""
    found = tensors_in(followed)
    if len(found) == len(plain) and all(outputs_agree(a, b) for a, b in zip(found, plain, strict=True)):
        return
    raise UnsupportedModelError(
        "tracking the parameters changed the model's output, so its gradients would be those of another model. Look "
        "for forward code that depends on the type or identity of a tensor, or that draws random numbers of its own."
    )


def outputs_agree(a: Tensor, b: Tensor) -> bool:
    """Whether two computations of the same outputs differ by no more than rounding in another order would."""
    if a.shape != b.shape:
        return False
    exact = all(t.dtype in (torch.float32, torch.float64) or not t.is_floating_point() for t in (a, b))
    tolerance = 1e-3 if exact and not torch.is_autocast_enabled(a.device.type) else 5e-2
    if a.is_cuda and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        tolerance = max(tolerance, 1e-2)  # factors are rounded there, and not the same ones for every batch size
    if a.is_complex() or b.is_complex():
        a, b = torch.view_as_real(a.to(torch.complex128)), torch.view_as_real(b.to(torch.complex128))
    a, b = a.detach().double(), b.detach().double()
    sizes = a.abs().nan_to_num(0.0, 0.0, 0.0)
    masks = are_masks(sizes)
    parts: list[Any] = [...] if masks is None else [masks, ~masks]
    return all(
        torch.allclose(
            a[part], b[part], rtol=tolerance, atol=tolerance * float(sizes[part].max()) + 1e-30, equal_nan=True
        )
        for part in parts
        if sizes[part].numel()
    )


_LOSSES_WITH_A_COUNT = (F.cross_entropy, F.nll_loss)


def _check_operation(func: Any, args: Any, kwargs: Any) -> None:
    """Two ways in which targets mix examples without any curvature: broadcasting, and a normaliser that counts."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    for a in tensors:
        for b in tensors:
            column = a.dim() == 2 and a.shape[1] == 1 and a.shape[0] > 1
            if column and b.dim() == 1 and b.shape[0] == a.shape[0] and b.is_floating_point():
                raise UnsupportedModelError(
                    f"an output of shape {tuple(a.shape)} meets a target of shape {tuple(b.shape)}: they broadcast to "
                    f"{(a.shape[0], a.shape[0])}, every example with every other, so no clipping bounds what one "
                    "example does. Give both the same shape: target.unsqueeze(1), or output.squeeze(1)."
                )
    if func not in _LOSSES_WITH_A_COUNT or kwargs.get("reduction", "mean") != "mean" or len(args) < 2:
        return
    ignored = kwargs.get("ignore_index", -100)
    target = args[1]
    if kwargs.get("weight") is not None or (not target.is_floating_point() and bool((target == ignored).any())):
        raise UnsupportedModelError(
            "the loss is a mean over class weights, or over the targets that are not ignored: its normaliser depends "
            "on the labels of all examples, so one label changes every example's gradient. Use reduction='sum' with "
            "loss_reduction='sum', or average each example's own losses first."
        )


# The names of autograd nodes, in C++ and in Python: of followed layers, and of what a followed model returns.
_FOLLOWED = (
    "gradveil::layer",
    "ClippedFunctionBackward",
    "CopyFunctionBackward",
    "RecurrentFunctionBackward",
    "OperationFunctionBackward",
)
_OUTPUT = ("gradveil::output", "OutputFunctionBackward")


def _mixes(loss: Tensor, output: Tensor) -> bool:
    """Whether d(loss)/d(output of example 0) changes with the output of another example."""
    try:
        grad = _derivative(loss.sum(), output, create_graph=True)
        if grad is None or not grad.requires_grad:
            return False  # unused, or linear in the outputs: nothing to mix
        direction = torch.linspace(0.5, 1.5, grad[0].numel(), dtype=grad.dtype, device=grad.device)
        curvature = _derivative((grad[0] * direction.view_as(grad[0])).sum(), output, retain_graph=True)
    except (RuntimeError, NotImplementedError):
        return False  # an operation without a second derivative: not detectable here
    if curvature is None or not curvature.numel():
        return False
    own, others = curvature[:1].abs().max(), curvature[1:].abs().max()
    return bool(others > 1e-5 * own + 1e-30) and bool(torch.isfinite(others))


def _derivative(of: Tensor, by: Tensor, **settings: Any) -> Tensor | None:
    return torch.autograd.grad(of, by, allow_unused=True, **settings)[0]
