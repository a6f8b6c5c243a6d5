"""Transformers of the Hugging Face library, whole and with LoRA adapters: clipped sums, and a private loop.

    pip install "gradveil[transformers]" && pytest tests/clipping/test_transformers.py

Tiny configurations made here; nothing is downloaded. Skipped where transformers or peft are not installed.
"""

from __future__ import annotations

import copy

import pytest
import torch
from networks import agree
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import gradveil
from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.errors import UnsupportedModelError

WHY = "transformers and peft are not installed: pip install 'gradveil[transformers]'"
transformers = pytest.importorskip("transformers", reason=WHY)
peft = pytest.importorskip("peft", reason=WHY)

VOCABULARY, LENGTH, CLASSES = 13, 6, 3
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> nn.Module:
    """Tied input and output embedding, Conv1D layers, learned positions."""
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops, **ends))


def bert() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8, "num_labels": CLASSES}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **QUIET, **sizes))


def vit() -> nn.Module:
    """Its embeddings hold a class token and positions as bare parameters."""
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": CLASSES}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, **QUIET, **sizes))


def llama() -> nn.Module:
    """An RMS norm of its own class, rotary positions, fewer keys than queries."""
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **sizes))


MODELS = {"gpt2": gpt2, "bert": bert, "vit": vit, "llama": llama}
LANGUAGE = ("gpt2", "llama")
NAMES = [*MODELS, *(f"{name}, lora" for name in MODELS)]


def make(name: str) -> nn.Module:
    kind, _, adapter = name.partition(", ")
    model = MODELS[kind]()
    if adapter:
        head = None if kind in LANGUAGE else ["classifier"]  # trained in full beside the adapters, as peft's users do
        config = peft.LoraConfig(
            r=2, lora_dropout=0.0, target_modules="all-linear", modules_to_save=head, fan_in_fan_out=kind == "gpt2"
        )
        model = peft.get_peft_model(model, config)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter)  # zero at first, and with it every gradient of lora_A
    return model


def data(name: str, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    if name.startswith("vit"):
        return torch.randn(n, 2, 8, 8), torch.randint(0, CLASSES, (n,))
    x = torch.randint(0, VOCABULARY, (n, LENGTH))
    return x, torch.randint(0, VOCABULARY, x.shape) if name.startswith(LANGUAGE) else torch.randint(0, CLASSES, (n,))


def loss_of(output, y):
    """From the logits; a language model's is the mean over all tokens, as many in each example."""
    logits = output.logits
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def compare(model, x, y, clipping, forward=None):
    groups = make_groups(model, clipping)
    bounds = [0.05 * (1 + 0.1 * i) for i in range(len(groups))]
    reference = clipped_sums(model, loss_of, x, y, groups=groups, bounds=bounds)
    clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean")
    loss_of(model(x) if forward is None else forward(model, x), y).backward()
    agree(model, clipper, reference, bounds, len(x), 1e-9)
    clipper.detach()


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", NAMES)
def test_clipped_sums_equal_the_reference(name, clipping):
    model = make(name).double()
    x, y = data(name, 7)
    x = x.double() if x.is_floating_point() else x
    for n in (7, LENGTH, 1, 0):  # as many examples as tokens: positions must not be taken for examples
        compare(copy.deepcopy(model), x[:n], y[:n], clipping)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("vit")])
def test_an_attention_mask_and_keywords(name):
    model = make(name).double()
    x, y = data(name, 5)
    mask = torch.ones_like(x)
    compare(model, x, y, "per-layer", lambda m, ids: m(input_ids=ids, attention_mask=mask))


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing(name):
    model = make(name).double().train()
    model.gradient_checkpointing_enable()
    x, y = data(name, 5)
    compare(model, x.double() if x.is_floating_point() else x, y, "per-layer")


def engine_for(model, dataset, *, steps=3, batch_size=8):
    engine = gradveil.PrivacyEngine(strategy="baseline", clip=0.5, sigma=1.0, steps=steps, delta=1e-3, seed=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=dataset, batch_size=batch_size
    )
    return engine, optimizer, loader


@pytest.mark.parametrize("name", NAMES)
def test_a_private_loop_on_logits(name):
    model = make(name)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    engine, optimizer, loader = engine_for(model, TensorDataset(*data(name, 32)))
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    assert engine.step == 3
    assert "Proved:" in str(engine.statement())
    for key, p in model.named_parameters():
        assert torch.isfinite(p).all()
        assert torch.equal(p, before[key]) != p.requires_grad, key  # what trains moved, what is frozen did not


class Texts(Dataset):
    """Examples as the library's own data sets give them: a dictionary each."""

    def __init__(self, n):
        self.x, self.y = data("llama", n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


def test_batches_that_are_dictionaries():
    model = make("llama, lora")
    engine, optimizer, loader = engine_for(model, Texts(32))
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model(input_ids=batch["input_ids"]), batch["labels"]).backward()
        optimizer.step()
    assert engine.step == 3


# ---- model(input_ids, labels=labels): the loss is computed inside the model


@pytest.mark.parametrize("name", NAMES)
def test_the_models_own_loss_is_refused(name):
    """How examples enter a number made inside the model cannot be checked: some labels may not count."""
    model = make(name)
    x, y = data(name, 5)
    clipper = Clipper(model, make_groups(model, "flat"), bounds=[0.1], loss_reduction="mean")
    with pytest.raises(UnsupportedModelError, match="outside the model"):
        model(x, labels=y).loss.backward()
    clipper.detach()


def test_ignored_labels_outside_the_model_are_refused():
    model = make("llama")
    x, y = data("llama", 5)
    y[0, 2:] = -100
    clipper = Clipper(model, make_groups(model, "flat"), bounds=[1.0], loss_reduction="mean")
    with pytest.raises(UnsupportedModelError, match="normaliser"):
        loss_of(model(x), y).backward()
    clipper.detach()
