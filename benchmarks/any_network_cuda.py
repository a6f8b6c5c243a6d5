"""Seconds and memory of one private step of six networks that nobody tuned for, beside one plain step, on a GPU.

    python benchmarks/any_network_cuda.py --seconds 10 --out benchmarks/results/any_network_cuda.json
    python benchmarks/any_network_cuda.py --device cpu --quick --only LSTM BERT Llama --out /tmp/quick.json

ViT-B/16, ConvNeXt-T and ResNet-50 with GroupNorm of torchvision, BERT-base and a Llama of 160 M parameters of
transformers, and an LSTM. bf16 autocast, AdamW, eager; steps take turns, a turn is several steps in a row, as in
training; medians, and ratios of medians. Peak memory is that of some steps, after a warm-up. A network whose library is
not there, or that a peer refuses, is left out, and the results say so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import description, write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradveil
from gradveil.mechanism.sampling import Ticket

CLASSES = 10
TURN = 5  # steps in a row
Batch = tuple[Tensor, Tensor]


class LSTM(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(size, size, 2, batch_first=True), nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0][:, -1])
        return out


class LastToken(nn.Module):
    """A language model as a classifier of sequences: the last position's logits."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.body(input_ids=tokens).logits
        return out if out.dim() == 2 else out[:, -1, :CLASSES]


def _torchvision(name: str, quick: bool, **settings: Any) -> nn.Module:
    import torchvision

    made: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES, **settings)
    return made


def _bert(quick: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return LastToken(BertForSequenceClassification(BertConfig(num_labels=CLASSES, **(small if quick else {}))))


def _llama(quick: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = (32, 64, 1, 2, 128) if quick else (768, 2048, 12, 12, 32000)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return LastToken(LlamaForCausalLM(LlamaConfig(**dict(zip(names, sizes, strict=True)), use_cache=False)))


def _images(n: int, quick: bool) -> Tensor:
    return torch.randn(n, 3, 224, 224)


def _tokens(n: int, quick: bool) -> Tensor:
    return torch.randint(0, 100, (n, 8 if quick else 128))


NETWORKS: dict[str, tuple[Callable[[bool], nn.Module], Callable[[int, bool], Tensor], int, float]] = {
    # what, its inputs, batch, the ratio that is asked for
    "ViT-B/16": (partial(_torchvision, "vit_b_16"), _images, 64, 2.0),
    "ConvNeXt-T": (partial(_torchvision, "convnext_tiny"), _images, 64, 2.0),
    "ResNet-50, GroupNorm": (
        partial(_torchvision, "resnet50", norm_layer=lambda width: nn.GroupNorm(32, width)),
        _images,
        64,
        2.0,
    ),
    "LSTM": (
        lambda quick: LSTM(16 if quick else 512),
        lambda n, quick: torch.randn(n, 8 if quick else 128, 16 if quick else 512),
        128,
        4.0,
    ),
    "BERT": (_bert, _tokens, 32, 2.0),
    "Llama": (_llama, _tokens, 16, 2.0),
}


class LeftOut(Exception):
    """A mode that does not run here, and why."""


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16)


def _step(model: nn.Module, optimizer: Any, batch: Batch, device: str, before: Callable[[], None]) -> None:
    before()
    optimizer.zero_grad()
    with _autocast(device):
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
    loss.backward()
    optimizer.step()


def plain(model: nn.Module, batch: Batch, device: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return lambda: _step(model, optimizer, batch, device, lambda: None)


def private(model: nn.Module, batch: Batch, device: str, *, clipping: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=10**5, delta=1e-9, clipping=clipping)
    size = len(batch[0])
    engine.make_private(module=model, optimizer=optimizer, data_loader=TensorDataset(*batch), batch_size=size)

    def hand_out() -> None:
        ticket = Ticket(engine.step, drawn=size, size=size, last=True)
        engine._batches.hand_out(ticket, loop=engine._batches.loop, step=engine.step)

    return lambda: _step(model, optimizer, batch, device, hand_out)


def opacus(model: nn.Module, batch: Batch, device: str) -> Callable[[], None]:
    """Its own hooks, on a fixed batch."""
    try:
        from opacus import PrivacyEngine
    except ImportError as error:
        raise LeftOut("not installed") from error
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(*batch), batch_size=len(batch[0]))
    try:
        made, private_optimizer, _ = PrivacyEngine().make_private(
            module=model.train(), optimizer=optimizer, data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
        )  # fmt: skip
        _step(made, private_optimizer, batch, device, lambda: None)
    except Exception as error:  # whatever a peer raises on a model it does not take
        raise LeftOut(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}") from error
    return lambda: _step(made, private_optimizer, batch, device, lambda: None)


MODES: dict[str, Callable[[nn.Module, Batch, str], Callable[[], None]]] = {
    "plain": plain,
    "per-layer": partial(private, clipping="per-layer"),
    "flat": partial(private, clipping="flat"),
    "opacus": opacus,
}


@contextlib.contextmanager
def _timed(device: str, times: list[float]) -> Iterator[None]:
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    yield
    sync()
    times.append((time.perf_counter() - start) / TURN)


def _peak(step: Callable[[], None], device: str) -> int | None:
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def measured(name: str, device: str, seconds: float, quick: bool) -> dict[str, Any]:
    """Memory first, each mode by itself; then all of them in turns."""
    make, inputs, batch_size, asked = NETWORKS[name]
    size = 8 if quick else batch_size
    batch = inputs(size, quick).to(device), torch.randint(0, CLASSES, (size,), device=device)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for alone in (True, False):
        for mode, start in MODES.items():
            if mode in rows and "left_out" in rows[mode]:
                continue
            torch.manual_seed(0)
            try:
                step = start(make(quick).to(device), batch, device)
                for _ in range(4):  # the first batches are checked
                    step()
            except LeftOut as why:
                rows[mode] = {"left_out": str(why)}
                continue
            if alone:
                rows[mode] = {"peak_bytes": _peak(step, device)}
                del step
                gc.collect()
            else:
                steps[mode] = step
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 5:
        for mode, step in steps.items():
            with _timed(device, times[mode]):
                for _ in range(TURN):
                    step()
    base, memory = statistics.median(times["plain"]), rows["plain"]["peak_bytes"]
    for mode, found in times.items():
        rows[mode] |= {"median_ms": round(1e3 * statistics.median(found), 3), "n": len(found)}
        rows[mode]["ratio"] = round(statistics.median(found) / base, 3)
        rows[mode]["memory_ratio"] = round(rows[mode]["peak_bytes"] / memory, 3) if memory else None
    return {"batch": size, "asked": asked, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each network")
    parser.add_argument("--only", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--quick", action="store_true", help="small networks: does it run?")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    networks: dict[str, Any] = {}
    for name in options.only:
        try:
            networks[name] = measured(name, options.device, options.seconds, options.quick)
        except ImportError as error:
            networks[name] = {"left_out": str(error)}
        print(name, networks[name], flush=True)
        write(options.out, {"what": __doc__, **description(options.device, 1), "networks": networks})


if __name__ == "__main__":
    main()
