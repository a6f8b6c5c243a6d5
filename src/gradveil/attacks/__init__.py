"""Gradient-leakage attacks: what an adversary can recover from the gradients that training releases.

observation/   what the adversary sees, and nothing more; the ground truth is a separate object, for scoring only
methods/       the attacks: cpl (the paper's), idlg and dlg; inverting and map, which knows the defence; analytic; prior
scoring/       scores against the ground truth and against guessing
seeds.py       where a reconstruction starts
from_run.py    a trained run as a target
preflight.py   a model inspected before it is trained, and attacked for a few seconds
trial.py       one attack on a data set under one strategy, with controls and the bound
"""
