"""The privacy engine: sampling, clipping, noise, ledger and accounting around a user's own loop.

engine.py    PrivacyEngine: its settings, set-up, and what is known of the run
settings.py  the settings, checked
step.py      the release of one step, in the one order that is safe
backward.py  what happens when a backward pass has ended
batches.py   which drawn batch a backward pass belongs to, and whether it may be released
drawn.py     whose rows the model is given, as far as its tensors show it
layout.py    where a loader's collate_fn puts the examples, and whether it keeps them apart
header.py    what the run declares in its ledger
plain.py     training without privacy, for comparison
"""

from gradveil.engine.engine import PrivacyEngine

__all__ = ["PrivacyEngine"]
