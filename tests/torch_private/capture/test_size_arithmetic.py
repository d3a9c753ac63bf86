"""Arithmetic on sizes that vary adds no guards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.errors import PlanningFailed
from fxckpt.torch_private import (
    SizeNodes,
    exact_quotient,
    is_surely_contiguous,
    is_surely_equal,
    plain_size,
)


def traced() -> tuple[fx.GraphModule, torch.SymInt, torch.SymInt]:
    """A graph of a matrix whose two sizes vary, and the sizes."""
    module = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(6, 10))
    (given,) = module.graph.find_nodes(op="placeholder")
    rows, length = given.meta["val"].shape
    return module, rows, length


def test_quotients_are_exact_or_none() -> None:
    """A quotient is one for all sizes, as for numbers."""
    _, rows, length = traced()
    assert exact_quotient(12, 4) == 3 and exact_quotient(12, 5) is exact_quotient(1, 0) is None
    found = exact_quotient(rows * (length - 1), rows)
    assert found is not None and is_surely_equal(found, length - 1)
    assert exact_quotient(rows * length, 2) is exact_quotient(length, rows) is None
    assert exact_quotient(rows * 4, rows) == 4 == plain_size(length + 4 - length)


def test_sizes_are_computed_from_inputs() -> None:
    """A node computes an expression at any sizes, and one that is known is not made again."""
    module, rows, length = traced()
    nodes = SizeNodes(module.graph)
    size = plain_size((rows * length + 2) // 3 - rows)
    node = nodes.node_of(size)
    assert nodes.node_of(size) is node and nodes.node_of(7) == 7
    (output,) = module.graph.find_nodes(op="output")
    output.args = (node,)
    module.graph.lint()
    module.recompile()
    assert module(torch.ones(5, 4)) == (5 * 4 + 2) // 3 - 5
    env = rows.node.shape_env
    assert not env.guards


@pytest.mark.parametrize(("factor", "offset"), [(2, 0), (1, 3), (4, -1)])
def test_sizes_are_read_from_linear_ones(factor: int, offset: int) -> None:
    """An input with a multiple of a size tells it, where none has the size itself."""
    module, rows, _ = traced()
    (given,) = module.graph.find_nodes(op="placeholder")
    value = given.meta["val"]
    given.meta["val"] = value.new_empty(factor * rows + offset)
    (output,) = module.graph.find_nodes(op="output")
    output.args = (SizeNodes(module.graph).node_of(plain_size(rows * rows)),)
    module.graph.lint()
    module.recompile()
    assert module(torch.ones(factor * 7 + offset)) == 49


def test_size_of_no_input_is_an_error() -> None:
    """It names the size, and says what to do."""
    module, rows, _ = traced()
    (given,) = module.graph.find_nodes(op="placeholder")
    given.meta["val"] = given.meta["val"].new_empty(rows * rows)
    with pytest.raises(PlanningFailed, match=f"no input of the graph has the size {rows}, or"):
        SizeNodes(module.graph).node_of(plain_size(rows + 1))


def test_contiguous_at_any_size() -> None:
    """A part of the columns is not, whatever the sizes are now."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[1:].clone(), x[:, 1:]

    module = make_fx(f, tracing_mode="symbolic")(torch.ones(6, 10))
    (output,) = module.graph.find_nodes(op="output")
    whole, part = (node.meta["val"] for node in output.args[0])
    assert is_surely_contiguous(whole) and not is_surely_contiguous(part)
