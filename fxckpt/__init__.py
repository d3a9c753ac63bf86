"""Activation checkpointing for PyTorch: FX graph rewriting within a budget of peak bytes."""

import sys

from fxckpt import _interrupts

# What follows imports torch, which takes seconds.
_interrupts.leave_quietly()

from fxckpt import (
    torch_private as torch_private,
)  # Before all else: it refuses a torch that is too old.

# isort: split
from fxckpt import policies, tiers
from fxckpt.backend import Backend, report
from fxckpt.blocks import compile_blocks
from fxckpt.eager.api import (
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
from fxckpt.eager.patch import TorchPatch, patch_torch
from fxckpt.eager.region_report import Region, RegionRow, record_regions
from fxckpt.errors import (
    BudgetExceeded,
    BudgetInfeasible,
    CaptureError,
    CheckpointError,
    FxckptError,
    InnerCompilerMissing,
    InvalidBudget,
    InvalidCost,
    InvalidOption,
    InvalidPlan,
    NotOneGraph,
    OffloadMismatch,
    PlanMismatch,
    PlanningFailed,
    PolicyConflict,
    PolicyMatchesNothing,
    RanksDisagree,
    RecomputeMismatch,
    SlowdownInfeasible,
    TierFull,
    VerifyError,
)
from fxckpt.integrations.transformers import patch_transformers
from fxckpt.measure import measure_peak
from fxckpt.ops.naming import name
from fxckpt.ops.region_budgets import budget
from fxckpt.ops.registry import register_op
from fxckpt.partitioner import Partitioner
from fxckpt.planner.capacity import Fit, Resident, Trial, fit
from fxckpt.planner.capture import plan
from fxckpt.planner.sweep import frontier
from fxckpt.plans.types import Offload, Plan, Recompute, RegionBudget, Row
from fxckpt.process_memory.api import report_memory
from fxckpt.process_memory.report import MemoryReport, MemoryRow, OutOfMemory
from fxckpt.reason import Decision, Reason
from fxckpt.rehearsal.api import plan_step
from fxckpt.reports.step_plan import GraphLevels, StepFrontier, StepPlan
from fxckpt.reports.tradeoff import Frontier
from fxckpt.rewriting.api import rewrite
from fxckpt.verification.api import verify
from fxckpt.verification.verdict import Finding, Verdict

# People write ``from fxckpt.checkpoint import checkpoint``, as they do of torch.utils.checkpoint.
sys.modules["fxckpt.checkpoint"] = sys.modules["fxckpt.eager.api"]

__all__ = [
    "SAC_IGNORED_OPS",
    "Backend",
    "BudgetExceeded",
    "BudgetInfeasible",
    "CaptureError",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "Decision",
    "DefaultDeviceType",
    "Finding",
    "Fit",
    "Frontier",
    "FxckptError",
    "GraphExecGroup",
    "GraphLevels",
    "InnerCompilerMissing",
    "InvalidBudget",
    "InvalidCost",
    "InvalidOption",
    "InvalidPlan",
    "MemoryReport",
    "MemoryRow",
    "NotOneGraph",
    "Offload",
    "OffloadMismatch",
    "OutOfMemory",
    "Partitioner",
    "Plan",
    "PlanMismatch",
    "PlanningFailed",
    "PolicyConflict",
    "PolicyMatchesNothing",
    "RanksDisagree",
    "Reason",
    "Recompute",
    "RecomputeMismatch",
    "Region",
    "RegionBudget",
    "RegionRow",
    "Resident",
    "Row",
    "SelectiveCheckpointContext",
    "SlowdownInfeasible",
    "StepFrontier",
    "StepPlan",
    "TierFull",
    "TorchPatch",
    "Trial",
    "Verdict",
    "VerifyError",
    "budget",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "compile_blocks",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "fit",
    "frontier",
    "get_device_states",
    "measure_peak",
    "name",
    "noop_context_fn",
    "patch_torch",
    "patch_transformers",
    "plan",
    "plan_step",
    "policies",
    "record_regions",
    "register_op",
    "report",
    "report_memory",
    "rewrite",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "tiers",
    "verify",
]
__version__ = "0.1.0"
