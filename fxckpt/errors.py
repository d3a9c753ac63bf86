"""Errors a user can meet; each message names the request, the finding and a remedy."""

from __future__ import annotations

import os
from typing import Any

import torch.utils.checkpoint

STRICT = "FXCKPT_STRICT"
"""Environment variable that makes every defect of the planner an error when it is ``"1"``."""


class FxckptError(Exception):
    """Base of every error that fxckpt raises on purpose."""

    def on_rank(self, rank: int) -> FxckptError:
        """Return the error that the other ranks of a group raise with the one that cannot go on."""
        return type(self)(_of_rank(rank, self))


class InvalidBudget(FxckptError, ValueError):
    """An invalid budget."""


class InvalidOption(FxckptError, ValueError):
    """An unknown option, inner compiler or cost model."""


class InvalidCost(FxckptError, ValueError):
    """A cost model raised, or returned NaN, a negative, an infinite or a too large number."""


class InnerCompilerMissing(FxckptError):
    """Inductor has no working compiler on this machine."""


class BudgetExceeded(FxckptError):
    """With ``strict=True``, the measured peak of a step was over its budget."""


class PolicyConflict(FxckptError, ValueError):
    """Two policies give one value opposite MUST decisions."""


class PolicyMatchesNothing(FxckptError, ValueError):
    """A policy names modules, ops or values that the graph does not have."""


class InvalidPlan(FxckptError, ValueError):
    """A text is no plan, is of another version, or was changed."""


class PlanMismatch(FxckptError, ValueError):
    """A plan was made for a graph other than the one it is applied to."""


class CaptureError(FxckptError):
    """The model cannot be captured as a graph to plan."""


class NotOneGraph(CaptureError):
    """The model is several graphs, of which :func:`fxckpt.plan_step` plans the step."""


class PlanningFailed(FxckptError):
    """Planning failed by a defect of fxckpt, or of Inductor while lowering a plan."""


class VerifyError(FxckptError):
    """An emitted graph breaks an invariant: a defect of fxckpt, found before the graph runs."""


class RanksDisagree(FxckptError):
    """Ranks that decide together compile different programs, or one of them is missing."""


class RecomputeMismatch(FxckptError):
    """With ``verify="exact"``, the recompute of an op gave other values than its first run."""


class OffloadMismatch(FxckptError):
    """A value came back with other bits than were sent away, or might have.

    Bits are compared with ``verify="exact"``.
    """


class TierFull(FxckptError):
    """The memory that saved values are sent to is full."""


class CheckpointError(FxckptError, torch.utils.checkpoint.CheckpointError):
    """A checkpointed region cannot restore a value that autograd asks for."""


class BudgetInfeasible(FxckptError):
    """No plan fits the budget.

    Attributes
    ----------
    floor_bytes
        Least peak the planner reached, in bytes.
    budget_bytes
        The budget, in bytes.
    """

    def __init__(self, message: str, *, floor_bytes: int, budget_bytes: int) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.budget_bytes = budget_bytes

    def among(self, graph: int) -> BudgetInfeasible:
        """Return the error of graph number ``graph``, from 1, of a model in several graphs."""
        return BudgetInfeasible(
            f"{self} This is graph {graph} of those that the model broke into, and a budget is "
            "for each of them: a share is of that graph's own peak. "
            "Bytes, as many as the largest needs, hold for the small ones too.",
            floor_bytes=self.floor_bytes,
            budget_bytes=self.budget_bytes,
        )

    def within_step(self) -> BudgetInfeasible:
        """Return the error of a graph that is planned as if it were the step."""
        return _infeasible(
            f"{self} What the step allocates outside of the graph comes on top.",
            self.floor_bytes,
            self.budget_bytes,
        )

    def on_rank(self, rank: int) -> BudgetInfeasible:
        """Return the error that the other ranks of a group raise with the one that cannot go on."""
        return _infeasible(_of_rank(rank, self), self.floor_bytes, self.budget_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_infeasible, (str(self), self.floor_bytes, self.budget_bytes))


class SlowdownInfeasible(FxckptError):
    """No plan takes so little time.

    Attributes
    ----------
    least_slowdown
        Extra time of the fastest plan, as a share of the uncheckpointed step's.
    """

    def __init__(self, message: str, *, least_slowdown: float) -> None:
        super().__init__(message)
        self.least_slowdown = least_slowdown

    def on_rank(self, rank: int) -> SlowdownInfeasible:
        """Return the error that the other ranks of a group raise with the one that cannot go on."""
        return _slowdown_infeasible(_of_rank(rank, self), self.least_slowdown)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_slowdown_infeasible, (str(self), self.least_slowdown))


def is_strict() -> bool:
    """Return whether every defect of the planner is an error."""
    return os.environ.get(STRICT) == "1"


def is_defect(error: Exception) -> bool:
    """Return whether an error is the planner's or torch's, and not an answer to the user."""
    is_answer = isinstance(error, (FxckptError, Warning))
    return not is_answer or isinstance(error, (PlanningFailed, VerifyError))


def _of_rank(rank: int, error: FxckptError) -> str:
    return f"rank {rank}: {error}"


def _slowdown_infeasible(message: str, least_slowdown: float) -> SlowdownInfeasible:
    return SlowdownInfeasible(message, least_slowdown=least_slowdown)


def _infeasible(message: str, floor_bytes: int, budget_bytes: int) -> BudgetInfeasible:
    return BudgetInfeasible(message, floor_bytes=floor_bytes, budget_bytes=budget_bytes)
