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
