"""Autotuning: finalists are compiled and timed, and the fastest is kept."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxckpt
from fxckpt.inductor.autotune import ROUNDS, step_seconds, unsafe_op
from fxckpt.inductor.planner import InductorPlanner
from fxckpt.passes.graphs import Joint
from fxckpt.passes.transforms.rematerialize import IS_RECOMPUTE
from fxckpt.planner.planner import Planner
from fxckpt.plans.types import Plan
from tests.inductor.test_compile import Model
from tests.joints import inductor_joint, plain_joint


class Clock:
    """A clock that stands still unless a step is told to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Compiler:
    """Runs halves as they are.

    A backward takes 100 seconds, and ``each`` more for every recomputed op.
    """

    def __init__(self, clock: Clock, *, each: float) -> None:
        self.clock, self.each = clock, each
        self.runs = 0

    def __call__(
        self, half: fx.GraphModule, is_backward: bool, strides: Mapping[str, tuple[int, ...]]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        again = sum(IS_RECOMPUTE in node.meta for node in half.graph.nodes)

        def run(inputs: list[Any]) -> Sequence[Any]:
            given = [*inputs]
            inputs.clear()
            self.runs += 1
            self.clock.now += (100 + self.each * again) * is_backward
            return half(*given)  # type: ignore[no-any-return]

        return run


def step() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Model(blocks=1), torch.randn(512, 32), torch.randint(0, 512, (512,))


def chosen(compiler: Compiler) -> Plan:
    joint, count = inductor_joint(*step())
    planner = InductorPlanner(Planner(cost="flops"), compile_half=compiler, clock=compiler.clock)
    return planner.partition(Joint(joint, count))[2]


def test_plan_of_the_least_time_is_kept() -> None:
    """A plan with few recomputes wins where they cost time, one with many where they save it."""
    fewest, most = (len(chosen(Compiler(Clock(), each=each)).schedule) for each in (2.0, -2.0))
    assert fewest < most


def test_finalists_run_in_turn_after_one_untimed_step() -> None:
    """Every finalist runs one untimed and ROUNDS timed steps."""
    compiler = Compiler(Clock(), each=2.0)
    joint, count = inductor_joint(*step())
    forward, backward, _ = InductorPlanner(Planner(cost="flops")).partition(Joint(joint, count))
    seconds = step_seconds([(forward, backward)] * 2, compiler, torch.device("cpu"), compiler.clock)
    assert compiler.runs == 2 * 2 * (1 + ROUNDS)
    assert seconds[0] == seconds[1] > 0


def test_step_that_rejects_synthetic_inputs_is_not_timed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step may raise on synthetic inputs; the plan expected to be fastest is taken."""

    def refuse(
        half: fx.GraphModule, is_backward: bool, strides: Mapping[str, tuple[int, ...]]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        def run(given: list[Any]) -> Sequence[Any]:
            raise IndexError("index 0 is out of bounds")

        return run

    joint, count = inductor_joint(*step())
    with caplog.at_level(logging.WARNING, "fxckpt"):
        plan = InductorPlanner(Planner(cost="flops"), compile_half=refuse).partition(
            Joint(joint, count)
        )[2]
    assert "cannot be timed" in caplog.text
    assert plan.saved


def test_measured_cost_times_finalists_once(caplog: pytest.LogCaptureFixture) -> None:
    """A second process finds the plan in the cache, and times nothing."""
    found = []
    for is_first in (True, False):
        torch._dynamo.reset()
        caplog.clear()
        backend = fxckpt.Backend(cost="measured")
        model, *inputs = step()
        with caplog.at_level(logging.INFO, "fxckpt"):
            torch.compile(model, backend=backend)(*inputs).backward()
        timed = [record for record in caplog.records if "ms a step" in record.getMessage()]
        assert len(timed) >= 2 if is_first else not timed
        found.append(backend.plans[0])
    assert found[0] == found[1]


class Normalized(nn.Module):
    """Convolutions, which Inductor lays out anew, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                m
                for _ in range(2)
                for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def test_timing_leaves_running_statistics_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Buffers after a timed compile equal those after one eager step."""
    torch.manual_seed(0)
    x, model = torch.randn(8, 8, 16, 16), Normalized()
    other = copy.deepcopy(model)
    with caplog.at_level(logging.INFO, "fxckpt"):
        torch.compile(model, backend=fxckpt.Backend(cost="measured"))(x).backward()
    assert "ms a step" in caplog.text
    other(x).backward()
    for name, found in model.named_buffers():
        torch.testing.assert_close(found, dict(other.named_buffers())[name])


@torch.library.custom_op("fxckpt_tests::logged", mutates_args=())
def logged(x: Tensor) -> Tensor:
    raise AssertionError("it must not be run for its time")


@logged.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_ops_with_effects_are_not_timed() -> None:
    """A custom op bars a step from being timed, also inside a branch."""

    def barred(function: Callable[[Tensor], Tensor]) -> str | None:
        joint, _ = plain_joint(function, torch.ones(8, 8, requires_grad=True))
        return unsafe_op([joint])

    assert barred(lambda x: (x * logged(x.detach())).sum()) == "fxckpt_tests.logged.default"
    assert (
        barred(
            lambda x: torch.cond(
                x.sum() > 0, lambda t: t * logged(t.detach()), torch.sin, (x,)
            ).sum()
        )
        is not None
    )
    assert barred(lambda x: torch.cond(x.sum() > 0, torch.cos, torch.sin, (x,)).sum()) is None
    assert barred(lambda x: x.detach().add_(1).mul(x).sum()) is None
