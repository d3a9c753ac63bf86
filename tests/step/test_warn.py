"""What is said of code that Dynamo left to Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from tests.step.stack import (
    Block,
    measured,
)


class Recurrent(nn.Module):
    """A model of which Dynamo leaves an LSTM, which holds much, to Python."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.lstm, self.breaks = nn.LSTM(32, 32), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = run(self.lstm, x) if self.breaks else self.lstm(x)[0]
        return self.last(x).square().mean()


@torch._dynamo.disable
def run(lstm: nn.LSTM, x: Tensor) -> Tensor:
    return lstm(x)[0]


@pytest.mark.parametrize("breaks", [True, False], ids=["break", "given up"])
def test_code_left_to_python_is_told_of(breaks: bool) -> None:
    """Once, with the line of the break and the bytes that it holds."""
    x = torch.randn(8, 32, 32)
    model = Recurrent(breaks=breaks)
    model.compile(backend=fxckpt.Backend("2MiB", inner="aot_eager", scope="step"))
    with pytest.warns(UserWarning, match=r"left to Python holds .* test_warn.py:\d+") as told:
        model(x).backward()
        model(x).backward()
    assert len(told) == 1
    torch._dynamo.reset()
    backend = fxckpt.Backend("2MiB", inner="aot_eager", scope="step", strict=True)
    strict = torch.compile(Recurrent(breaks=breaks), backend=backend)
    with pytest.raises(fxckpt.CaptureError, match="left to Python"):
        strict(x).backward()


def test_small_code_left_to_python_is_untold() -> None:
    class Prints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            torch._dynamo.graph_break()
            return self.last(y).square().mean()

    model = Prints()
    model.compile(backend=fxckpt.Backend("64MiB", inner="aot_eager", scope="step"))
    for _ in range(2):
        measured(model)


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_forwards_in_flight_are_told_if_seen(together: bool) -> None:
    """Gradients of an earlier micro-batch are over the budget too, with one forward at a time."""
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(64, 32)
    optimizer = torch.optim.SGD(model.parameters())
    backend = fxckpt.Backend(
        fxckpt.plan(model, x, budget="min").budget_bytes,
        inner="aot_eager",
        scope="step",
    )
    run = torch.compile(model, backend=backend)
    with pytest.warns(UserWarning, match="Later steps are planned") as told:
        for _ in range(1 if together else 2):
            losses = [run(x).sum() for _ in range(2 if together else 1)]
            for loss in losses:
                loss.backward()
    optimizer.step()
    assert len(told) == 1 and ("in_flight" in str(told[0].message)) == together
