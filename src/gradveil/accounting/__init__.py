"""From the records of a run to its epsilons. Three of them, never merged: proved, published, audited."""

from gradveil.accounting.budget import affordable_steps
from gradveil.accounting.paper import PaperEpsilon, from_releases, paper_curve, paper_epsilons
from gradveil.accounting.proved import ProvedEpsilon, default_view, proved_epsilon
from gradveil.accounting.statement import Statement, statement

__all__ = [
    "PaperEpsilon",
    "ProvedEpsilon",
    "Statement",
    "affordable_steps",
    "default_view",
    "from_releases",
    "paper_curve",
    "paper_epsilons",
    "proved_epsilon",
    "statement",
]
