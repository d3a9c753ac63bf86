"""Progress on a terminal, after some seconds and one line at a time."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

import fxckpt
from fxckpt.utils import progress as module
from fxckpt.utils.progress import progress, searching, tick


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show work at once."""
    monkeypatch.setattr(module, "SHOWN_AFTER", 0.0)


def test_nested_work_is_one_line() -> None:
    """Schedules are counted by the outermost search, and not inside of other work."""
    with redirect_stderr(Terminal()) as terminal:
        with searching("plan"), searching("inner"):
            tick("first")
        with progress("fit", "plans", 2) as shown, searching("plan of graph 1"):
            tick()
            shown.tick("batch 2")
    text = terminal.getvalue()
    assert "plan: " in text and "fit: " in text
    assert "inner" not in text and "graph 1" not in text
    assert "2/2" not in text


def test_long_plans_and_compiles_are_shown() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(64, 8)
    with redirect_stderr(Terminal()) as terminal:
        fxckpt.plan(model, x, budget=1.0)
        assert "plan: 0 schedules" in terminal.getvalue()
        torch.compile(model, backend=fxckpt.Backend(1.0, inner="aot_eager"))(x).sum().backward()
    assert "plan of graph 1: " in terminal.getvalue()


def test_short_work_and_files_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with redirect_stderr(io.StringIO()) as file, searching("plan"):
        tick()
    assert not file.getvalue()
    monkeypatch.setattr(module, "SHOWN_AFTER", 60.0)
    with redirect_stderr(Terminal()) as terminal, searching("plan"):
        tick()
    assert not terminal.getvalue().strip()
