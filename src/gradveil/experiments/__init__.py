"""The paper's evaluation, rerun: one file per table or figure, its cells, the published values beside the measured."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gradveil.errors import UnknownNameError

if TYPE_CHECKING:
    from gradveil.experiments.experiment import Experiment

# name -> what it shows, as listed; each is in the file of its name
NAMES = {
    "leakage": "what the gradients of the first step leak, by strategy: table and reconstructions",
    "attack-frames": "reconstructions over the attack's iterations",
    "fixed-parameters": "what leaks at C = 1, sigma = 1 and at C = 4, sigma = 6",
    "sensitivity": "accuracy of baseline, decaying clip bound and l2-max by clip bound, sigma = 6",
    "accounting": "five accountants on the same runs, and their accuracy",
    "target-accuracy": "privacy spent to the baseline's accuracy, fixed sigma",
    "fixed-variance": "privacy spent to the baseline's accuracy, fixed noise variance",
    "last-scenario": "privacy spent to the accuracy of l2-max",
    "noise-decay": "accuracy at a published epsilon with sigma decaying by three policies",
    "noise-decay-target": "privacy spent by dyn-s-sigma to the baseline's accuracy",
    "noise-variance": "the noise S x sigma over the steps of a run",
    "time": "seconds per step of plain and private training",
    "adaptive-clipping": "accuracy and cost, compared with quantile clipping and AdaClip",
    "equal-epsilon": "ours: accuracy at equal proved epsilon, every proved strategy",
    "proved-accuracy": "ours: accuracy of the recipes at a proved epsilon, compared with the paper's best",
    "starting-bounds": "ours: dyn-private from three clip bounds, compared with the baseline at each",
    "triangle": "ours: accuracy, proved epsilon and attack result, one row per strategy",
}


def get(name: str) -> Experiment:
    """The experiment of that name, or an error with the near names."""
    if name not in NAMES:
        raise UnknownNameError("experiment", name, NAMES)
    found: Experiment = import_module(f"gradveil.experiments.{name.replace('-', '_')}").EXPERIMENT
    return found
