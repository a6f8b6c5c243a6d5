"""What gradients of the first step give away, per data set and strategy, to the paper's attack and to one that knows.

    python benchmarks/leakage.py --device cuda --victims 50 --out benchmarks/results/leakage_cuda.json

Every row is one trial of gradveil.attacks: an untrained CPL net, the gradient of a single example as the strategy
releases it (clipped and noised for a batch of 600), 300 iterations, one attempt. Non-private is the control; so are the
guesses under it. Victims, the public examples that an attacker may have, and those that guessing is tried with are
drawn from the first ``--examples`` training examples. ``--speed`` measures the paper's attack on many victims at once
beside the same attack with torch.optim.LBFGS, one victim after the other.

``--save DIR`` writes these examples as arrays, and ``--load DIR`` reads them where the data sets are not at hand.
``--fixed FILE.png`` draws the paper's illustration instead: one victim of each set, from the plain gradient, and
clipped and noised at C = 1, sigma = 1 and at C = 4, sigma = 6, by both attacks. Reconstructions of the first victims go
to ``--pictures FILE.npz``, and ``--grid FILE.png`` draws one victim of each of ``--sets`` from there; they are images
of the data sets, faces among them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import description
from torch.nn import functional as F

from gradveil.attacks.methods.base import full_precision
from gradveil.attacks.methods.matching import CPL
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.scoring.pictures import Line, draw_grid
from gradveil.attacks.trial import AttackConfig, AttackResult, run
from gradveil.attacks.untrained import untrained
from gradveil.experiments.leakage import ATTACKS, SETS, STRATEGIES
from gradveil.training import data
from gradveil.training.data import DataSet

SHOWN = 5  # victims


def first(dataset: DataSet, examples: int) -> DataSet:
    return replace(dataset, x_train=dataset.x_train[:examples], y_train=dataset.y_train[:examples])


def save(dataset: DataSet, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = (dataset.x_train * 255).round().to(torch.uint8).numpy()
    np.savez_compressed(folder / f"{dataset.name}.npz", x=pixels, y=dataset.y_train.numpy(), classes=dataset.classes)


def load(name: str, folder: Path) -> DataSet:
    found = np.load(folder / f"{name}.npz")
    x, y = torch.from_numpy(found["x"]).float() / 255, torch.from_numpy(found["y"])
    return DataSet(
        name=name, x_train=x, y_train=y, x_test=x[:0], y_test=y[:0], classes=int(found["classes"]),
        input_shape=tuple(x.shape[1:]), kind="image", note="",
    )  # fmt: skip


@full_precision()
def sequential(dataset: DataSet, trial: AttackConfig, victims: int) -> dict[str, float]:
    """Seconds for each victim: all at once, and some of them alone with torch.optim.LBFGS, to the same end."""
    generator = torch.Generator().manual_seed(trial.seed)
    device = torch.device(trial.device)
    model = untrained(dataset, generator=generator).to(device)
    x, y = dataset.x_train[: trial.victims].to(device), dataset.y_train[: trial.victims].to(device)
    seen, _ = observe(
        model, x.unsqueeze(1), y.unsqueeze(1), plan=None, view="per-example", training_batch=1,
        classes=dataset.classes, generator=generator,
    )  # fmt: skip
    CPL().run(seen, iterations=2, seed=0)  # warm
    _wait(device)
    begun = time.perf_counter()
    together = CPL().run(seen, iterations=trial.iterations, seed=0)
    _wait(device)
    at_once = (time.perf_counter() - begun) / trial.victims
    alone, iterations = [], []
    for i in range(victims):
        begun = time.perf_counter()
        iterations.append(_alone(model, x[i : i + 1], y[i : i + 1], trial.iterations))
        _wait(device)
        alone.append(time.perf_counter() - begun)
    return {
        "victims_at_once": trial.victims,
        "iterations_at_once": len(together.losses),
        "seconds_per_victim_at_once": at_once,
        "victims_alone": victims,
        "iterations_alone_mean": float(np.mean(iterations)),
        "seconds_per_victim_alone": float(np.mean(alone)),
        "ratio": float(np.mean(alone)) / at_once,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _alone(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, iterations: int) -> int:
    parameters = list(model.parameters())
    wanted = [g.detach() for g in torch.autograd.grad(F.cross_entropy(model(x), y), parameters)]
    half = torch.rand(x.shape[1], x.shape[2] // 2, x.shape[3] // 2, device=x.device)
    guess = half.repeat(1, 2, 2).unsqueeze(0)[..., : x.shape[2], : x.shape[3]].clone().requires_grad_()
    label = wanted[-2].sum(1).argmin().unsqueeze(0)
    optimizer = torch.optim.LBFGS([guess])
    still = 0
    for iteration in range(1, iterations + 1):
        before = guess.detach().clone()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            grads = torch.autograd.grad(F.cross_entropy(model(guess), label), parameters, create_graph=True)
            loss = torch.stack([(a - b).square().sum() for a, b in zip(grads, wanted, strict=True)]).sum()
            loss.backward(inputs=[guess])
            return loss

        loss = optimizer.step(closure)
        still = still + 1 if torch.equal(before, guess) or not bool(torch.isfinite(loss)) else 0
        if still >= 10 or float(loss.detach()) <= 1e-12:  # the same reasons to end as at once
            return iteration
    return iterations


def pictures(outcome: AttackResult) -> dict[str, np.ndarray[Any, Any]]:
    def bytes_of(x: torch.Tensor) -> np.ndarray[Any, Any]:
        return (x[:SHOWN, 0].clamp(0, 1).nan_to_num(0.5) * 255).round().to(torch.uint8).cpu().numpy()

    return {"original": bytes_of(outcome.secret.x), "found": bytes_of(outcome.reconstruction.x)}


GRID = (  # title, strategy, attack
    ("plain gradient\ncpl", "non-private", "cpl"),
    ("baseline\ncpl", "baseline", "cpl"),
    ("baseline\nmap", "baseline", "map"),
    ("quantile-clip\nmap", "quantile-clip", "map"),
    ("adaclip\nmap", "adaclip", "map"),
    ("dyn-s-sigma, 6\nmap", "dyn-s-sigma, sigma_0 = 6", "map"),
    ("dyn-s-sigma, 15\nmap", "dyn-s-sigma, sigma_0 = 15", "map"),
)


def draw_found(drawn: dict[str, np.ndarray[Any, Any]], sets: list[str], path: Path) -> None:
    def image(key: str) -> torch.Tensor:
        return torch.from_numpy(drawn[key][0]).float() / 255

    lines: list[Line] = []
    for name in sets:
        row = [("original", image(f"{name}/non-private/cpl/original"))]
        row += [(title, image(f"{name}/{strategy}/{attack}/found")) for title, strategy, attack in GRID]
        lines.append((name, row))
    draw_grid(lines, path)


FIXED: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "non-private", "view": "per-example"},
    "C = 1, sigma = 1": {"strategy": "baseline", "view": "per-example-noised", "clip": 1.0, "sigma": 1.0},
    "C = 4, sigma = 6": {"strategy": "baseline", "view": "per-example-noised", "clip": 4.0, "sigma": 6.0},
}


def draw_fixed(sets: dict[str, DataSet], args: argparse.Namespace) -> None:
    lines: list[Line] = []
    for name, dataset in sets.items():
        row = []
        for label, settings in FIXED.items():
            for attack in ("cpl", "map"):
                how = {"victims": 1, "iterations": args.iterations, "device": args.device, "seed": args.seed}
                outcome = run(AttackConfig(attack=attack, **(settings | how)), dataset)
                if not row:
                    row.append(("original", outcome.secret.x[0, 0]))
                reached = outcome.score.summary()["psnr_median"]
                row.append((f"{label}\n{attack}: {reached:.1f} dB", outcome.reconstruction.x[0, 0]))
                print(name, label, attack, f"{reached:.1f} dB", flush=True)
        lines.append((name, row))
    draw_grid(lines, args.fixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS))
    parser.add_argument("--victims", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--examples", type=int, default=7000)
    parser.add_argument("--speed", type=int, default=0, help="victims that are attacked alone, to compare")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--grid", type=Path)
    parser.add_argument("--fixed", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.grid:
        draw_found(dict(np.load(args.pictures)), args.sets, args.grid)
        return
    sets = {n: load(n, args.load) if args.load else first(data.load(n), args.examples) for n in args.sets}
    if args.save:
        for dataset in sets.values():
            save(dataset, args.save)
        return
    if args.fixed:
        draw_fixed(sets, args)
        return
    results = {"what": __doc__.splitlines()[0] if __doc__ else "", **description(args.device, torch.get_num_threads())}
    results |= {"victims": args.victims, "iterations": args.iterations, "examples": args.examples, "rows": []}
    drawn: dict[str, Any] = {}
    if args.out and args.out.exists():  # a command that was broken off goes on where it was
        earlier = json.loads(args.out.read_text())
        results["rows"] = earlier["rows"]
        results |= {"speed": earlier["speed"]} if "speed" in earlier else {}
        if args.pictures and args.pictures.exists():
            drawn |= dict(np.load(args.pictures))
    done = {(row["dataset"], row["strategy"], row["attack"]) for row in results["rows"]}

    def write() -> None:
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
        if args.pictures:
            np.savez_compressed(args.pictures, **drawn)

    if args.speed and "speed" not in results:
        fast = AttackConfig(victims=100, iterations=args.iterations, device=args.device)
        results["speed"] = sequential(sets["mnist"], fast, args.speed)
        print("speed", results["speed"], flush=True)
    for name, dataset in sets.items():
        for label in args.strategies:
            for attack in args.attacks:
                if (name, label, attack) in done:
                    continue
                settings = {"victims": args.victims, "iterations": args.iterations, "device": args.device}
                view = "per-example" if label == "non-private" else "per-example-noised"
                outcome = run(AttackConfig(attack=attack, view=view, **(settings | STRATEGIES[label])), dataset)
                row = {"dataset": name, "strategy": label, "attack": attack, **outcome.to_dict()}
                results["rows"].append(row)
                for key, array in pictures(outcome).items():
                    drawn[f"{name}/{label}/{attack}/{key}"] = array
                found = row["result"]
                told = f"{found['psnr_median']:6.1f} dB, success {found['success_rate']:.0%}"
                told += f", labels {found['labels_right']:.0%}, bound {row['success_bound']}, {row['seconds']:.1f} s"
                print(f"{name:14} {label:26} {attack:4} {told}", flush=True)
                write()
    write()


if __name__ == "__main__":
    main()
