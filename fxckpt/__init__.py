"""Activation checkpointing for PyTorch as an FX graph-rewriting pass, within a budget of peak bytes."""

from fxckpt import interrupts

# What follows imports torch, which takes seconds.
interrupts.leave_quietly()

from fxckpt import torch_private as torch_private  # Before all else: it refuses a torch that is too old.

# isort: split
from fxckpt import policies
from fxckpt.backend import Backend
from fxckpt.capture import plan
from fxckpt.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointFunction,
    CheckpointPolicy,
    DefaultDeviceType,
    GraphExecGroup,
    SelectiveCheckpointContext,
    check_backward_validity,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)
from fxckpt.errors import (
    BudgetInfeasible,
    CaptureError,
    CheckpointError,
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
from fxckpt.huggingface import patch_transformers
from fxckpt.measure import measure_peak
from fxckpt.naming import name
from fxckpt.plan import Decision, Plan, Reason, Recompute, Row
from fxckpt.regions import Region, RegionRow, record_regions
from fxckpt.registry import register_op
from fxckpt.rewrite import rewrite

__all__ = [
    "SAC_IGNORED_OPS",
    "Backend",
    "BudgetInfeasible",
    "CaptureError",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "Decision",
    "DefaultDeviceType",
    "Frontier",
    "FxckptError",
    "GraphExecGroup",
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
    "Region",
    "RegionRow",
    "Row",
    "SelectiveCheckpointContext",
    "VerifyError",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "frontier",
    "get_device_states",
    "measure_peak",
    "name",
    "noop_context_fn",
    "patch_transformers",
    "plan",
    "policies",
    "record_regions",
    "register_op",
    "rewrite",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]
__version__ = "0.1.0"
