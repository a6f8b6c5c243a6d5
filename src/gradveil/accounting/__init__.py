"""From the records of a run to its epsilons. Three of them, never merged: proved, published, audited."""

from gradveil.accounting._checks import check_delta
from gradveil.accounting._compose import default_view
from gradveil.accounting.budget import affordable_steps, paper_affordable_steps
from gradveil.accounting.calibrate import (
    Calibrated,
    Target,
    calibrate_decay,
    calibrate_sigma,
    calibrate_steps,
    spent_by,
)
from gradveil.accounting.curve import Curve, planned_curve, proved_curve
from gradveil.accounting.filter import FilterAccountant, RenyiFilter, choose_filters
from gradveil.accounting.paper import PaperEpsilon, at_total_delta, from_releases, paper_curve, paper_epsilons
from gradveil.accounting.plan import calibrate_plan
from gradveil.accounting.planned import (
    Setting,
    all_views,
    check_steps,
    planned_epsilon,
    sigma_schedule,
    sigmas_of,
)
from gradveil.accounting.proved import ProvedEpsilon, proved_epsilon
from gradveil.accounting.reconstruction_robustness import (
    ReconstructionBound,
    check_kappa,
    one_step_bound,
    planned_reconstruction_bound,
    reconstruction_bound,
    reconstruction_json,
)
from gradveil.accounting.statement import Statement, is_noised, statement, statement_of
from gradveil.accounting.view import BudgetView, budget_view

__all__ = [
    "BudgetView",
    "Calibrated",
    "Curve",
    "FilterAccountant",
    "PaperEpsilon",
    "ProvedEpsilon",
    "ReconstructionBound",
    "RenyiFilter",
    "Setting",
    "Statement",
    "Target",
    "affordable_steps",
    "all_views",
    "at_total_delta",
    "budget_view",
    "calibrate_decay",
    "calibrate_plan",
    "calibrate_sigma",
    "calibrate_steps",
    "check_delta",
    "check_kappa",
    "check_steps",
    "choose_filters",
    "default_view",
    "from_releases",
    "is_noised",
    "one_step_bound",
    "paper_affordable_steps",
    "paper_curve",
    "paper_epsilons",
    "planned_curve",
    "planned_epsilon",
    "planned_reconstruction_bound",
    "proved_curve",
    "proved_epsilon",
    "reconstruction_bound",
    "reconstruction_json",
    "sigma_schedule",
    "sigmas_of",
    "spent_by",
    "statement",
    "statement_of",
]
