"""Gradient-leakage attacks: what an adversary can make of the gradients that training releases.

observation.py   what the adversary sees, and nothing more; the secret batch is another object, for scoring only
gradients.py     the gradients of dummy inputs, as the defence would release them, for many victims at once
observe.py       observations of known examples under a planned release
attack.py        what every attack is
matching.py      cpl (the paper's), idlg, dlg: l2 matching by L-BFGS
inversion.py     map (ours: knows the defence) and inverting
analytic.py      a first linear layer gives its input away
prior.py         which of these candidates is it?
lbfgs.py         L-BFGS on many independent problems at once
labels.py        labels from the last layer's gradient
seeds.py         where a reconstruction starts
metrics.py       how near it came
score.py         judged against the truth, against guessing, and in summary
from_run.py      a trained run as a target
from_capture.py  what engine.record_gradients recorded of a live run, as a target
from_files.py    a user's own model and gradients as a target
anatomy.py       a model's layers: what leaks, what mixes examples, how each is clipped
preflight.py     a model looked at before it is trained, and attacked for a few seconds
trial.py         one attack tried on a data set under one strategy, with controls and the bound
"""
