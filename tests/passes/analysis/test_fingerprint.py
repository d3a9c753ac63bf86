"""Fingerprint: one line a node, whatever the order of the inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fxckpt.errors import InvalidPlan, PlanMismatch
from fxckpt.passes.analysis.fingerprint import (
    fingerprint,
    refuse_another_graph,
    refuse_unknown_ops,
)
from fxckpt.plans.types import Recompute
from tests.passes.graphs import chain, planned, traced


def joint(length: int = 4) -> fx.GraphModule:
    return traced(chain, torch.ones(length), torch.ones(length))


def test_lines_of_a_chain() -> None:
    """A line has the op, its arguments, and dtype and shape of the value."""
    assert_expected_inline(
        "\n".join(fingerprint(joint().graph)),
        """\
input_1: float32[4]
tangents_1: float32[4]
sin: aten.sin.default(input_1) -> float32[4]
sin_1: aten.sin.default(sin) -> float32[4]
cos: aten.cos.default(sin) -> float32[4]
mul: aten.mul.Tensor(tangents_1, cos) -> float32[4]
cos_1: aten.cos.default(input_1) -> float32[4]
mul_1: aten.mul.Tensor(mul, cos_1) -> float32[4]
output: [sin_1], gradients: [mul_1]""",
    )


def test_order_of_inputs_is_no_part() -> None:
    """Inputs are numbered by their first readers, and gradients follow that order."""

    def one(primals_a: Tensor, primals_b: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        return primals_a.sin() * primals_b.cos(), tangents.neg(), tangents.exp()

    def other(primals_b: Tensor, primals_a: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        result = primals_a.sin() * primals_b.cos()
        negative = tangents.neg()
        return result, tangents.exp(), negative

    inputs = (torch.ones(4), torch.ones(4), torch.ones(4))
    first, second = (fingerprint(traced(f, *inputs).graph) for f in (one, other))
    assert first == second


def test_plan_of_its_own_graph_is_accepted() -> None:
    """Neither check raises for the plan of the graph."""
    facts, plan = planned(joint())
    refuse_another_graph(plan, fingerprint(joint().graph))
    refuse_unknown_ops(plan, facts)


def test_plan_of_another_shape_is_refused() -> None:
    """The error shows the first line that differs."""
    _, plan = planned(joint())
    with pytest.raises(PlanMismatch, match=r"float32\[4\]\n.*float32\[5\]"):
        refuse_another_graph(plan, fingerprint(joint(5).graph))


def test_edited_schedule_is_refused() -> None:
    """The error names the recompute that the graph cannot have."""
    facts, plan = planned(joint())
    edited = dataclasses.replace(plan, schedule=(Recompute("tan", before="mul"),))
    with pytest.raises(InvalidPlan, match="recomputes 'tan' before 'mul'"):
        refuse_unknown_ops(edited, facts)


def test_numbers_of_a_rank_are_no_part() -> None:
    """Offsets and group names are left out of a graph that communicates, and of no other."""

    def lines(offset: int, group: str, *, communicates: bool = True) -> tuple[str, ...]:
        def step(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
            y = primals - offset
            if communicates:
                functional = torch.ops._c10d_functional
                y = functional.wait_tensor(functional.all_reduce(y, "sum", group))
            return y, tangents * y

        return fingerprint(traced(step, torch.ones(4), torch.ones(4)).graph)

    assert lines(0, "1") == lines(64, "2")
    assert lines(0, "", communicates=False) != lines(64, "", communicates=False)
