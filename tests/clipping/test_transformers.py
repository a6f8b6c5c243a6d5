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

# peft (0.21) itself asks every model for an attribute that transformers (5) has renamed, in get_peft_model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

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


def bert_words() -> nn.Module:
    """Predicts masked words: the last layer shares the embedding's weight, and its bias with the module around it."""
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8, "tie_word_embeddings": True}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **QUIET, **sizes))


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


class Padded(nn.Module):
    """Sentences of several lengths: word 0 is padding, which nothing attends to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(input_ids=x, attention_mask=(x != 0).long())


@pytest.mark.parametrize("name", ["gpt2", "gpt2, lora", "bert", "bert, lora"])
def test_sentences_of_several_lengths(name):
    model = Padded(make(name).double())
    x, y = data(name, 5)
    x = x.clamp(min=1)
    for i, length in enumerate((6, 3, 1, 4, 5)):
        x[i, length:] = 0
    compare(model, x, y, "per-layer")


# ---- weights that the first and the last layer share


def adapted(*targets: str, embedding: bool = False) -> nn.Module:
    """GPT-2 with LoRA adapters at some layers, and its embedding trained in full beside them or not."""
    config = peft.LoraConfig(r=2, lora_dropout=0.0, fan_in_fan_out=True, target_modules=list(targets))
    model = peft.get_peft_model(gpt2(), config)
    model.get_input_embeddings().weight.requires_grad_(embedding)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            nn.init.normal_(parameter, std=0.5)
    return model


TIED = {
    "gpt2": (gpt2, "wte.weight"),
    "bert, masked words": (bert_words, "word_embeddings.weight"),
    "gpt2, lora and the embedding": (lambda: adapted("c_attn", embedding=True), "wte.weight"),
    "gpt2, lora of the last layer": (lambda: adapted("c_attn", "lm_head", embedding=True), "wte.weight"),
}


# A model that is followed as a whole, through torch.func; peft on merging adapters, which nobody does here, and on
# GPT-2's last layer, whose weight lies the other way round than those of its other layers.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", TIED)
def test_a_tied_embedding_is_one_parameter(name, clipping):
    """In one group, once; its gradient is that of both its uses, clipped by the norm of their sum."""
    make_model, tied = TIED[name]
    model = make_model().double()
    trained = [key for group in make_groups(model, clipping) for key in group.parameters]
    assert len(trained) == len(set(trained)) == sum(p.requires_grad for p in model.parameters())
    assert sum(key.endswith(tied) for key in trained) == 1
    x, y = data("gpt2", 7)
    compare(model, x, y, clipping)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing(name):
    model = make(name).double().train()
    # transformers 5 has another name for it, and warns of the older one.
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
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


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("llama")])
def test_a_private_run_is_one_that_takes_an_example_at_a_time(name, clipping):
    """Sampling, parts, clipped sums, the public normaliser and the optimizer; the noise is next to none."""
    model = make(name).double()
    other = copy.deepcopy(model)
    x, y = data(name, 32)
    x = x.double() if x.is_floating_point() else x
    clip, size = 0.3, 8
    engine = gradveil.PrivacyEngine(clip=clip, sigma=1e-12, steps=4, delta=1e-3, seed=1, clipping=clipping)
    optimizer, plain = (
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01, eps=1e-3) for m in (model, other)
    )
    loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(x, y), batch_size=size, physical_batch_size=3
    )[2]
    drawn: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for a, b in loader:
        drawn.setdefault(engine.step, []).append((a, b))
        optimizer.zero_grad()
        loss_of(model(a), b).backward()
        optimizer.step()
    groups = make_groups(other, clipping)
    for step in range(4):
        a, b = (torch.cat(parts) for parts in zip(*drawn[step], strict=True))
        sums = clipped_sums(other, loss_of, a, b, groups=groups, bounds=list(engine.rule.bounds(step))).sums
        for key, parameter in other.named_parameters():
            if parameter.requires_grad:
                parameter.grad = sums[key] / size
        plain.step()
    for (key, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert float((mine - theirs).detach().abs().max()) < 1e-8, key


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
def test_the_models_own_loss(name):
    """``model(**batch).loss``: the mean of what each example's own loss is, whoever else's labels are ignored."""
    model = make(name)
    plain = copy.deepcopy(model)
    x, y = data(name, 5)
    if y.dim() > 1:
        y[0, 2:] = -100
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    expected = {n: torch.zeros_like(p) for n, p in plain.named_parameters() if n in trained}
    for i in range(5):
        plain.zero_grad()
        plain(x[i : i + 1], labels=y[i : i + 1]).loss.backward()
        alone = {n: p.grad for n, p in plain.named_parameters() if n in trained and p.grad is not None}
        norm = float(torch.sqrt(sum(g.double().square().sum() for g in alone.values())))
        for n, g in alone.items():
            expected[n] += g * min(1.0, 0.1 / norm)
    clipper = Clipper(model, make_groups(model, "flat"), bounds=[0.1], loss_reduction="mean")
    model(x, labels=y).loss.backward()
    clipper.detach()
    for n, p in model.named_parameters():
        if n in trained:
            torch.testing.assert_close(p.grad, expected[n], rtol=1e-3, atol=1e-6)


def test_ignored_labels_outside_the_model_are_refused():
    model = make("llama")
    x, y = data("llama", 5)
    y[0, 2:] = -100
    clipper = Clipper(model, make_groups(model, "flat"), bounds=[1.0], loss_reduction="mean")
    with pytest.raises(UnsupportedModelError, match="normaliser"):
        loss_of(model(x), y).backward()
    clipper.detach()
