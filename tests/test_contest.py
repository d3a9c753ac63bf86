"""The contest: plans are compiled and timed, and the fastest is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

import fxckpt
from fxckpt.contest import ROUNDS, step_seconds
from fxckpt.fused import FusedPlanner
from fxckpt.pipeline import Planner
from fxckpt.plan import Plan
from tests.joints import inductor_joint


class Clock:
    """Stands still but where a step is told to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Compiler:
    """Runs halves as they are; what runs something again takes ``again`` seconds, what does not takes ``plain``."""

    def __init__(self, clock: Clock, *, plain: float, again: float) -> None:
        self.clock, self.plain, self.again = clock, plain, again
        self.runs = 0

    def __call__(self, half: fx.GraphModule, is_backward: bool) -> Callable[[list[Any]], Sequence[Any]]:
        takes = self.again if any("recompute" in node.name for node in half.graph.nodes) else self.plain

        def run(inputs: list[Any]) -> Sequence[Any]:
            given = [*inputs]
            inputs.clear()
            self.runs += 1
            self.clock.now += takes * is_backward
            return half(*given)  # type: ignore[no-any-return]

        return run


def model(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.gelu(F.gelu(x @ w) @ v).square().mean()


def inputs() -> tuple[Tensor, ...]:
    return torch.randn(64, 32), torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)


def chosen(compiler: Compiler) -> Plan:
    joint, count = inductor_joint(model, *inputs())
    planner = FusedPlanner(Planner(cost="flops"), compile_half=compiler, clock=compiler.clock)
    return planner.partition(joint, num_fwd_outputs=count)[2]


def test_the_plan_that_takes_least_time_is_kept() -> None:
    slow_again, slow_plain = chosen(Compiler(Clock(), plain=1.0, again=2.0)), chosen(Compiler(Clock(), plain=2.0, again=1.0))
    assert not slow_again.schedule
    assert slow_plain.schedule


def test_each_is_run_in_turn_and_once_untimed() -> None:
    compiler = Compiler(Clock(), plain=1.0, again=2.0)
    joint, count = inductor_joint(model, *inputs())
    forward, backward, _ = FusedPlanner(Planner(cost="flops")).partition(joint, num_fwd_outputs=count)
    seconds = step_seconds([(forward, backward)] * 2, compiler, torch.device("cpu"), compiler.clock)
    assert compiler.runs == 2 * 2 * (1 + ROUNDS)
    assert seconds[0] == seconds[1] > 0


def test_a_step_that_made_up_values_do_not_suit_is_not_timed(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(half: fx.GraphModule, is_backward: bool) -> Callable[[list[Any]], Sequence[Any]]:
        def run(given: list[Any]) -> Sequence[Any]:
            raise IndexError("index 0 is out of bounds")

        return run

    joint, count = inductor_joint(model, *inputs())
    with caplog.at_level(logging.WARNING, "fxckpt"):
        plan = FusedPlanner(Planner(cost="flops"), compile_half=refuse).partition(joint, num_fwd_outputs=count)[2]
    assert "cannot be timed" in caplog.text
    assert plan.saved


def test_a_measured_cost_times_what_inductor_makes() -> None:
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        backend = fxckpt.Backend(cost="measured")
        x, w, v = inputs()
        torch.compile(model, backend=backend)(x, w, v).backward()
        found.append((backend.plans[0].digest, w.grad))
    assert found[0][0] == found[1][0]
    assert all(grad is not None for _, grad in found)
