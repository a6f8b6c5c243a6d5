"""Gradient-leakage attacks: what an adversary can recover from the gradients that training releases.

observation/     what the adversary sees, and nothing more (views.py; the secret batch is another object, for scoring
                 only); gradients of dummy inputs as the defence would release them, for many victims at once
                 (gradients.py); observations of known examples, of a user's files, of a recorded run
methods/         base.py           what every attack is
                 matching.py       cpl (the paper's), idlg, dlg: l2 matching by L-BFGS
                 inversion.py      map (ours: knows the defence) and inverting
                 gaussian_prior.py, whitened_search.py   what map takes to be probable, and how it searches
                 features.py       what a linear layer was fed with, read off its gradient
                 analytic.py       a first linear layer gives its input away
                 prior.py          which of these candidates is it?
                 labels.py, counts.py   labels of one example, and of a batch
                 lbfgs.py          L-BFGS on many independent problems at once
scoring/         how near it came, against guessing and against what theory allows
seeds.py         where a reconstruction starts
from_run.py      a trained run as a target
preflight.py     a model looked at before it is trained, and attacked for a few seconds
trial.py         one attack tried on a data set under one strategy, with controls and the bound
"""
