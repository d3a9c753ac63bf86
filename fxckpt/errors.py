"""The errors a user can meet. Each says what was asked, what was found and what to do."""

from __future__ import annotations

from typing import Any

import torch.utils.checkpoint


class FxckptError(Exception):
    """Base of every error that fxckpt raises on purpose."""


class InvalidBudget(FxckptError, ValueError):
    """A budget that cannot be meant."""


class InvalidOption(FxckptError, ValueError):
    """An unknown option, inner compiler or cost model."""


class InvalidCost(FxckptError, ValueError):
    """A cost model returned what is no time: NaN, negative, infinite, or beyond what can be added up."""


class InnerCompilerMissing(FxckptError):
    """Inductor has no working compiler on this machine."""


class PolicyConflict(FxckptError, ValueError):
    """Two policies say MUST of one value, and oppose each other."""


class PolicyMatchesNothing(FxckptError, ValueError):
    """A policy names modules, ops or values that the graph does not have."""


class InvalidPlan(FxckptError, ValueError):
    """A text that is no plan, one of another version, or one that was changed."""


class PlanMismatch(FxckptError, ValueError):
    """A plan was made for another graph than the one it is to be applied to."""


class CaptureError(FxckptError):
    """The model could not be captured as a graph that can be planned."""


class PlanningFailed(FxckptError):
    """Planning raised what it should not: a defect of fxckpt, or of Inductor, which it asks what becomes of a plan."""


class VerifyError(FxckptError):
    """An emitted graph breaks an invariant: a defect of fxckpt, stopped before it could give a wrong number."""


class RecomputeMismatch(FxckptError):
    """With ``verify="exact"``: an op's second run gave other values than its first."""


class CheckpointError(FxckptError, torch.utils.checkpoint.CheckpointError):
    """A checkpointed region cannot give back what autograd asks for."""


class BudgetInfeasible(FxckptError):
    """No plan fits the budget. ``floor_bytes`` is the least peak the planner reached, ``budget_bytes`` what was asked."""

    def __init__(self, message: str, *, floor_bytes: int, budget_bytes: int) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.budget_bytes = budget_bytes

    def among(self, graph: int) -> BudgetInfeasible:
        """Return the error for a model that broke into several graphs, of which the budget does not fit this one, counted from 1."""
        return BudgetInfeasible(
            f"{self} This is graph {graph} of those that the model broke into, and a budget is for each of them: a share is of that graph's own "
            "peak. Bytes, as many as the largest needs, hold for the small ones too.",
            floor_bytes=self.floor_bytes,
            budget_bytes=self.budget_bytes,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (_infeasible, (str(self), self.floor_bytes, self.budget_bytes))


def _infeasible(message: str, floor_bytes: int, budget_bytes: int) -> BudgetInfeasible:
    return BudgetInfeasible(message, floor_bytes=floor_bytes, budget_bytes=budget_bytes)
