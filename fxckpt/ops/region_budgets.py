"""Budgets that a model gives to parts of itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

from fxckpt.budgets import parse_region
from fxckpt.errors import InvalidBudget
from fxckpt.torch_private import (
    annotate,
    annotates,
    calling_line,
    constant_in_graph,
    new_key,
    not_compiled,
)

P = ParamSpec("P")
R = TypeVar("R")


class BudgetContext(Protocol):
    """A context manager that decorates functions as well."""

    def __enter__(self) -> object:
        """Begin a region."""

    def __exit__(self, *error: object) -> bool | None:
        """End the region, and let an error pass."""

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that is called in a region."""


def budget(limit: int | float | str, name: str = "") -> BudgetContext:
    """Return a context manager that gives the ops under it a budget for their saved values.

    In a graph that fxckpt plans, the bytes of their values that the forward saves for the backward
    are at most ``limit``. What such a region hands on counts as its own, forward outputs and inputs
    of the graph never count. Regions nest: an inner one has its own budget, and its values count
    for the outer one too. The peak budget of the graph holds as well.

    It decorates functions as well, as ``torch.no_grad`` does. What counts is what is traced under
    it: in eager mode, under another backend, and around a call of a function that is compiled by
    itself, it does nothing.

    Parameters
    ----------
    limit:
        Bytes as an int or a string (``"300MiB"``), or a fraction in [0, 1] (``0.4`` or ``"40%"``)
        of the way from the fewest bytes that can be saved (0.0) to what is saved without a budget
        (1.0, which is no limit), as for ``torch.autograd.graph.region_activation_memory_budget``.
    name:
        Name in reports; the line of the source if empty.

    Raises
    ------
    InvalidBudget
        For any other ``limit``.

    Examples
    --------
    >>> import torch, fxckpt
    >>> def block(x, w):
    ...     with fxckpt.budget("1KiB", name="head"):
    ...         x = (x @ w).sin().exp()
    ...     return x.sum()
    >>> w = torch.randn(16, 16, requires_grad=True)
    >>> plan = fxckpt.plan(block, torch.randn(16, 16), w)
    >>> [(region.name, region.saved_bytes, region.binds) for region in plan.regions]
    [('head', 1024, True)]
    """
    if annotates():
        # A number that Dynamo follows as a symbol breaks the graph; as an element of a set it is
        # the number it stands for, which is guarded.
        (limit,) = {limit}
    if problem := _problem(limit):
        # Not raised by what Dynamo calls as it traces, which would be an internal error of Dynamo.
        raise InvalidBudget(problem)
    return annotate(_key(limit, name)) if annotates() else _Untraced(limit, name)


class _Untraced(nullcontext[None]):
    """What a budget is where nothing is traced: no context, and a decorator of what will be."""

    def __init__(self, limit: int | float | str, name: str) -> None:
        super().__init__()
        self._limit, self._name = limit, name

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that is called under the budget, also where it is traced."""
        limit, name = self._limit, self._name or calling_line()

        @wraps(function)
        def budgeted(*args: P.args, **kwargs: P.kwargs) -> R:
            with budget(limit, name):
                return function(*args, **kwargs)

        return budgeted


@constant_in_graph
def _problem(limit: int | float | str) -> str:
    """Return the defect of a budget as text; empty if it has none."""
    try:
        parse_region(limit)
    except InvalidBudget as error:
        return str(error)
    return ""


@constant_in_graph
def _key(limit: int | float | str, name: str) -> str:
    """Return the key of a new entry; Dynamo calls it as it traces."""
    return new_key(parse_region(limit), name)


# In eager mode Dynamo would trace each alone, a frame between two graphs.
for function in (budget, _problem, _key):
    not_compiled(function)
