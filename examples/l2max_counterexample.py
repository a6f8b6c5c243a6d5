"""Why noise that follows the data has no epsilon: two neighbouring data sets that anybody can tell apart, at any sigma.

    python examples/l2max_counterexample.py

The l2-max strategies scale their noise to a norm that they measure in the batch. Take data in which one example has a
long gradient and the others short ones, and the same data without that example. The released gradients then differ in
*scale*, by a factor that sigma does not change, for it multiplies both. A scale can be seen in a single release, the
better the more coordinates there are. So there is a test that is nearly always right, and whatever sigma was asked for,
epsilon is at least what its error rates show.

Every figure comes from gradveil's own engine: one step of training for each trial.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradveil
from gradveil.audit import Trials, clopper_pearson, gaussian_epsilon

CLIP, DELTA, FEATURES = 1.0, 1e-5, 500
STRATEGIES: dict[str, dict[str, Any]] = {
    "l2-max, example": {"strategy": "dyn-s-l2max", "reading": "example"},
    "l2-max, batch": {"strategy": "dyn-s-l2max", "reading": "batch"},
    "baseline": {"strategy": "baseline"},
}


def data_set() -> Tensor:
    """Fifteen examples whose gradients are short, and as the last one an example whose gradient is not.

    For the loss below, the gradient of an example is its input.
    """
    directions = F.normalize(torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(0)))
    lengths = torch.tensor([0.05 * CLIP] * 15 + [CLIP])
    return directions * lengths.unsqueeze(1)


def released_sum(x: Tensor, present: bool, sigma: float, seed: int, **strategy: Any) -> Tensor:
    """One private step with or without the last example: what is released, read off the weights."""
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = gradveil.PrivacyEngine(
        clip=CLIP, sigma=sigma, steps=1, delta=DELTA, seed=seed, drops_examples=True, **strategy
    )
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(x), batch_size=len(x)
    )
    for (rows,) in loader:
        model(rows if present else rows[:-1]).mean().backward()
        optimizer.step()
    return -model.weight.detach().flatten() * len(x)


def judge(x: Tensor, sigma: float, trials: int, **strategy: Any) -> str:
    """A row: noise without and with the example, how often the scale gives it away, what that says about epsilon."""
    present = np.arange(trials) % 2 == 1
    scales = np.array([float(released_sum(x, there, sigma, i, **strategy).std()) for i, there in enumerate(present)])
    found = clopper_pearson(
        Trials(
            scores=np.log(scales),
            present=present,
            statistic="log of the standard deviation of the released coordinates",
            threat_model="sees one release",
            scale_is_public=False,
        ),
        delta=DELTA,
    )
    without, with_it = np.median(scales[~present]), np.median(scales[present])
    threshold = math.sqrt(without * with_it)
    errors = int((scales[~present] > threshold).sum() + (scales[present] <= threshold).sum())
    published = gaussian_epsilon(1 / sigma, DELTA)
    return (
        f"{sigma:8g}  {without:10.4g} {with_it:10.4g}    {errors:4d} of {trials}    "
        f">= {found.epsilon:5.2f}      {published:8.3g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Two neighbouring data sets under noise that follows the data.")
    parser.add_argument("--trials", type=int, default=400, help="steps of training for each row, half with the example")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[1.0, 6.0, 60.0, 600.0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = data_set()
    print(f"without the example: gradients of length {x[:-1].norm(dim=1).max():.2g}, fifteen of them")
    print(f"with it:             the same, and one of length {x[-1].norm():.2g}; the clip bound is {CLIP:g}")
    for name, strategy in STRATEGIES.items():
        print(f"\n{name}")
        print("   sigma   noise: without  with it   wrong guesses   epsilon, 95 %   as published for one step")
        for sigma in arguments.sigmas:
            print(judge(x, sigma, arguments.trials, **strategy))
    print("\nThe noise is multiplied by sigma in both columns, so their ratio, and the guesses, stay as they are.")


if __name__ == "__main__":
    main()
