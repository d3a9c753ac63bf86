"""Running statistics: the backward of batch norm in training is not given them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxckpt.passes.transforms.drop_statistics import drop_statistics
from tests.passes.graphs import traced

STATISTICS = (3, 4)


@pytest.mark.parametrize("train", [True, False])
def test_statistics_go_in_training_alone(train: bool) -> None:
    def joint(primals: Tensor, mean: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_batch_norm_backward(  # type: ignore[no-any-return]
            tangents, primals, mean, mean, mean, mean, mean, train, 1e-5, [True, True, True]
        )

    x, mean = torch.randn(2, 3, 4), torch.rand(3)
    graph = traced(joint, x, mean, x)
    expected = graph(x, mean, x)
    drop_statistics(graph.graph)
    graph.recompile()
    (node,) = (n for n in graph.graph.nodes if "batch_norm" in n.name)
    assert [node.args[i] is None for i in STATISTICS] == [train, train]
    assert all(map(torch.equal, graph(x, mean, x), expected))
