"""Lifetime of a tape: nothing leaks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fxckpt
from fxckpt.eager.tape import Tape
from tests.eager.regions import dropouts, products


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Counts the tapes alive, without the garbage collector."""
    made: list[weakref.ref[Tape]] = []
    init = Tape.__init__

    def counted(self: Tape, *args: Any) -> None:
        init(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Tape, "__init__", counted)
    gc.collect()
    gc.disable()
    yield lambda: sum(ref() is not None for ref in made)
    gc.enable()


def test_a_tape_dies_with_the_backward(tapes: Callable[[], int]) -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    loss = fxckpt.checkpoint(lambda a: fxckpt.checkpoint(dropouts, a.sin(), w), x).sum()
    assert tapes() == 2
    loss.backward()
    del loss
    assert tapes() == 0


def test_a_tape_dies_with_its_graph(tapes: Callable[[], int]) -> None:
    out = fxckpt.checkpoint(products, torch.randn(4, 4, requires_grad=True), torch.randn(4, 4))
    del out
    assert tapes() == 0


def test_a_tape_dies_after_a_double_backward(tapes: Callable[[], int]) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    out = fxckpt.checkpoint(products, x, torch.randn(4, 4))
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    grad.sum().backward()
    del out, grad
    assert tapes() == 0


def test_an_exception_in_a_region_drops_its_tape(tapes: Callable[[], int]) -> None:
    def region(x: Tensor) -> Tensor:
        raise KeyError((x @ x).sin().shape)

    with pytest.raises(KeyError):
        fxckpt.checkpoint(region, torch.randn(4, 4, requires_grad=True))
    assert tapes() == 0
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
