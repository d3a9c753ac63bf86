"""Blocks of a model, compiled one by one under one budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fxckpt import budgets
from fxckpt.backend import Backend
from fxckpt.errors import InvalidOption


def compile_blocks(blocks: Iterable[nn.Module], budget: budgets.Budget, **options: Any) -> Backend:
    """Compile the blocks of a model in place, under one budget for the whole step.

    Blocks of one class of yours share their compiled code, so that a deep model compiles about as
    fast as one of its blocks; hooks, wrappers and all else between the blocks stay eager.

    Parameters
    ----------
    blocks:
        Modules of one model, such as ``model.layers``; each is compiled by ``module.compile()``.
    budget:
        Peak of the step beyond what was allocated before it, as for :class:`Backend`.
    options:
        Other arguments of :class:`Backend`; ``scope`` is ``"step"``.

    Returns
    -------
    Backend
        The backend of all blocks; ``report()`` tells each block's level.

    Raises
    ------
    InvalidBudget, InvalidOption
        For invalid arguments.

    Examples
    --------
    >>> import torch, fxckpt
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    >>> model = torch.nn.Sequential(*layers)
    >>> backend = fxckpt.compile_blocks(layers, budget="1MiB", inner="aot_eager")
    >>> for _ in range(2):
    ...     model(torch.randn(256, 64)).sum().backward()
    >>> step = backend.report().step
    >>> step.measured_peak_bytes <= step.budget_bytes
    True
    """
    modules = list(blocks)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise InvalidOption(
                f"{type(module).__name__} is no nn.Module. Give the blocks of a model: "
                "fxckpt.compile_blocks(model.layers, budget='2GiB')."
            )
    if not modules:
        raise InvalidOption(
            "there are no blocks to compile. Give those of a model: "
            "fxckpt.compile_blocks(model.layers, budget='2GiB')."
        )
    backend = Backend(budget, **options)
    compile_each(modules, backend)
    return backend


def compile_each(
    blocks: Sequence[nn.Module], backend: Backend, *, only_with_gradients: bool = False
) -> None:
    """Compile the blocks of a model in place, with one backend.

    With ``only_with_gradients`` calls where gradients are off, as in evaluation, stay eager.
    """
    if backend.step is not None:
        backend.step.is_of_blocks = len(blocks) > 1
    for block in blocks:
        backend.modules.compile(block, only_with_gradients=only_with_gradients)
