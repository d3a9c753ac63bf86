"""Rehearsals: bytes between the graphs of a step, and the order of its calls."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from fxckpt.planner.planned_device import PlannedDevice
from fxckpt.rehearsal.rehearse import LiveBytes, rehearse


class Calls(nn.Module):
    """A compiled layer that is called twice, with eager code that holds a value between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.compile()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).exp()).sum()


def test_calls_and_bytes_between_them() -> None:
    """Backwards come in reverse, and eager values and gradients count outside of the graphs."""
    step = rehearse(Calls(), (torch.randn(64, 8, requires_grad=True),), {}, PlannedDevice())
    assert len(step.graphs) == 1 and step.calls == (0, 0)
    runs = [(m.running, m.is_backward) for m in step.moments if m.running is not None]
    assert runs == [(0, False), (1, False), (1, True), (0, True)]
    one, weights = 64 * 8 * 4, 8 * 8 * 4 + 8 * 4
    second = next(m for m in step.moments if m.running == 1 and not m.is_backward)
    assert second.outside_bytes == one and second.held == (0,)
    last = step.moments[-1]
    assert weights <= last.outside_bytes <= 2 * weights + 2 * one + 64 and last.held == ()


class Block(nn.Module):
    """A block of the user's own, whose code all copies share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).exp()


def test_rehearsals_have_no_limit() -> None:
    """Dynamo's limit of compilations is for one program, and each rehearsal is another."""
    block, x = Block(), torch.randn(4, 8)
    block.compile()
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert len(rehearse(nn.Sequential(block), (x,), {}, PlannedDevice()).graphs) == 1


@pytest.mark.parametrize("by_parts", [False, True])
def test_rehearsals_leave_the_limit_to_the_user(by_parts: bool) -> None:
    """Compilations of rehearsals are counted apart from those that the user's steps make."""

    class Own(Block):
        """A class whose code no other test compiles."""

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sin()

    block, x = Own(), torch.randn(4, 8)
    if by_parts:
        block.compile()
    model = nn.Sequential(block) if by_parts else block
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for _ in range(3):
            rehearse(model, (x,), {}, PlannedDevice())
        assert torch.equal(torch.compile(Own.forward, backend="eager")(block, x), block.forward(x))


class Breaks(Block):
    """A block with a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x.cos()


@pytest.mark.parametrize("make", [Block, Breaks])
@pytest.mark.parametrize("by_parts", [False, True])
def test_rehearsals_leave_nothing(make: type[nn.Module], by_parts: bool) -> None:
    """Dynamo keeps what it compiled, and each backend, for the life of the process."""
    model = nn.Sequential(make(), make())
    if by_parts:
        for block in model:
            block.compile()
    step = rehearse(model, (torch.randn(4, 8),), {}, PlannedDevice())
    graphs = [weakref.ref(graph.joint.module) for graph in step.graphs]
    del step
    for _ in range(3):  # What Dynamo wrote into the module's names goes when its code has gone.
        gc.collect()
    assert graphs and not any(graph() for graph in graphs)


def test_live_bytes_follow_storages() -> None:
    """A view adds nothing, what is dropped is gone, and the peak stays until the next start."""
    live = LiveBytes()
    with live:
        x = torch.ones(10)
        y = x.view(2, 5)
        z = x.exp()
        del z
        with live.paused():
            torch.ones(1000)
    assert (live.live, live.most) == (40, 80)
    live.restart()
    assert live.most == 40
    del x, y
    assert live.live == 0
