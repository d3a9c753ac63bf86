"""Peaks of a step whose backward compiled autograd compiles: ``python bench/compiled_autograd.py``.

A language model of four layers is trained by each inner compiler at three budgets. "Alone" is the
peak of the same step without compiled autograd, "within" with it; both are measured in the second
step, and stand beside the plan's and stock Inductor's. Gradients are compared with eager's.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from models import LlamaStyle
from torch._dynamo import compiled_autograd

import fxckpt
from fxckpt.utils.tables import Column, Table

BUDGETS = (None, 0.75, "min")
MIB = 2**20


def peak_of(model: torch.nn.Module, x: torch.Tensor, backend: Any, *, is_within: bool) -> float:
    """Return the MiB that the second step allocates beyond what was allocated before it."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: model(x) / x.numel(), backend=backend)

    def compile_backward(gm: torch.fx.GraphModule) -> Any:
        return torch.compile(gm, backend=backend)

    def step() -> None:
        model.zero_grad()
        context = compiled_autograd._enable(compile_backward)
        with context if is_within else contextlib.nullcontext():
            compiled(x).backward()

    step()
    model.zero_grad()
    peak = fxckpt.measure_peak(step)
    for p, expected in zip(model.parameters(), model.expected, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-3, atol=1e-5)
    return peak / MIB


def main() -> None:
    """Print the peaks."""
    model, x = LlamaStyle(4), torch.randn(1, 512, 256)
    (model(x) / x.numel()).backward()
    model.expected = [p.grad for p in model.parameters()]
    stock = [peak_of(model, x, "inductor", is_within=within) for within in (False, True)]
    rows: list[tuple[Any, ...]] = [("inductor (torch)", "", None, None, *stock)]
    for inner in ("inductor", "aot_eager"):
        for budget in BUDGETS:
            peaks = []
            for within in (False, True):
                backend = fxckpt.Backend(budget, inner=inner, scope="graph")
                peaks.append(peak_of(model, x, backend, is_within=within))
            (plan,) = backend.plans
            planned = plan.compiled_peak_bytes or plan.peak_bytes
            limit = None if plan.budget_bytes is None else plan.budget_bytes / MIB
            rows.append((f"{inner} (fxckpt)", str(budget), limit, planned / MIB, *peaks))

    def mib(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    columns = (
        Column("compiler", "compiler"),
        Column("budget", "budget"),
        *(
            Column(name, f"{name} (MiB)", mib, is_number=True)
            for name in ("limit", "plan", "alone", "within")
        ),
    )
    print(Table(columns, tuple(rows)))


if __name__ == "__main__":
    main()
