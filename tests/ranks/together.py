"""Models and jobs for the tests of settings that are used together: see test_together.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import gradveil
from gradveil.clipping.sharding import full_tensor

WORDS, LENGTH, EXAMPLES, BATCH, PHYSICAL, STEPS = 11, 5, 80, 8, 3, 6
RATE, CLIP = 0.1, 0.5


class Block(nn.Module):
    """Attention and a small network, as in any transformer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mix, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.before(h)).unsqueeze(1).chunk(3, dim=-1)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return h + self.down(F.gelu(self.up(self.between(h))))


class LanguageModel(nn.Module):
    """Two blocks whose activations are computed again in the backward pass, and a tied embedding in another module."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"embed": nn.Embedding(WORDS, size), "one": Block(size), "two": Block(size)})
        self.head = nn.Linear(size, WORDS, bias=False)
        self.head.weight = self.body.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body.embed(x)
        for block in (self.body.one, self.body.two):
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


class Wrapped(nn.Module):
    """A Hugging Face language model: tokens in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # transformers 5 has another name for it, and warns of the older one.
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=x).logits
        return logits


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    return Wrapped(GPT2LMHeadModel(GPT2Config(**sizes, **quiet)))


def gpt2_lora() -> nn.Module:
    import peft

    model = gpt2()
    settings = {"r": 2, "lora_dropout": 0.0, "target_modules": "all-linear", "fan_in_fan_out": True}
    adapted = peft.get_peft_model(model.model, peft.LoraConfig(**settings))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # zero at first, and with it every gradient of lora_A
    return Wrapped(adapted)


MODELS = {"own": LanguageModel, "gpt2": gpt2, "gpt2, lora": gpt2_lora}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What fully_shard is called on, one after another, before it is called on the whole."""
    return [m for m in model.modules() if type(m).__name__ in ("Block", "GPT2Block")]


def together(way: str, name: str, clipping: str, bf16: bool) -> Any:
    """A run in physical parts with activations computed again. ``way``: alone, ddp or fsdp."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = plain = MODELS[name]().train()
    blocks = blocks_of(plain)
    if way == "ddp":
        model = DistributedDataParallel(model)
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    recomputed = 0

    def note(*_: Any) -> None:
        nonlocal recomputed
        recomputed += torch._C._current_graph_task_id() != -1  # called in a backward pass

    for block in blocks:  # inside it: a checkpoint may leave the block's own hooks outside
        next(m for m in block.modules() if not list(m.children())).register_forward_pre_hook(note)
    before = [full_tensor(p.detach()).clone() for p in plain.parameters()]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, WORDS, (EXAMPLES, LENGTH), generator=generator)
    y = torch.randint(0, WORDS, (EXAMPLES, LENGTH), generator=generator)
    settings = {"clip": CLIP, "sigma": 0.1, "steps": STEPS, "delta": 1e-3, "seed": 5}
    engine = gradveil.PrivacyEngine(clipping=clipping, **settings)
    model, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=TensorDataset(x, y),
        batch_size=BATCH,
        physical_batch_size=PHYSICAL,
    )
    parts, kinds = 0, set()
    for inputs, targets in loader:
        parts += 1
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(inputs)
        kinds.add(logits.dtype)
        losses = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").mean(1)
        (losses.sum() / max(len(losses), 1)).backward()
        optimizer.step()
    after = [full_tensor(p.detach()) for p in plain.parameters()]
    return {
        "weights": torch.cat([p.flatten() for p in after]),
        "moved": torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)]),
        "releases": [r.to_dict() | {"digest": None} for r in engine.releases],
        "groups": len(engine.groups),
        "parts": parts,
        "logits": kinds,
        "recomputed": recomputed,
    }


def all_together(way: str, cases: list[tuple[str, str, bool]]) -> list[Any]:
    return [together(way, *case) for case in cases]
