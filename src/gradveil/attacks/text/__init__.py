"""Attacks on models of tokens.

attack.py      the attack: tokens, positions, sentences
rows.py        which tokens occurred, from the embedding's gradient
layers.py      which linear layers are fed with what
span.py        whether a vector is one of those that a gradient was made of, against the known noise
reader.py      one observed step, ready to be asked about tokens and sentences
sentences.py   from tokens at their positions to sentences
last_token.py  the last token of a language model, from its output layer
observe.py     observations of known sentences under a planned release
score.py       token recall, ROUGE, whole sentences, and chance
"""

from gradveil.attacks.text.attack import TextAttack, TextReconstruction
from gradveil.attacks.text.observe import observe_text
from gradveil.attacks.text.score import TextScore, chance, ranking_score, rouge, score_text

__all__ = [
    "TextAttack",
    "TextReconstruction",
    "TextScore",
    "chance",
    "observe_text",
    "ranking_score",
    "rouge",
    "score_text",
]
