"""Joint graphs of AOTAutograd, and code that frees its arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxckpt
from fxckpt.torch_private import (
    boxed,
    tag_side,
    trace_joint,
    untag_side,
    written_after,
)
from fxckpt.torch_private.capture.aot import partitioner_tag
from tests.joints import plain_joint
from tests.passes.graphs import traced


def product(x: Tensor) -> Tensor:
    return (x.sin() @ x).cos()


def test_a_joint_graph_has_both_halves() -> None:
    """Nodes of the gradient are tagged, and the number of forward outputs is given."""
    joint, outputs = plain_joint(product, torch.ones(2, 2, requires_grad=True))
    tags = {node.name: partitioner_tag(node) for node in joint.graph.nodes}
    assert outputs == 1
    assert {tags["sin"], tags["mm"]} <= {None, "is_forward"}
    assert [tag for name, tag in tags.items() if name.startswith("mm_")] == ["is_backward"] * 2


def test_nothing_is_received_without_gradients() -> None:
    """A graph whose outputs need no gradient has no joint graph."""
    found: list[Any] = []
    module = traced(lambda x: (x.sin(),), torch.ones(2))
    trace_joint(module, [torch.ones(2)], lambda *got: found.append(got))
    assert found == []


def test_an_untraceable_gradient_is_a_capture_error() -> None:
    """The error says what torch could not do."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("no gradient today")

    def broken(x: Tensor) -> Tensor:
        return Broken.apply(x)  # type: ignore[no-any-return]

    graph = fx.Graph()
    graph.output((graph.call_function(broken, (graph.placeholder("x"),)),))
    module = fx.GraphModule({}, graph)
    with pytest.raises(fxckpt.CaptureError, match="ValueError: no gradient today"):
        trace_joint(module, [torch.ones(2, requires_grad=True)], lambda *_: None)


def test_a_node_is_pinned_and_released() -> None:
    """A pinned node has a tag of its side; a released one has none."""
    graph = traced(product, torch.ones(2, 2)).graph
    node = next(n for n in graph.nodes if n.name == "sin")
    tag_side(node, backward=True)
    assert partitioner_tag(node) == "must_be_in_backward"
    tag_side(node, backward=False)
    assert partitioner_tag(node) == "must_be_in_forward"
    untag_side(node)
    assert partitioner_tag(node) is None
    untag_side(node)


def test_inputs_written_by_the_wrapper_are_found() -> None:
    """An input that needs a gradient and is written is among them, others are not."""

    def writes(x: Tensor, given: Tensor) -> Tensor:
        y = x.clone()
        given.mul_(y)
        return y.sin()

    given = torch.ones(2, requires_grad=True) * 2
    joint, _ = plain_joint(writes, torch.ones(2, requires_grad=True), given)
    assert [node.name for node in written_after(joint.graph)] == ["primals_2"]
    joint, _ = plain_joint(product, torch.ones(2, 2, requires_grad=True))
    assert written_after(joint.graph) == []


def freed(run: Callable[[list[Any]], Any]) -> bool:
    """Whether a call frees its argument before it returns."""
    alive: list[bool] = []

    def seen(function: Callable[[list[Any]], Any], given: list[Any]) -> Any:
        reference = weakref.ref(given[0])
        out = function(given)
        alive.append(reference() is not None)
        return out

    seen(run, [torch.ones(2, 2)])
    return not alive[0]


def test_boxed_code_frees_its_arguments() -> None:
    """The list is emptied, so that an argument dies after its last use."""
    run = boxed(traced(product, torch.ones(2, 2)), [])
    given = [torch.ones(2, 2)]
    assert torch.equal(run(given), product(torch.ones(2, 2))) and given == []
    assert freed(run)


def test_recorded_code_is_made_for_a_profiler() -> None:
    """Without a profiler ``record`` is not called; with one it is called once."""
    made: list[fx.GraphModule] = []
    run = boxed(traced(product, torch.ones(2, 2)), [], record=made.append)
    run([torch.ones(2, 2)])
    assert made == []
    with torch.profiler.profile():
        for _ in range(2):
            assert torch.equal(run([torch.ones(2, 2)]), product(torch.ones(2, 2)))
    assert len(made) == 1
