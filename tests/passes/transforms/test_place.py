"""Place: a graph traced on the CPU, with its values on another device."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.ops.properties import tensors
from fxckpt.passes.transforms.place import place
from tests.passes.graphs import text_of, traced


def test_places_an_example() -> None:
    """Every value is on the device, and so is what the ops make and move."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.arange(3, device=x.device)
        return x[index].topk(2).values, x.double().to("cpu")

    graph = traced(f, torch.ones(4)).graph
    place(graph, torch.device("cuda", 0))
    graph.lint()
    values = [t for node in graph.nodes for t in tensors(node.meta.get("val"))]
    assert len(values) > 5
    assert {value.device for value in values} == {torch.device("cuda", 0)}
    assert_expected_inline(
        text_of(graph),
        """\
x_1: input
arange = arange(3, device=device(type='cuda', index=0), pin_memory=False)
index = index(x_1, [arange])
topk = topk(index, 2)
getitem = getitem(topk, 0)
getitem_1 = getitem(topk, 1)
_to_copy = _to_copy(x_1, dtype=torch.float64)
return [getitem, _to_copy]""",
    )
