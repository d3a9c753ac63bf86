"""Discrete ops: choices, and comparisons that reach an index."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxckpt.passes.analysis.discrete_ops import discrete_results
from tests.passes.graphs import traced


def found(function: Callable[..., Tensor]) -> list[str]:
    return sorted(node.name for node in discrete_results(traced(function, torch.randn(4, 4)).graph))


def test_choosing_op_is_discrete() -> None:
    """A router's ``topk`` is a choice, even if nothing indexes with it."""
    assert found(lambda x: x.softmax(-1).topk(2).values.sin()) == ["topk"]


def test_comparison_that_indexes_is_discrete() -> None:
    """The comparison turns numbers into an index; the ops between it and the index do not."""
    assert found(lambda x: x.take((x > 0).long().neg().abs())) == ["gt"]


def test_comparison_that_masks_is_not() -> None:
    """``where`` computes with the mask and reads every element."""
    assert found(lambda x: torch.where(x > 0, x, x.sin())) == []


def test_given_index_is_not() -> None:
    """An index that no op computed from numbers is no choice."""
    assert found(lambda x: x.take(torch.arange(3) * 2)) == []
