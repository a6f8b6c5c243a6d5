"""Which fixed features a private linear layer learns most from: one line of JSON for each way that is tried.

    python benchmarks/try_features.py --dataset cifar10 --device cuda --out benchmarks/results/features_tried.jsonl
    python benchmarks/try_features.py --dataset cifar10 --held-out 5000 --kinds "balanced 0.25" "centred 0.25" \
        --rates 1 2 --seeds 1 2 3 --cache features --out benchmarks/results/features_centred.jsonl

The second command judges by 5 000 training examples that are held out; the test set is not read.

Several learning rates are trained side by side, which a linear layer allows at little more than the cost of one: flat
clipping, Poisson sampling, noise calibrated by PLD to the epsilon, as ``gradveil train`` does it. It is a measurement
of ways to train, not a private run: the noise is plain torch.randn, and nothing is written in a ledger. Every learning
rate of every line is a run that was looked at, and counts in the ``tried`` of the recipes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from machine import description
from torch import Tensor

from gradveil.accounting import Setting, Target, calibrate_sigma
from gradveil.training import data, features
from gradveil.training.features.balanced import BalancedScattering, CentredScattering, balance_of, opponent

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
AVERAGES = (0.0, 0.95, 0.99)
LENGTH = 70.0  # of an example's features, all of them: what the learning rates are for


@dataclass(frozen=True)
class Way:
    """How to train. ``rates`` multiplies the usual learning rates: other clip bounds and momenta need others."""

    features: str
    epsilon: float
    batch: int
    steps: int
    mirror: bool = False  # the image and its mirror image, averaged before clipping
    clip: float = 0.1
    momentum: float = 0.9
    schedule: str = "constant"
    rates: float = 1.0


def ways(dataset: str) -> Iterator[Way]:
    """One at a time from a common start: the features, then what is done with them."""
    batch, steps = data.CATALOGUE[dataset].train // 5, 300
    kinds = ["scattering", "balanced 0.25", "balanced 0.15", "balanced 0.5", "balanced 0.25 by the data"]
    if dataset == "cifar10":
        kinds.insert(1, "opponent colours")
    for kind in kinds:
        yield Way(kind, 0.823, batch, steps)
    best = "balanced 0.25"
    for mirror in (True, False) if dataset != "mnist" else (False,):
        for epsilon in (0.823, 3.0):
            for longer in (1, 2):
                yield Way(best, epsilon, batch, steps * longer, mirror=mirror)
            yield Way(best, epsilon, batch // 4, steps * 4, mirror=mirror)
    for clip in (0.03, 0.3, 1.0):
        yield Way(best, 0.823, batch, steps, clip=clip, rates=0.1 / clip)
    yield Way(best, 0.823, batch, steps, momentum=0.0, rates=10.0)
    yield Way(best, 0.823, batch, steps, schedule="cosine")


class AttackConfig:
    """The features of one data set, made as they are asked for, and the models trained on them."""

    def __init__(
        self, dataset: str, device: str, data_dir: str | None, *, held_out: int = 0, cache: Path | None = None
    ) -> None:
        loaded = data.load(dataset, data_dir=data_dir)
        self.device, self.classes = torch.device(device), loaded.classes
        self.x, self.y = loaded.x_train, loaded.y_train.to(self.device)
        self.x_test, self.y_test = loaded.x_test, loaded.y_test.to(self.device)
        if held_out:
            (self.x, self.y), (self.x_test, self.y_test) = split(self.x, self.y, held_out)
        self._cache = None if cache is None else cache / f"{dataset}-{held_out}"
        self.rates = RATES
        self._kind, self._made = "", {}  # of one kind of features at a time: they are large

    def features(self, kind: str, mirror: bool) -> tuple[list[Tensor], list[Tensor]]:
        """(train, test), one tensor (N, D) in half precision for each view."""
        if kind != self._kind:
            self._kind, self._made = kind, {}
        for flipped in (False, True)[: 1 + mirror]:
            if flipped not in self._made:
                self._made[flipped] = self._kept(kind, flipped)
        views = [self._made[flipped] for flipped in (False, True)[: 1 + mirror]]
        return [train for train, _ in views], [test for _, test in views]

    def _kept(self, kind: str, flipped: bool) -> list[Tensor]:
        """Features of training and test examples, from the cache where they are there."""
        file = None if self._cache is None else self._cache / f"{kind.replace(' ', '-')}{'-flipped' * flipped}.pt"
        if file is not None and file.exists():
            return list(torch.load(file, map_location=self.device, weights_only=True))
        made = [self._of(kind, x.flip(-1) if flipped else x) for x in (self.x, self.x_test)]
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(made, file)
        return made

    def _of(self, kind: str, x: Tensor) -> Tensor:
        shape = tuple(x.shape[1:])
        if kind.startswith(("balanced", "centred")):
            made = BalancedScattering if kind.startswith("balanced") else CentredScattering
            module: Any = made(shape, power=float(kind.split()[1]))
            if kind.endswith("by the data"):  # what drawings stand in for; not private
                first = features.extract(features.Scattering(shape), opponent(self.x[:6000]), self.device)
                module.balance = balance_of(first, float(kind.split()[1]))
        else:
            module, x = features.Scattering(shape), opponent(x) if kind == "opponent colours" else x
        parts = [features.extract(module, part, self.device).flatten(1) for part in x.split(5000)]
        return torch.cat([(LENGTH * torch.nn.functional.normalize(part)).half() for part in parts])

    def run(self, way: Way, seed: int) -> dict[str, float]:
        """Test accuracy by "average/learning rate"."""
        train, test = self.features(way.features, way.mirror)
        rates = [way.rates * rate for rate in self.rates]
        examples, inputs = train[0].shape
        outputs, views = len(rates) * self.classes, len(train)
        sigma = _sigma(way.epsilon, way.batch / examples, way.steps)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        weights = torch.zeros(inputs + 1, outputs, device=self.device)  # the bias is the last row
        speed = torch.zeros_like(weights)
        averages = [torch.zeros_like(weights) for _ in AVERAGES]
        rate = torch.tensor(rates, device=self.device).repeat_interleave(self.classes)
        for t in range(way.steps):
            drawn = torch.rand(examples, generator=generator, device=self.device) < way.batch / examples
            rows = drawn.nonzero().squeeze(1)
            x = [_with_one(view[rows].float()) for view in train]
            errors = [self._errors(each, weights, rows) / views for each in x]
            squares = sum(
                (errors[i] * errors[j]).sum(-1) * (x[i] * x[j]).sum(1, keepdim=True)
                for i in range(views)
                for j in range(views)
            )
            scale = (way.clip / squares.clamp(min=1e-20).sqrt()).clamp(max=1.0).unsqueeze(-1)
            total = sum(each.T @ (error * scale).flatten(1) for each, error in zip(x, errors, strict=True))
            noise = torch.randn(total.shape, generator=generator, device=self.device)
            speed.mul_(way.momentum).add_((total + sigma * way.clip * noise) / way.batch)
            slower = 0.5 * (1 + math.cos(math.pi * t / way.steps)) if way.schedule == "cosine" else 1.0
            weights -= slower * rate * speed
            for decay, average in zip(AVERAGES, averages, strict=True):
                average.lerp_(weights, 1 - min(decay, (1 + t) / (10 + t)) if decay else 1.0)
        found = {}
        for decay, average in zip(AVERAGES, averages, strict=True):
            logits = sum((view.float() @ average[:-1] + average[-1]).view(len(view), -1, self.classes) for view in test)
            right = (logits.argmax(-1) == self.y_test[:, None]).double().mean(0).tolist()
            found |= {f"{decay:g}/{r:g}": round(value, 4) for r, value in zip(rates, right, strict=True)}
        return found

    def _errors(self, x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        """Gradients of the losses by the logits: (rows, learning rates, classes)."""
        found = (x @ weights).view(len(x), -1, self.classes).softmax(-1)
        found[torch.arange(len(x), device=self.device), :, self.y[rows]] -= 1
        return found


def split(x: Tensor, y: Tensor, held_out: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training set without, and with only, the examples that are held out: always the same ones."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5000))
    kept, out = order[held_out:].sort().values, order[:held_out].sort().values
    return (x[kept], y[kept.to(y.device)]), (x[out], y[out.to(y.device)])


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


@lru_cache
def _sigma(epsilon: float, rate: float, steps: int) -> float:
    return calibrate_sigma(Target(epsilon=epsilon), Setting(sample_rate=rate), steps=steps).sigma


def _wanted(args: argparse.Namespace) -> Iterator[Way]:
    if args.kinds is None:
        yield from ways(args.dataset)
        return
    batch = data.CATALOGUE[args.dataset].train // 5
    for kind, epsilon in product(args.kinds, args.epsilons):
        yield Way(kind, epsilon, batch, 300, mirror=args.mirror)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--held-out", type=int, default=0, help="judge by so many training examples, not by the test set"
    )
    parser.add_argument("--kinds", nargs="+", help="only these features, at --epsilons")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.823])
    parser.add_argument("--mirror", action="store_true", help="with --kinds: an image and its mirror image")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--cache", type=Path, help="keep features here")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no way is begun after so long")
    parser.add_argument("--most", type=int, help="only so many ways, from the first on")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    began = time.perf_counter()
    trial = AttackConfig(args.dataset, args.device, args.data_dir, held_out=args.held_out, cache=args.cache)
    trial.rates = tuple(args.rates)
    for way, seed in product(islice(_wanted(args), args.most), args.seeds):
        if time.perf_counter() - began > args.seconds:
            print("out of time")
            break
        start = time.perf_counter()
        found = trial.run(way, seed)
        best = max(found, key=found.__getitem__)
        line = {"dataset": args.dataset, **asdict(way), "seed": seed, "accuracy": found, "best": best}
        line |= {"held_out": args.held_out} if args.held_out else {}
        line |= description(args.device, torch.get_num_threads())
        with open(args.out, "a") as file:
            file.write(json.dumps(line) + "\n")
        told = " ".join(f"{key} {value}" for key, value in asdict(way).items())
        print(f"{found[best]:.4f} at {best}: {told}  {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
