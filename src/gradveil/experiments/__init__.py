"""The paper's evaluation, rerun: one file per table or figure, its cells, the published values beside the measured."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gradveil.errors import UnknownNameError

if TYPE_CHECKING:
    from gradveil.experiments.experiment import Experiment

# name -> what it shows, as listed; each is in the file of its name
NAMES = {
    "leakage": "what the first step's gradients give away, by strategy: table and reconstructions",
    "attack-frames": "reconstructions over the attack's iterations",
    "fixed-parameters": "what C = 1, sigma = 1 and C = 4, sigma = 6 give away",
    "sensitivity": "accuracy of baseline, decaying clip bound and l2-max by clip bound, sigma = 6",
    "accounting": "five accountants on the same runs, and their accuracy",
    "target-accuracy": "privacy spent to the baseline's accuracy, fixed sigma",
    "fixed-variance": "privacy spent to the baseline's accuracy, fixed noise variance",
    "last-scenario": "privacy spent to the accuracy of l2-max",
    "noise-decay": "accuracy at a published epsilon with sigma decaying by three policies",
    "noise-decay-target": "privacy spent by dyn-s-sigma to the baseline's accuracy",
    "noise-variance": "the noise S sigma over the steps of a run",
    "time": "seconds per step of plain and private training",
    "adaptive-clipping": "accuracy and cost beside quantile clipping and AdaClip",
    "equal-epsilon": "ours: accuracy at equal proved epsilon, every proved strategy",
    "proved-accuracy": "ours: accuracy of the recipes at a proved epsilon, beside the paper's best",
    "starting-bounds": "ours: dyn-private from three clip bounds, beside the baseline at each",
    "triangle": "ours: accuracy, proved epsilon and what the attack gets, one row per strategy",
}


def get(name: str) -> Experiment:
    """The experiment of that name, or an error with the near names."""
    if name not in NAMES:
        raise UnknownNameError("experiment", name, NAMES)
    found: Experiment = import_module(f"gradveil.experiments.{name.replace('-', '_')}").EXPERIMENT
    return found
