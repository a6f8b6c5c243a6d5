"""Models that a server has prepared: found by their weights, read out exactly, and no false alarm on ordinary ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradveil.attacks.methods.imprint import Imprint
from gradveil.attacks.observation.from_files import load_observation
from gradveil.attacks.observation.made_to_leak import made_to_leak
from gradveil.attacks.preflight import inspect_model
from gradveil.attacks.scoring.evaluate import in_order
from gradveil.attacks.scoring.metrics import matched, psnr
from gradveil.attacks.untrained import relu_convnet, sigmoid_mlp
from gradveil.errors import UnsupportedModelError
from gradveil.training import data, models

SHAPE, BINS = (1, 8, 8), 200


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def imprinted(scaled=False, blocks=1):
    """Rows are one measurement of the input, biases the quantiles of its values; the next layer treats all alike."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, BINS), nn.ReLU(), nn.Linear(BINS, 10)).eval()
    with torch.no_grad():
        row = torch.randn(blocks, 64, generator=generator(1)).abs() / 64
        which = torch.arange(BINS) % blocks
        size = torch.linspace(0.5, 2.0, BINS) if scaled else torch.ones(BINS)
        model[1].weight.copy_(row[which] * size.unsqueeze(1))
        marks = torch.linspace(0.05, 0.5, BINS)
        model[1].bias.copy_(-marks * size)
        model[3].weight.copy_(torch.randn(10, 1, generator=generator(2)).expand(10, BINS) / size)
    return model


def trapped():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
    with torch.no_grad():
        for i, row in enumerate(model[1].weight):
            order, size = torch.randperm(64, generator=generator(i)), torch.randn(32, generator=generator(i)).abs()
            row[order[:32]], row[order[32:]] = -size, 0.95 * size
    return model


def fished(how):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
    with torch.no_grad():
        if how == "class":
            model[3].weight[torch.arange(10) != 4] = 0.0
        elif how == "scaled class":
            model[3].weight[4] *= 100
        elif how == "bias":
            model[3].bias[4] = 1000.0
        else:
            model[3].weight[:, 7] *= 1000
    return model


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (imprinted(), "imprint"),
        (imprinted(scaled=True), "imprint"),
        (imprinted(blocks=4), "imprint"),
        (trapped(), "trap weights"),
        (fished("class"), "fishing"),
        (fished("scaled class"), "fishing"),
        (fished("bias"), "fishing"),
        (fished("feature"), "fishing"),
    ],
    ids=["imprint", "scaled", "blocks", "trap", "class", "scaled class", "bias", "feature"],
)
def test_what_was_prepared_is_found_and_named(model, kind):
    (found,) = made_to_leak(model)
    assert (found.layer, found.kind) == ("3" if kind == "fishing" else "1", kind)
    verdict = inspect_model(model, input_shape=SHAPE, seconds=0.01).verdict
    assert verdict[0].startswith(f"This model was made to leak: layer {found.layer!r} ({kind})")


def ordinary():
    yield "mlp", nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    yield "wide", nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100))
    yield "cpl", models.cpl_net(SHAPE, 10, generator=generator())
    yield "relu", relu_convnet((3, 16, 16), 10, generator=generator())
    yield "sigmoid", sigmoid_mlp(446, 30, generator=generator())
    for init in (nn.init.orthogonal_, nn.init.xavier_uniform_, nn.init.zeros_, nn.init.ones_, nn.init.eye_):
        layer = nn.Linear(64, 64)
        init(layer.weight)
        nn.init.zeros_(layer.bias)  # rows that are all alike, with biases that differ, would be an imprint
        yield init.__name__, nn.Sequential(layer, nn.Linear(64, 10))
    zero = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
    nn.init.zeros_(zero[1].weight)
    yield "zero head", zero
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    yield "encoder", nn.Sequential(encoder, nn.Linear(32, 5))


FRESH = list(ordinary())


@pytest.mark.parametrize(("name", "model"), FRESH, ids=[name for name, _ in FRESH])
def test_no_alarm_on_fresh_networks(name, model):
    assert made_to_leak(model) == []


def test_no_alarm_on_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    made = [
        transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4)),
        transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=100, num_labels=3, **sizes)),
        transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=4, **sizes)),
    ]
    assert [made_to_leak(model) for model in made] == [[], [], []]


@pytest.mark.parametrize("bias", [True, False])
def test_no_alarm_on_trained_networks(bias):
    """On digits to nearly no loss, with classes of very different frequency: rows grow, but alike."""
    digits = data.load("digits")
    keep = (digits.y_train < 9) | (torch.arange(len(digits.y_train)) % 20 == 0)
    x, y = digits.x_train[keep], digits.y_train[keep]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 64, bias=bias),
        nn.ReLU(),
        nn.Linear(64, 10, bias=bias),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.05 and made_to_leak(model) == []


def test_an_imprint_gives_a_whole_batch_away_exactly():
    digits, model = data.load("digits"), imprinted()
    x, y = digits.x_train[:12], digits.y_train[:12]
    bins = (x.flatten(1) @ model[1].weight[0]).unsqueeze(1).gt(-model[1].bias).sum(1)
    alone = torch.tensor([int((bins == b).sum()) == 1 for b in bins])
    assert int(alone.sum()) >= 8
    found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    gradients = {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True)}
    seen = load_observation(model, gradients, input_shape=SHAPE, batch=12)
    stolen = Imprint().run(seen).x
    reached = psnr(in_order(stolen, matched(stolen, x.unsqueeze(0))), x.unsqueeze(0))[0]
    assert float(reached[alone].median()) > 60 and int((reached > 60).sum()) >= 0.8 * int(alone.sum())


def test_there_is_no_imprint_to_read_in_an_ordinary_model():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
    gradients = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    with pytest.raises(UnsupportedModelError, match="no imprint to read"):
        Imprint().run(load_observation(model, gradients, input_shape=SHAPE))
