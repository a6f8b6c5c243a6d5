"""Labels from the gradient of the last linear layer.

With cross entropy, the gradient of the logit of class k is p_k - [k is the label]: of one example, the row of the last
weight's gradient is the feature vector times that number, and negative for the label alone (features that are positive,
as after a sigmoid or ReLU). The bias' gradient, where there is one, is that number itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.attacks.observation import Observation
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
    """The labels (V, B) of every victim, those of a batch in no particular order.

    One example: the class whose row of the last gradient has the smallest sum. A batch: B classes are taken one after
    the other, each time the smallest, to which then an example's share is added back.
    """
    sight = observation.sights[0]
    name = last_linear(observation.module, observation.classes)
    weight = sight.gradients[f"{name}.weight"]
    bias = sight.gradients.get(f"{name}.bias")
    score = weight.flatten(2).sum(2) if bias is None or observation.batch == 1 else bias
    score = score.clone()
    if observation.batch == 1:
        return score.argmin(1, keepdim=True)
    if bias is not None:
        share = torch.full((len(score),), 1.0 / observation.batch, dtype=score.dtype, device=score.device)
    else:  # the smallest sum of all classes that have an example is that of about one example
        share = -score.clamp(max=0.0).sum(1) / observation.batch
    labels = []
    for _ in range(observation.batch):
        label = score.argmin(1)
        labels.append(label)
        score[torch.arange(len(score), device=score.device), label] += share
    return torch.stack(labels, 1)
