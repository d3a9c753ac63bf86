"""Placement: which nodes belong to the backward, and what gradients cost to accumulate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxckpt.ops.properties import is_mutating
from fxckpt.passes.analysis.placement import (
    JointPlacement,
    accumulation_bytes,
    ancestors,
    has_layout_of,
    inputs_read_in_backward,
    tangents_of,
)
from tests.passes.graphs import chain, dropped, traced


def test_halves_of_a_chain() -> None:
    """The backward owns what reads a tangent; the forward needs what its output reads."""
    joint = traced(chain, torch.ones(4), torch.ones(4))
    placement = JointPlacement.of(joint.graph, 1)
    assert [node.name for node in tangents_of(joint.graph)] == ["tangents_1"]
    assert {node.name for node in placement.closure} == {"tangents_1", "mul", "mul_1"}
    assert {node.name for node in placement.required_forward} == {"primals_1", "sin", "sin_1"}
    assert [node.name for node in placement.gradients] == ["mul_1"]


def test_inputs_that_the_backward_reads() -> None:
    """A view of an input is read for it; one that only the forward reads is not listed."""

    def f(
        primals_x: Tensor, primals_w: Tensor, primals_b: Tensor, tangents: Tensor
    ) -> tuple[Tensor, Tensor]:
        return (primals_x @ primals_w + primals_b).exp(), tangents @ primals_w.t()

    inputs = torch.ones(2, 3), torch.ones(3, 4), torch.ones(4), torch.ones(2, 4)
    assert inputs_read_in_backward(traced(f, *inputs).graph) == (3, frozenset({1}))


def test_effect_stays_in_the_forward() -> None:
    """A draw advances the generator, so the forward needs it even if no output does."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        return primals.sin(), torch.bernoulli(primals, 0.5) * tangents

    placement = JointPlacement.of(traced(f, torch.ones(4), torch.ones(4)).graph, 1)
    assert "bernoulli" in {node.name for node in placement.required_forward}


def test_draw_of_the_backward_stays_there() -> None:
    """A random op that was traced in the backward may not move, though it reads no tangent."""
    joint = traced(dropped, torch.ones(2, 2), torch.ones(2, 2))
    (mask,) = (node for node in joint.graph.nodes if node.name == "bernoulli")
    mask.meta["partitioner_tag"] = "is_backward"
    assert mask in JointPlacement.of(joint.graph, 1).closure


def test_written_storage_is_mutated() -> None:
    """The storage that an in-place op writes is known."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        return primals.clone().add_(1), tangents.neg()

    joint = traced(f, torch.ones(4), torch.ones(4))
    (write,) = (node for node in joint.graph.nodes if is_mutating(node))
    assert len(JointPlacement.of(joint.graph, 1).mutated) == 1
    assert write in ancestors([joint.graph.output_node()])


def test_shared_gradient_is_cloned() -> None:
    """Of a gradient that two inputs share, autograd clones one while it holds the other."""

    def f(primals_a: Tensor, primals_b: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        gradient = tangents.neg()
        return primals_a + primals_b, gradient, gradient

    graph = traced(f, torch.ones(4), torch.ones(4), torch.ones(4)).graph
    gradients = JointPlacement.of(graph, 1).gradients
    inputs = graph.find_nodes(op="placeholder")[:2]
    assert accumulation_bytes(inputs, gradients) == 16
    assert accumulation_bytes(inputs, [gradients[0], None]) == 0


@pytest.mark.parametrize(
    ("gradient", "parameter", "expected"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), True),
        (torch.zeros(3, 2).t(), torch.zeros(2, 3), False),
        (torch.zeros(3, 2).t(), torch.zeros(3, 2).t(), True),
        (torch.zeros(2, 3), torch.zeros(2, 6)[:, ::2], True),
        (torch.zeros(1, 3), torch.zeros(3, 1).t(), True),
    ],
)
def test_gradient_layout_contract(gradient: Tensor, parameter: Tensor, expected: bool) -> None:
    """Dense parameters ask for their own strides, others for a contiguous gradient."""
    assert has_layout_of(gradient, parameter) is expected
