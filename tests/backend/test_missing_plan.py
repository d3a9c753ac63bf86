"""What is said of a budget for which nothing was planned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from tests.step.stack import X


class Unseen(nn.Module):
    """A model that Dynamo gives up on: it has an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].mean()


class Routed(nn.Module):
    """A mixture of experts, whose tokens are found by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 2), nn.ModuleList(nn.Linear(32, 32) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x, top, out = x.flatten(0, 1), self.gate(x).argmax(-1).flatten(), 0
        for i, expert in enumerate(self.experts):
            rows = torch.where(top == i)[0]
            out = out + torch.zeros_like(x).index_add(0, rows, expert(x[rows]))
        return out.mean()


class Hooked(nn.Module):
    """A model with a backward hook inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
        self.layers[1].register_full_backward_hook(lambda *given: None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


@pytest.mark.parametrize("scope", ["step", "graph"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            Unseen,
            marks=pytest.mark.skipif(
                torch.__version__ >= "2.15", reason="Dynamo compiles what follows an LSTM"
            ),
        ),
        Routed,
        Hooked,
    ],
)
def test_a_model_without_graphs_is_told_of(make: type[nn.Module], scope: str) -> None:
    """Dynamo gives up on the function, and no backend is called."""
    model, x = make(), torch.randn(4, 8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.compile(backend=fxckpt.Backend(0.8, inner="aot_eager", scope=scope))
    model(x).backward()
    with pytest.warns(
        UserWarning, match=r"no plan: Dynamo made no graph of test_missing_plan.py:\d+"
    ):
        optimizer.step()
    optimizer.step()


class Frozen(nn.Module):
    """A model whose compiled part gives nothing that needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.head = nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.chosen(x)).mean()

    def chosen(self, x: Tensor) -> Tensor:
        return self.choose(x).argmax(-1, keepdim=True)


@pytest.mark.parametrize("scope", ["step", "graph"])
def test_a_budget_without_a_plan_is_told_of(scope: str) -> None:
    """Once, when an optimizer steps: graphs of the forward alone get no plan."""
    for strict in (False, True) if scope == "step" else (False,):
        torch._dynamo.reset()
        model = Frozen()
        backend = fxckpt.Backend(0.5, inner="aot_eager", scope=scope, strict=strict)
        model.chosen = torch.compile(model.chosen, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).backward()
        if strict:
            with pytest.raises(fxckpt.CaptureError, match="there is no plan"):
                optimizer.step()
        else:
            with pytest.warns(UserWarning, match=r"there is no plan: .*test_missing_plan.py:\d+"):
                optimizer.step()
        optimizer.step()


def test_a_backend_that_compiles_nothing_tells() -> None:
    """Once, after a few steps: torch leaves what it is told to leave to Python."""

    class Left(nn.Linear):
        forward = torch.compiler.disable(nn.Linear.forward)

    model = Left(32, 1)
    model.compile(backend=fxckpt.Backend(0.5, inner="aot_eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(X).sum().backward()
        optimizer.step()

    step()
    step()
    with pytest.warns(UserWarning, match=r"there is no plan: torch compiled nothing with Backend"):
        step()
    step()


class Plain(nn.Module):
    """A model of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).exp().mean()


@pytest.mark.parametrize("strict", [False, True])
def test_too_many_compiles_are_told_of(strict: bool) -> None:
    """Dynamo runs the ninth length in Python, while the others keep their plans."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backend = fxckpt.Backend("1MiB", inner="aot_eager", strict=strict)
    model.compile(backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (4, 8):
            model(torch.randn(rows, 32)).backward()
            optimizer.step()
        model(torch.randn(16, 32)).backward()
        told = r"Dynamo has compiled what test_missing_plan.py:\d+ calls as often"
        with (
            pytest.raises(fxckpt.CaptureError, match=told)
            if strict
            else pytest.warns(UserWarning, match=told)
        ):
            optimizer.step()
        optimizer.step()  # It is told once.
