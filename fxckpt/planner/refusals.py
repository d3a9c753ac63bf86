"""Errors and warnings of the planner: what was asked, what was found, what to do."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator

from torch import fx

from fxckpt import budgets
from fxckpt.errors import (
    STRICT,
    BudgetInfeasible,
    InvalidOption,
    SlowdownInfeasible,
    is_defect,
    is_strict,
)
from fxckpt.policies.base import Policy
from fxckpt.solver.program import SavedLimit
from fxckpt.torch_private import unbounded_sizes

log = logging.getLogger("fxckpt")


def refuse_tiles(policy: Policy | None) -> None:
    """Raise :class:`InvalidOption` for a policy with tiles, where there can be none."""
    if policy is not None and policy.tiles():
        raise InvalidOption(
            f"policy={policy!r} runs modules in tiles, which are for models that are one graph: "
            "fxckpt.Backend, fxckpt.Partitioner, fxckpt.plan, and fxckpt.rewrite of a module. "
            "Leave tile(...) out here."
        )


def infeasible(
    budget: budgets.Budget,
    budget_bytes: int,
    floor_bytes: int,
    baseline_peak_bytes: int,
    hint: str = "",
    *,
    is_compiled: bool = False,
) -> BudgetInfeasible:
    """Return the error for a budget below the floor.

    As compiled, the floor may be above the uncheckpointed peak as planned, of which fractions are;
    with ``is_compiled`` they are of the compiled peak of torch's own partition.
    """
    asked, floor = budgets.format_apart(budget_bytes, floor_bytes)
    planned = " as planned, before it is compiled" if floor_bytes > baseline_peak_bytes else ""
    of = "the compiled peak of torch's own partition" if is_compiled else "its uncheckpointed peak"
    fraction = budgets.least_fraction(budget, floor_bytes, baseline_peak_bytes)
    enough = f"'{floor_bytes}B'" if fraction is None else f"{fraction} ('{floor_bytes}B')"
    return BudgetInfeasible(
        f"budget={budget!r} is {asked}, below the least peak found for this graph, {floor}; "
        f"{of} is {budgets.format_bytes(baseline_peak_bytes)}{planned}. Raise the budget to "
        f"at least {enough}, or make the batch smaller.{hint}",
        floor_bytes=floor_bytes,
        budget_bytes=budget_bytes,
    )


def infeasible_region(limit: SavedLimit) -> BudgetInfeasible:
    """Return the error for a region with a budget below the fewest bytes that can be saved."""
    asked, least = budgets.format_apart(limit.bytes, limit.least_bytes)
    return BudgetInfeasible(
        f"the budget of region {limit.name!r} is {asked}, below the least that can be saved of its "
        f"values, {least}: they may not be recomputed, or are what others are recomputed from. "
        f"Raise it to at least '{limit.least_bytes}B', or leave them out of the region.",
        floor_bytes=limit.least_bytes,
        budget_bytes=limit.bytes,
    )


def too_slow(max_slowdown: float, least: float) -> SlowdownInfeasible:
    """Return the error for a target in time that even the fastest plan exceeds."""
    at_least = math.ceil(least * 1e4) / 1e4
    return SlowdownInfeasible(
        f"max_slowdown={max_slowdown!r} cannot be kept: the policy alone has values recomputed for "
        f"{least:.2%} of the step's time. Raise it to at least {at_least}, or let the policy "
        "prefer what it demands (PREFER_RECOMPUTE in place of MUST_RECOMPUTE).",
        least_slowdown=least,
    )


def warn_of_unbounded_sizes(graph: fx.Graph, budget: budgets.Budget) -> None:
    """Warn of sizes that only the step knows, planned as 1, under which no budget is certain."""
    if unbounded := unbounded_sizes(graph):
        warnings.warn(
            f"budget={budget!r} cannot be promised: {', '.join(unbounded)} are known only when the "
            "step runs, and were planned as 1. Give them an upper bound: torch._check(size <= n) "
            "in the model, or mark_unbacked(x, dim, max=n).",
            stacklevel=2,
        )


def warn_of_no_tiles(tile: int | str, why: str) -> None:
    """Warn of a number of tiles that was asked for, which the plan of a graph does not have."""
    warnings.warn(f"tile={tile!r}: the graph is planned whole, as {why}".rstrip(), stacklevel=2)


@contextlib.contextmanager
def leaving_out(tiles: str, *, is_asked: bool) -> Iterator[None]:
    """Leave out tiles that fail within, with a warning that has the reason.

    Those that were asked for fail with their own error, and so do all defects where every one is
    an error. That nothing fits a budget is no failure.
    """
    try:
        yield
    except (BudgetInfeasible, SlowdownInfeasible, Warning):
        raise
    except Exception as error:
        if is_asked or (is_defect(error) and is_strict()):
            error.add_note(f"Tiles that were tried: {tiles}.")
            raise
        log.debug("tiles that failed: %s", tiles, exc_info=error)
        remedy = f"\nThis is a defect of fxckpt; {STRICT}=1 makes it an error."
        warnings.warn(
            f"Tiles that failed are left out, {tiles}: {type(error).__name__}: {error}"
            f"{remedy if is_defect(error) else ''}",
            stacklevel=3,
        )
