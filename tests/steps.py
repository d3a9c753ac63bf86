"""One training step, eager and compiled within budgets, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxckpt
from fxckpt.memory_meter.cpu import cpu_meter

FLOOR = "floor"
BUDGETS = (None, 0.8, FLOOR)

Make = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def loss_of(outputs: Any) -> Tensor:
    """The sum of squares of all outputs that need a gradient."""
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack(
        [(t.abs().square() if t.is_complex() else t.float().square()).mean() for t in leaves]
    ).sum()


def outcome(
    model: Callable[..., Any], forward: Callable[..., Any], inputs: Sequence[Any]
) -> dict[str, Tensor]:
    """Run a step; return its outputs, gradients, buffers, inputs and generator states."""
    torch.manual_seed(1)
    outputs = forward(*inputs)
    seen = {
        f"output {i}": t.detach().clone()
        for i, t in enumerate(pytree.tree_leaves(outputs))
        if isinstance(t, Tensor)
    }
    loss_of(outputs).backward()
    seen["generator"] = torch.get_rng_state()
    if torch.cuda.is_available():
        seen |= {
            f"generator of GPU {i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())
        }
    if isinstance(model, nn.Module):
        seen |= {
            f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None
        }
        seen |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    for i, t in enumerate(pytree.tree_leaves(list(inputs))):
        if isinstance(t, Tensor):
            seen[f"input {i}"] = t.detach().clone()
            if t.is_leaf and t.grad is not None:
                seen[f"gradient of input {i}"] = t.grad
    return seen


def fresh(make: Make) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The model and its inputs, always with the same values."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    return make()


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names of what differs in any bit; NaN equals NaN."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or not identical(a[name], b[name])
    )


def identical(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())


def peak_of(backend: Any, make: Callable[[], tuple[nn.Module, Tensor]]) -> int:
    """The measured peak of a second step."""
    return peak_and_held_of(backend, make)[0]


def peak_and_held_of(backend: Any, make: Callable[[], tuple[nn.Module, Tensor]]) -> tuple[int, int]:
    """The peak of a second step, and the bytes that a third forward leaves with its loss."""
    torch._dynamo.reset()
    model, x = make()
    compiled = torch.compile(model, backend=backend)
    compiled(x).backward()
    model.zero_grad(set_to_none=True)
    measured = fxckpt.measure_peak(lambda: compiled(x).backward())
    model.zero_grad(set_to_none=True)
    meter = cpu_meter()
    before = meter.allocated()
    loss = compiled(x)
    held = meter.allocated() - before
    del loss
    return measured, held


UNCHECKPOINTED = "aot_eager_default_partitioner"
"""The backend that runs the same ops and saves everything.

For models whose gradients torch sums in another order when it compiles.
"""


def same_at_every_budget(
    make: Make, budgets: Sequence[object] = BUDGETS, *, reference: str = "eager", **options: Any
) -> list[fxckpt.Plan]:
    """Assert that a step is the same under ``reference`` and at every budget; return the plans.

    ``options`` go to :class:`fxckpt.Backend`; a budget below the floor is left out, so that
    ``FLOOR`` must come last.
    """
    model, inputs = fresh(make)
    expected = outcome(
        model, model if reference == "eager" else torch.compile(model, backend=reference), inputs
    )
    plans: list[fxckpt.Plan] = []
    floor: int | None = None
    for budget in budgets:
        model, inputs = fresh(make)
        backend = fxckpt.Backend(
            budget=floor if budget == FLOOR else budget,
            # What `outcome` copies between forward and backward is not the model's.
            **{"inner": "aot_eager", "scope": "graph", **options},
        )
        compiled = torch.compile(model, backend=backend)
        try:
            got = outcome(model, compiled, inputs)
        except fxckpt.BudgetInfeasible as error:
            floor = error.floor_bytes
            continue
        assert backend.plans, "nothing was planned"
        floor = floor or max(p.floor_bytes for p in backend.plans)
        assert differing(expected, got) == [], f"budget {budget}"
        for plan in backend.plans:
            assert "policy" in options or plan.peak_bytes <= plan.baseline_peak_bytes
        plans += backend.plans
    return plans
