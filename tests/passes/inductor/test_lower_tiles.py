"""Lower tiles: a product and a sum, and conversions, where Inductor compiles."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.ops.kernels import accumulate_mm
from fxckpt.passes.inductor.lower_tiles import lower_tiles
from fxckpt.passes.meta import IS_RECOMPUTE, RECOMPUTE_OF
from tests.passes.graphs import text_of, traced

aten = torch.ops.aten


def added(primals_sum: Tensor, primals_a: Tensor, primals_b: Tensor) -> Tensor:
    """A sum to which a product is added, in the type of the operands."""
    total = accumulate_mm(primals_sum, primals_a, primals_b)
    return aten._to_copy(total, dtype=torch.bfloat16)


def test_product_and_sum_are_apart() -> None:
    """The sum keeps its name and is in float32; the product is of the operands' type."""
    half = [torch.randn(shape, dtype=torch.bfloat16) for shape in ((4, 2), (2, 3))]
    given = (torch.randn(4, 3), *half)
    module = traced(added, *given)
    (node,) = module.graph.find_nodes(op="call_function", target=accumulate_mm)
    node.meta.update({RECOMPUTE_OF: "other", IS_RECOMPUTE: True})
    lower_tiles(module.graph)
    assert_expected_inline(
        text_of(module.graph),
        """\
primals_sum_1: input
primals_a_1: input
primals_b_1: input
mm_default = mm(primals_a_1, primals_b_1)
accumulate_mm = add(primals_sum_1, mm_default)
_to_copy = convert_element_type(accumulate_mm, torch.bfloat16)
return _to_copy""",
    )
    product = node.args[1]
    assert product.meta["val"].dtype is torch.bfloat16
    assert product.meta[RECOMPUTE_OF] == "other"
    assert IS_RECOMPUTE not in product.meta, "one op is counted as recomputed, not two"
    module.recompile()
    torch.testing.assert_close(module(*given), added(*given), atol=1e-2, rtol=1e-2)


def with_nothing(primals_empty: Tensor, primals_x: Tensor) -> Tensor:
    """Rows joined with an empty vector, as a cache before its first token is."""
    return torch.cat([primals_empty, primals_x], dim=-2)


def test_values_joined_with_nothing_stay() -> None:
    """An empty vector has no dimension of the rows that it is joined with."""
    given = (torch.empty(0), torch.randn(3, 4, 2))
    module = traced(with_nothing, *given)
    before = text_of(module.graph)
    lower_tiles(module.graph)
    assert text_of(module.graph) == before and "cat(" in before


def joined(primals_x: Tensor) -> Tensor:
    """Rows of two tiles whose number varies."""
    rows = primals_x.shape[0]
    return torch.cat([primals_x.new_ones(rows // 2, 2), primals_x.new_ones((rows + 1) // 2, 2)])


def test_size_of_joined_rows_is_no_recompute() -> None:
    """Joined tiles are given the size of all rows, and are counted as recomputed once."""
    module = make_fx(joined, tracing_mode="symbolic")(torch.ones(7, 2))
    (given,) = module.graph.find_nodes(op="placeholder")
    (node,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    node.meta.update({RECOMPUTE_OF: "other", IS_RECOMPUTE: True, "val": given.meta["val"]})
    lower_tiles(module.graph)
    (whole,) = module.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert IS_RECOMPUTE in node.meta and IS_RECOMPUTE not in whole.meta
    module.recompile()
    assert module(torch.ones(9, 2)).equal(torch.ones(9, 2))
