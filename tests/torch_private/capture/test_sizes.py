"""Symbolic and unbacked sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxckpt.torch_private import (
    assuming,
    bindings_of,
    is_surely_equal,
    is_symbolic,
    keep_ranges,
    size_hint,
    size_key,
    unbounded_sizes,
    upper_bound,
)


@pytest.fixture
def env() -> ShapeEnv:
    return ShapeEnv()


def unbacked(env: ShapeEnv, most: int | None = None) -> Any:
    size = env.create_unbacked_symint()
    torch._check(size >= 0)
    if most is not None:
        torch._check(size <= most)
    return size


def test_a_hint_is_the_bound_if_any(env: ShapeEnv) -> None:
    """An int is its own hint; a size with an upper bound counts as that; others as 1."""
    bounded, free = unbacked(env, 12), unbacked(env)
    assert (size_hint(7), size_hint(bounded), size_hint(free)) == (7, 12, 1)
    assert size_hint(bounded * 2 + 1) == 25
    assert (upper_bound(bounded), upper_bound(free)) == (12, None)


def test_asking_adds_no_guard(env: ShapeEnv) -> None:
    """Hints and equalities are read without a guard."""
    size = unbacked(env, 12)
    before = len(env.guards)
    assert is_surely_equal(size + 1, size + 1) and not is_surely_equal(size, 3)
    size_hint(size)
    assert len(env.guards) == before


def graph_of(function: Any, *inputs: Tensor) -> fx.Graph:
    traced: fx.Graph = make_fx(function, tracing_mode="symbolic")(*inputs).graph
    return traced


def test_sizes_are_bound_where_they_begin() -> None:
    """The op that finds a size binds it; a reader of its result binds nothing."""
    graph = graph_of(lambda x: x.nonzero().sum(1), torch.ones(4))
    found, summed = (
        next(n for n in graph.nodes if n.op == "call_function" and name in str(n.target))
        for name in ("nonzero", "sum")
    )
    assert len(bindings_of(found)) == 1 and bindings_of(summed) == {}


def test_unbounded_sizes_of_a_graph() -> None:
    """Sizes with a bound are not among them."""

    def unbounded(x: Tensor) -> Tensor:
        return torch.ones(int(x.sum().item())) if False else x.new_ones(x.sum().int().item())

    def bounded(x: Tensor) -> Tensor:
        size = x.sum().int().item()
        torch._check(size <= 9)
        return x.new_ones(size)

    assert len(unbounded_sizes(graph_of(unbounded, torch.ones(4)))) == 1
    assert unbounded_sizes(graph_of(bounded, torch.ones(4))) == []


def test_sizes_are_told_from_tensors() -> None:
    """A size and a plain number are symbolic to AOTAutograd; a tensor is not."""
    graph = graph_of(lambda x: x * x.shape[0], torch.ones(5))
    assert [is_symbolic(n) for n in graph.nodes if "sym_size" in str(n.target)] == [True]
    assert not is_symbolic(next(n for n in graph.nodes if n.op == "placeholder"))


def test_sizes_are_taken_as_larger() -> None:
    """A size that is a symbol alone grows as expressions of it do."""
    graph = graph_of(lambda x: torch.cat([x, x]), torch.ones(5))
    given, doubled = (
        next(n.meta["val"].shape[0] for n in graph.nodes if name in n.name)
        for name in ("x_1", "cat")
    )
    with assuming([given], 4):
        assert (size_hint(given), size_hint(doubled)) == (20, 40)
    assert (size_hint(given), size_hint(doubled)) == (5, 10)


def test_later_guards_bound_no_planned_size() -> None:
    """A guard of a lowering makes nothing of a graph that was planned before seem larger."""
    traced = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(5))
    size = next(iter(traced.graph.nodes)).meta["val"].shape[0]
    keep_ranges(traced)
    assert bool(size <= 1024)
    assert upper_bound(size) is None and size_hint(size * 2) == 10
    other = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(5))
    size = next(iter(other.graph.nodes)).meta["val"].shape[0]
    assert bool(size <= 1024)
    assert size_hint(size * 2) == 2048


def test_equal_sizes_have_equal_keys(env: ShapeEnv) -> None:
    """However torch wrote them; an int is its own key."""
    s, t = unbacked(env), unbacked(env)
    assert size_key(s * (t - 1) + s) == size_key(s * t) != size_key(s * t + 1)
    assert size_key(7) == 7
