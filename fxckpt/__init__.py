"""Activation checkpointing for PyTorch as an FX graph-rewriting pass, within a budget of peak bytes."""

from fxckpt import policies
from fxckpt.backend import Backend
from fxckpt.capture import plan
from fxckpt.errors import (
    BudgetInfeasible,
    CaptureError,
    FxckptError,
    InnerCompilerMissing,
    InvalidBudget,
    InvalidCost,
    InvalidOption,
    InvalidPlan,
    PlanMismatch,
    PlanningFailed,
    PolicyConflict,
    PolicyMatchesNothing,
    RecomputeMismatch,
    VerifyError,
)
from fxckpt.frontier import Frontier, frontier
from fxckpt.measure import measure_peak
from fxckpt.naming import name
from fxckpt.plan import Decision, Plan, Reason, Recompute, Row
from fxckpt.registry import register_op
from fxckpt.rewrite import rewrite

__all__ = [
    "Backend",
    "BudgetInfeasible",
    "CaptureError",
    "Decision",
    "Frontier",
    "FxckptError",
    "InnerCompilerMissing",
    "InvalidBudget",
    "InvalidCost",
    "InvalidOption",
    "InvalidPlan",
    "Plan",
    "PlanMismatch",
    "PlanningFailed",
    "PolicyConflict",
    "PolicyMatchesNothing",
    "Reason",
    "Recompute",
    "RecomputeMismatch",
    "Row",
    "VerifyError",
    "frontier",
    "measure_peak",
    "name",
    "plan",
    "policies",
    "register_op",
    "rewrite",
]
__version__ = "0.1.0"
