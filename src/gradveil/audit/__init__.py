"""Empirical lower bounds on epsilon: what an auditor can show of a strategy, beside what is proved for it.

    steps   one run, a coin for every step: bounds on the epsilon of one release
    runs    many short runs, with and without a canary: bounds on the epsilon of a whole run

A bound above what is proved shows a fault. One below it proves nothing.
"""

from gradveil.audit.bounds import (
    Bound,
    Trials,
    clopper_pearson,
    gaussian_epsilon,
    gaussian_family,
    one_run,
    one_run_fdp,
)
from gradveil.audit.canary import Setting
from gradveil.audit.from_config import setting_of
from gradveil.audit.result import Audit, audit_json
from gradveil.audit.runs import audit_runs
from gradveil.audit.steps import audit_steps

__all__ = [
    "Audit",
    "Bound",
    "Setting",
    "Trials",
    "audit_json",
    "audit_runs",
    "audit_steps",
    "clopper_pearson",
    "gaussian_epsilon",
    "gaussian_family",
    "one_run",
    "one_run_fdp",
    "setting_of",
]
