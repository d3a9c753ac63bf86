"""Forms of ops for a recompute: the same first results, without what was done once for all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fxckpt.ops.recompute_forms import recompute_form
from tests.passes.graphs import traced

norm = torch.ops.aten._native_batch_norm_legit_functional.default


def found(function: object) -> tuple[fx.GraphModule, fx.Node]:
    graph = traced(function, torch.randn(4, 3, 5), torch.rand(3))  # type: ignore[arg-type]
    (node,) = graph.graph.find_nodes(op="call_function", target=norm)
    return graph, node


def test_form_has_the_same_first_results() -> None:
    _, node = found(lambda x, mean: norm(x, None, None, mean, mean, True, 0.1, 1e-5)[:3])
    form = recompute_form(node)
    assert form is not None
    x, mean = torch.randn(4, 3, 5), torch.rand(3)
    own = norm(x, None, None, mean, mean, True, 0.1, 1e-5)
    again = form.target(x, *form.args[1:])
    assert len(again) == form.results
    assert all(map(torch.equal, own[: form.results], again))


def test_statistics_that_are_read_forbid_it() -> None:
    def read(x: Tensor, mean: Tensor) -> Tensor:
        results = norm(x, None, None, mean, mean, True, 0.1, 1e-5)
        return results[0] + results[3].sum()

    assert recompute_form(found(read)[1]) is None


def test_evaluation_has_no_other_form() -> None:
    _, node = found(lambda x, mean: norm(x, None, None, mean, mean, False, 0.1, 1e-5)[:3])
    assert recompute_form(node) is None


@pytest.mark.parametrize("affine", [False, True])
def test_half_precision_keeps_its_bits(affine: bool) -> None:
    """Without a weight, the statistics alone have the kernel compute in their type."""
    x, mean, one = torch.randn(4, 3, 5, dtype=torch.bfloat16), torch.rand(3), torch.ones(3)

    def run(x: Tensor, mean: Tensor, one: Tensor) -> tuple[Tensor, ...]:
        weight = one if affine else None
        return norm(x, weight, weight, mean, mean, True, 0.1, 1e-5)[:3]  # type: ignore[no-any-return]

    (node,) = traced(run, x, mean, one).graph.find_nodes(op="call_function", target=norm)
    form = recompute_form(node)
    assert (form is not None) == affine
    if form is not None:
        again = form.target(x, one, one, *form.args[3:])
        assert all(map(torch.equal, run(x, mean, one), again))
