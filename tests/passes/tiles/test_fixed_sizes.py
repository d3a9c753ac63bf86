"""Fixed sizes: the graph that is planned for, in numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.graphs import Joint
from fxckpt.passes.tiles.fixed_sizes import at_planned_sizes
from fxckpt.torch_private import size_hint, storage_id

X = torch.ones(6, 10)


def joint_of(function: Callable[..., Any], mode: str = "symbolic") -> Joint:
    """A graph of a function of a matrix."""
    return Joint(make_fx(function, tracing_mode=mode)(X), 1)


def shapes(graph: fx.Graph) -> dict[str, list[tuple[int, ...]]]:
    """The shapes and strides of the values of a graph, as planned."""
    found = {n.name: list(tensors(n.meta.get("val"))) for n in graph.nodes}
    return {
        name: [tuple(map(size_hint, (*t.shape, *t.stride()))) for t in held]
        for name, held in found.items()
        if held
    }


def test_sizes_are_numbers() -> None:
    """Nodes keep their names, views their storage, and the graph that was given its sizes."""

    def f(x: Tensor) -> Tensor:
        flat = x[:, 1:].reshape(-1)
        return flat.view(x.shape[0], -1).t() + x.new_full((x.shape[1] - 1, x.shape[0]), 2.0)

    joint = joint_of(f)
    before = str(joint.module.graph)
    fixed = at_planned_sizes(joint)
    assert fixed is not None and str(joint.module.graph) == before
    fixed.module.graph.lint()
    assert shapes(fixed.module.graph) == shapes(joint.module.graph)
    found = [n for n in fixed.module.graph.nodes if n.op == "call_function"]
    assert all(type(size) is int for n in found for t in tensors(n.meta["val"]) for size in t.shape)
    values = {n.name: n.meta["val"] for n in fixed.module.graph.nodes if "val" in n.meta}
    turned = next(name for name in values if name.startswith("t"))
    viewed = next(name for name in values if name.startswith("view"))
    assert storage_id(values[turned]) == storage_id(values[viewed])
    fixed.module.recompile()
    assert fixed.module(X).equal(f(X))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_graph_that_cannot_be_fixed_is_none(mode: str) -> None:
    """So it is where no size varies, and where one depends on data."""

    def f(x: Tensor) -> Tensor:
        return x.nonzero() + 1 if mode == "symbolic" else x + 1

    assert at_planned_sizes(joint_of(f, mode)) is None
