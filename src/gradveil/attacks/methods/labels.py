"""Labels from the gradient of the last linear layer.

With cross entropy, the gradient of the logits of one example is d = p - e_y: negative for the label alone, and as large
there as all the others together. The bias' gradient is d itself; that of the weight is d h' with h the features: of
rank one, so d is known up to a factor, and the label is its largest entry, whatever the signs of the features (after a
LayerNorm they have both). Under noise d is estimated from the bias and from the weight along the features that are
usual, each as far as its noise lets it. Of a batch, see counts.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.attacks.methods.counts import label_counts
from gradveil.attacks.methods.features import layer_inputs, rank_one
from gradveil.attacks.observation.views import Observation, StepObservation
from gradveil.errors import UnsupportedModelError

_LOOKED_AT = 500  # inputs that tell which features are usual


def last_linear(module: nn.Module, classes: int) -> str:
    """The name of the layer that gives the logits: the last linear one with as many outputs as there are classes."""
    found = [name for name, m in module.named_modules() if isinstance(m, nn.Linear) and m.out_features == classes]
    if not found:
        raise UnsupportedModelError(
            f"the model has no linear layer with {classes} outputs, from whose gradient labels could be read. Give the "
            "labels, or use an attack that finds them jointly (dlg)."
        )
    return str(found[-1])


def infer_labels(observation: Observation) -> Tensor:
    """The labels (V, B) of every victim, those of a batch in ascending order, for which is whose does not show."""
    name = last_linear(observation.module, observation.classes)
    if observation.batch == 1:
        slopes = [_slope_of_logits(observation, sight, name) for sight in observation.sights]
        return torch.stack(slopes).sum(0).argmin(1, keepdim=True)
    counts = label_counts(observation, name)
    classes = torch.arange(observation.classes, device=counts.device)
    return torch.stack([classes.repeat_interleave(row) for row in counts])


def _slope_of_logits(observation: Observation, sight: StepObservation, name: str) -> Tensor:
    """d of one example (V, K), up to a positive factor."""
    seen = {n: sight.gradients[f"{name}.{n}"] for n in ("weight", "bias") if f"{name}.{n}" in sight.gradients}
    if sight.defence.whitening is not None:
        seen = {n: g - sight.defence.whitening[f"{name}.{n}"][0] for n, g in seen.items()}
    stds = sight.defence.noise_of_parameter()
    if stds is None:
        if "bias" in seen:
            size: Tensor = seen["bias"].norm(dim=1, keepdim=True)
            return seen["bias"] / size.clamp(min=1e-30)
        if observation.classes > 2:
            left = rank_one(seen["weight"].double())[0]
            largest = left.gather(1, left.abs().argmax(1, keepdim=True))
            return (-largest.sign() * left).to(seen["weight"])
    along = _usual_features(observation, sight, name)
    if stds is None or "bias" not in seen:  # of two classes, the usual features settle the sign
        return seen["weight"] @ along
    variance = {n: float(torch.as_tensor(stds[f"{name}.{n}"]).square().mean()) for n in seen}
    return seen["bias"] / variance["bias"] + seen["weight"] @ along / variance["weight"]


def _usual_features(observation: Observation, sight: StepObservation, name: str) -> Tensor:
    """The mean (F) of what the layer is fed with, at public inputs or at random ones."""
    public = observation.public
    if public is None:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(_LOOKED_AT, *observation.input_shape, generator=generator).to(observation.device)
    else:
        x = public.x[:_LOOKED_AT].to(observation.device)
    with torch.no_grad():
        fed = layer_inputs(observation.module, sight.weights, x.to(sight.weights[f"{name}.weight"]), [name])[name]
    return fed.flatten(0, -2).mean(0)


def counts_recovered(found: Tensor, secret: Tensor) -> Tensor:
    """The share of every victim's labels (V, B) that were found, (V,): as many of each class as both have."""
    classes = int(torch.maximum(found.max(), secret.max())) + 1
    both = [
        torch.minimum(torch.bincount(a, minlength=classes), torch.bincount(b, minlength=classes)).sum()
        for a, b in zip(found, secret, strict=True)
    ]
    return torch.stack(both).double() / secret.shape[1]
