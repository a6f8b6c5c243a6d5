"""The text attack: tokens, positions and sentences from gradients, under noise a ranking, and the scores."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.attacks.observation.task import find_task
from gradveil.attacks.text import TextAttack, chance, observe_text, ranking_score, rouge, score_text
from gradveil.attacks.text.layers import TokenModel
from gradveil.attacks.text.rows import token_evidence
from gradveil.attacks.text.span import span_of
from gradveil.errors import UnsupportedModelError

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_attack.py"
VOCABULARY, LENGTH = 300, 16


class Encoder(nn.Module):
    """A user's own: embeddings, torch's encoder, mean over the tokens."""

    def __init__(self, width=96, classes=3, class_token=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH + 1, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2), nn.Linear(width, classes)
        self.first = nn.Parameter(torch.randn(1, 1, width)) if class_token else None

    def forward(self, ids):
        x = self.tokens(ids)
        if self.first is not None:
            x = torch.cat([self.first.expand(len(ids), -1, -1), x], 1)
        x = self.encoder(x + self.places(torch.arange(x.shape[1])))
        return self.out(x.mean(1) if self.first is None else x[:, 0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.lstm, self.out = nn.Embedding(50, 32), nn.LSTM(32, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, ids):
        return self.out(self.lstm(self.tokens(ids))[0][:, -1])


def gpt2(width=96, layers=2, **settings):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": 32, "n_embd": width, "n_layer": layers, "n_head": 4, "vocab_size": VOCABULARY}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **settings)
    return transformers.GPT2LMHeadModel(config)


def bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, num_labels=3, **sizes)
    return transformers.BertForSequenceClassification(config)


def sentences(shape, vocabulary=VOCABULARY, seed=1):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def zipf(shape, seed=1):
    """As in a language: the most frequent tokens come up again and again."""
    often = 1.0 / torch.arange(1, VOCABULARY + 1)
    drawn = torch.multinomial(
        often, shape[0] * shape[1] * shape[2], True, generator=torch.Generator().manual_seed(seed)
    )
    return drawn.view(shape)


def attacked(module, ids, **settings):
    torch.manual_seed(0)
    made = module().eval()
    labels = torch.arange(ids.shape[1]).expand(ids.shape[:2]) % 3
    seen = observe_text(made, ids, labels, generator=torch.Generator().manual_seed(2), **settings)
    return TextAttack().run(seen)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("tie", [True, False])
def test_gpt2_gives_four_sentences_of_16_tokens_away(layers, tie):
    ids = sentences((1, 4, LENGTH))
    found = attacked(lambda: gpt2(layers=layers, tie_word_embeddings=tie), ids)
    score = score_text(found.ids, ids)
    assert score.tokens == score.sentences == score.rouge_l == 1.0
    assert bool(found.sure.all()) and ranking_score(found.ranking, ids) == 1.0


def test_words_that_come_up_again_are_found_where_they_stand():
    ids = zipf((2, 4, LENGTH))
    assert any(len(set(s)) < LENGTH for s in ids[0].tolist())
    assert score_text(attacked(gpt2, ids).ids, ids).sentences == 1.0


def test_clipping_hides_no_token():
    ids = sentences((1, 3, LENGTH))
    assert score_text(attacked(gpt2, ids, clip=0.01).ids, ids).sentences == 1.0


def test_bert_gives_its_sentences_away():
    ids = sentences((1, 2, LENGTH))
    assert score_text(attacked(bert, ids).ids, ids).sentences == 1.0


@pytest.mark.parametrize("class_token", [False, True])
def test_a_model_of_ones_own_does_too(class_token):
    ids = sentences((1, 2, LENGTH))
    assert score_text(attacked(lambda: Encoder(class_token=class_token), ids).ids, ids).sentences == 1.0


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft against transformers
def test_lora_gradients_tell_the_tokens_of_a_frozen_model():
    peft = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(r=64, target_modules=["c_attn"], fan_in_fan_out=True)
        made = peft.get_peft_model(gpt2(), config)
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
        return made

    ids = sentences((1, 3, LENGTH))
    found = attacked(adapted, ids)
    # The last token is a label only, and the output layer is frozen.
    assert score_text(found.ids[..., :-1], ids[..., :-1]).sentences == 1.0


def test_more_places_than_features_leave_a_bag_of_tokens():
    ids = sentences((1, 4, LENGTH))
    found = attacked(lambda: gpt2(width=32), ids)
    assert found.facts[0]["separate"] == 0 and not bool(found.sure.any())
    assert score_text(found.ids, ids).tokens > 0.85 and ranking_score(found.ranking, ids) > 0.99


def test_a_recurrent_model_gives_a_bag_of_tokens():
    ids = torch.stack([torch.randperm(50, generator=torch.Generator().manual_seed(s))[:10] for s in range(2)])
    found = attacked(Recurrent, ids.unsqueeze(1))
    assert score_text(found.ids, ids.unsqueeze(1)).tokens == 1.0


def test_noise_turns_the_answer_into_a_ranking_and_then_into_chance():
    ids = sentences((1, 4, LENGTH))
    by_noise = [attacked(gpt2, ids, clip=1.0, sigma=s) for s in (1e-5, 0.02, 10.0)]
    scores = [score_text(found.ids, ids) for found in by_noise]
    ranks = [ranking_score(found.ranking, ids) for found in by_noise]
    guess = chance(ids, VOCABULARY)
    assert scores[0].sentences == 1.0
    assert scores[1].tokens > 0.5 > 3 * guess.tokens / 2 and ranks[1] > 0.9 and not bool(by_noise[1].sure.any())
    assert scores[2].tokens < 0.4 and abs(ranks[2] - 0.5) < 0.15


def test_the_known_noise_is_what_makes_the_span_readable():
    """The same noised matrix, with the noise known, half known and not known: the right one separates best."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 80, generator=generator)
    signal = inputs.T @ torch.randn(20, 240, generator=generator)
    noised = signal + 4.0 * torch.randn(80, 240, generator=generator)
    outside = torch.randn(200, 80, generator=generator)
    span = span_of([noised], [4.0], 20)
    assert 18 <= span.rank <= 20 and not span.full
    assert float(span.distance(inputs).max()) < float(span.distance(outside).min())
    assert span_of([4.0 * torch.randn(80, 240, generator=generator)], [4.0], 20).rank <= 1
    assert span_of([noised], [0.1], 80).full


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(14, 40), st.integers(0, 10_000))
def test_inputs_lie_in_the_span_of_their_gradient(places, features, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(places, features, generator=generator)
    gradient = inputs.T @ torch.randn(places, features, generator=generator)
    span = span_of([gradient], None, places)
    assert float(span.distance(inputs).max()) < 1e-4
    other = torch.randn(5, features, generator=generator)
    assert span.rank == places and float(span.distance(other).min()) > 1e-3


def test_rows_of_an_embedding_are_a_likelihood_ratio_under_noise():
    generator = torch.Generator().manual_seed(0)
    rows = torch.zeros(1000, 64)
    used = torch.randperm(1000, generator=generator)[:20]
    rows[used] = torch.randn(20, 64, generator=generator)
    exact = token_evidence(rows, None, 20)
    assert exact.certain and exact.tokens.tolist() == sorted(used.tolist())
    noised = token_evidence(rows + torch.randn(rows.shape, generator=generator), 1.0, 20)
    assert not noised.certain and noised.tokens is None
    occurs = torch.zeros(1000, dtype=torch.bool)
    occurs[used] = True
    assert int((noised.ratio[~occurs] > 5).sum()) == 0 and float((noised.ratio[occurs] > 5).double().mean()) > 0.7
    nothing = token_evidence(torch.randn(rows.shape, generator=generator), 1.0, 20)
    assert float(nothing.ratio.max()) < 3.0 < float(noised.ratio[used].median())


def test_which_layers_are_fed_with_what_is_found_by_running_them():
    model = gpt2().eval()
    names = [n for n, _ in model.named_parameters()]
    kinds = {fed.name: fed.kind for fed in TokenModel(model, LENGTH, VOCABULARY).layers(names)}
    assert kinds["transformer.h.0.attn.c_attn"] == "local" and kinds["transformer.h.1.attn.c_attn"] == "causal"
    assert "lm_head" not in kinds  # tied
    own = Encoder(class_token=True).eval()
    found = TokenModel(own, LENGTH, VOCABULARY).layers([n for n, _ in own.named_parameters()])
    first = next(fed for fed in found if fed.kind == "local")
    assert first.name == "encoder.layers.0.self_attn" and first.places == tuple(range(1, LENGTH + 1))
    assert {fed.kind for fed in found} == {"local", "whole"}


def test_scores_of_text():
    truth = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    swapped = truth[:, [1, 0]]
    assert score_text(swapped, truth).sentences == 1.0
    half = score_text(torch.tensor([[[4, 3, 2, 1], [5, 6, 7, 8]]]), truth)
    assert (half.tokens, half.in_place, half.sentences, half.rouge_1) == (1.0, 0.5, 0.5, 1.0)
    assert half.rouge_2 == 0.5 and half.rouge_l == (0.25 + 1.0) / 2
    assert rouge([], []) == (1.0, 1.0, 1.0) and rouge([1], []) == (0.0, 1.0, 0.0)
    assert chance(truth, 10_000).tokens < 0.01 < chance(truth, 9, seed=3).tokens


def test_the_example_runs(capsys):
    pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "undefended: 100% of tokens, 100% of sentences, ROUGE-L 1.00" and said[-1].startswith("guessing")


def test_a_model_of_numbers_is_refused():
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    assert not find_task(module, (16,)).tokens
    seen = observe_text(Encoder().eval(), sentences((1, 1, LENGTH)), generator=torch.Generator())
    with pytest.raises(UnsupportedModelError, match="takes numbers"):
        TextAttack().run(seen, task=find_task(module, (16,)))
