"""Labels from the gradient of the last linear layer.

With cross entropy, the gradient of the logit of class k is p_k - [k is the label]: of one example, the row of the last
weight's gradient is the feature vector times that number, and negative for the label alone (features that are positive,
as after a sigmoid or ReLU). Of a batch, see counts.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.attacks.methods.counts import label_counts
from gradveil.attacks.observation.views import Observation
from gradveil.errors import UnsupportedModelError


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
    """The labels (V, B) of every victim, those of a batch in ascending order, for which is whose does not show.

    One example: the class whose row of the last gradient has the smallest sum, over all steps that are seen.
    """
    name = last_linear(observation.module, observation.classes)
    if observation.batch == 1:
        sums = [sight.gradients[f"{name}.weight"].flatten(2).sum(2) for sight in observation.sights]
        return torch.stack(sums).sum(0).argmin(1, keepdim=True)
    counts = label_counts(observation, name)
    classes = torch.arange(observation.classes, device=counts.device)
    return torch.stack([classes.repeat_interleave(row) for row in counts])


def counts_recovered(found: Tensor, secret: Tensor) -> Tensor:
    """The share of every victim's labels (V, B) that were found, (V,): as many of each class as both have."""
    classes = int(torch.maximum(found.max(), secret.max())) + 1
    both = [
        torch.minimum(torch.bincount(a, minlength=classes), torch.bincount(b, minlength=classes)).sum()
        for a, b in zip(found, secret, strict=True)
    ]
    return torch.stack(both).double() / secret.shape[1]
