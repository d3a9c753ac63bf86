"""Budget regions: names, nodes and limits of parts of a model with a budget of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

import fxckpt
from fxckpt.passes.analysis.budget_regions import (
    budget_regions,
    saved_limits,
    without_regions,
)
from tests.joints import plain_joint
from tests.passes.graphs import facts_of


def region(budget: str | float) -> Callable[[Tensor], Tensor]:
    """Return a function of three values, of which two are made in a region."""

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        with fxckpt.budget(budget, name="inside"):
            y = y.exp().tanh()
        return y.cos()

    return f


def nodes_of(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """Return the joint graph of a function of 256 bytes, which needs a gradient."""
    module, _ = plain_joint(function, torch.ones(64, requires_grad=True))
    return module


def test_region_holds_its_nodes() -> None:
    """A region has the ops of the forward and of the backward that were traced in it."""
    (found,) = budget_regions(nodes_of(region("300B")).graph.nodes)
    assert_expected_inline(
        f"{found.name}, {found.budget}: {', '.join(sorted(found.nodes))}",
        """inside, 300: detach, detach_1, detach_2, detach_3, exp, mul_1, tanh, tanh_backward""",
    )


def test_entries_of_one_name_are_numbered() -> None:
    """Two entries are two regions, in the order in which they were entered."""

    def f(x: Tensor) -> Tensor:
        for _ in range(2):
            with fxckpt.budget("1KiB", name="layer"):
                x = x.sin()
        return x.cos()

    found = budget_regions(nodes_of(f).graph.nodes)
    assert [each.name for each in found] == ["layer", "layer #2"]
    assert found[0].line != found[1].line


def test_graph_budget_holds_the_rest() -> None:
    """torch's budget for graphs is that of the ops in no region."""
    nodes = nodes_of(region("300B")).graph.nodes
    inside, rest = budget_regions(nodes, graph_budget=0.5)
    assert rest.budget == 0.5 and "activation_memory_budget" in rest.name
    assert not inside.nodes & rest.nodes
    assert {"sin", "cos"} <= rest.nodes


@pytest.mark.parametrize(("budget", "allowed"), [("300B", 300), (0.0, 0), (0.5, 256), (1.0, 512)])
def test_fractions_lie_between_least_and_default(budget: str | float, allowed: int) -> None:
    """Bytes are taken as they are; a fraction is between nothing and the region's two values."""
    module = nodes_of(region(budget))
    program = facts_of(module).program
    regions = budget_regions(module.graph.nodes)
    written = {op.name: op.writes for op in program.ops}
    saved = [*written["exp"], *written["tanh"]]
    (limit,) = saved_limits(program, regions, saved)
    assert limit.name == "inside"
    assert limit.bytes == allowed


def test_fingerprint_lines_of_regions_go() -> None:
    """A fingerprint without regions is that of the graph that never had any."""
    (found,) = budget_regions(nodes_of(region("300B")).graph.nodes)
    assert without_regions(["sin", found.line, "cos"]) == ("sin", "cos")
