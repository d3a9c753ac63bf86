"""The graph of a tape: masks are read as indices, and what no trace computes by an op of ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor

import fxckpt


def ops(region: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """Return the ops of a region's graph and their operands."""
    with fxckpt.record_regions() as regions:
        fxckpt.checkpoint(region, x, budget=1.0).sum().backward()
    lines = (
        f"{node.name}: {node.target} {' '.join(n.name for n in node.all_input_nodes)}".rstrip()
        for node in regions[0].graph.graph.nodes
    )
    return "\n".join(lines)


def positive(x: Tensor) -> Tensor:
    mask = x.detach()[:, 0] > -9
    return x[mask] * 2


def test_graph_of_a_mask() -> None:
    assert_expected_inline(
        ops(positive, torch.randn(4, 2, requires_grad=True)),
        """\
input_0: input_0
detach_default: aten.detach.default input_0
select_int: aten.select.int input_0
gt_scalar: aten.gt.Scalar select_int
unseen_default: fxckpt.unseen.default gt_scalar
index_tensor: aten.index.Tensor input_0 unseen_default
mul_tensor: aten.mul.Tensor index_tensor
output: output mul_tensor""",
    )


def doubled(x: Tensor) -> Tensor:
    mask = x.detach() > -9
    out = x * 1
    out[mask] += x[mask]
    return out


def test_graph_of_a_masked_write() -> None:
    """The write has the indices of the read, whose number is known."""
    assert_expected_inline(
        ops(doubled, torch.randn(4, requires_grad=True)),
        """\
input_0: input_0
detach_default: aten.detach.default input_0
gt_scalar: aten.gt.Scalar input_0
mul_tensor: aten.mul.Tensor input_0
unseen_default: fxckpt.unseen.default gt_scalar
index_tensor: aten.index.Tensor mul_tensor unseen_default
index_tensor_1: aten.index.Tensor input_0 unseen_default
add__tensor: aten.add_.Tensor index_tensor index_tensor_1
index_put__default: aten.index_put_.default mul_tensor unseen_default index_tensor
output: output mul_tensor""",
    )


def flat_and_whole(x: Tensor) -> Tensor:
    mask = x.detach() > -9
    return torch.masked_select(x, mask) * x[mask]


def test_graph_of_a_mask_read_twice() -> None:
    """``masked_select`` has one index an element, and ``x[mask]`` one a dimension."""
    assert_expected_inline(
        ops(flat_and_whole, torch.randn(2, 2, requires_grad=True)),
        """\
input_0: input_0
detach_default: aten.detach.default input_0
gt_scalar: aten.gt.Scalar input_0
unseen_default: fxckpt.unseen.default gt_scalar
reshape_default: aten.reshape.default input_0
index_tensor: aten.index.Tensor reshape_default unseen_default
unseen_default_1: fxckpt.unseen.default gt_scalar
unseen_default_2: fxckpt.unseen.default gt_scalar
index_tensor_1: aten.index.Tensor input_0 unseen_default_1 unseen_default_2
mul_tensor: aten.mul.Tensor index_tensor index_tensor_1
output: output mul_tensor""",
    )


def one_value(x: Tensor) -> Tensor:
    mask = x.detach() > -9
    out = x * 1
    out[mask] = 2.0
    return out + x[mask].sum()


def test_graph_of_one_masked_value() -> None:
    """One value does not tell how many elements it is written to."""
    assert_expected_inline(
        ops(one_value, torch.randn(4, requires_grad=True)),
        """\
input_0: input_0
input_1: input_1
detach_default: aten.detach.default input_0
gt_scalar: aten.gt.Scalar input_0
mul_tensor: aten.mul.Tensor input_0
lift_fresh_default: aten.lift_fresh.default input_1
index_put__default: aten.index_put_.default mul_tensor gt_scalar input_1
unseen_default: fxckpt.unseen.default gt_scalar
index_tensor: aten.index.Tensor input_0 unseen_default
sum_default: aten.sum.default index_tensor
add_tensor: aten.add.Tensor mul_tensor sum_default
output: output add_tensor""",
    )


def test_graph_of_a_position() -> None:
    region = lambda x: x[(x.detach() > -9).nonzero().squeeze(-1)].sin()  # noqa: E731
    assert_expected_inline(
        ops(region, torch.randn(4, requires_grad=True)),
        """\
input_0: input_0
detach_default: aten.detach.default input_0
gt_scalar: aten.gt.Scalar input_0
unseen_default: fxckpt.unseen.default gt_scalar
squeeze_dim: aten.squeeze.dim unseen_default
index_tensor: aten.index.Tensor input_0 squeeze_dim
sin_default: aten.sin.default index_tensor
output: output sin_default""",
    )


def test_graph_of_kept_zeros() -> None:
    assert_expected_inline(
        ops(lambda x: x.sin() * torch.zeros(4), torch.randn(4, requires_grad=True)),
        """\
input_0: input_0
sin_default: aten.sin.default input_0
unseen_default: fxckpt.unseen.default input_0
mul_tensor: aten.mul.Tensor sin_default unseen_default
output: output mul_tensor""",
    )


def test_graph_of_a_repeated_view() -> None:
    """Each view has a gradient of its own."""
    assert_expected_inline(
        ops(lambda x: x[:2] * x[:2].sin(), torch.randn(4, requires_grad=True)),
        """\
input_0: input_0
slice_tensor: aten.slice.Tensor input_0
slice_tensor_1: aten.slice.Tensor input_0
sin_default: aten.sin.default slice_tensor_1
mul_tensor: aten.mul.Tensor slice_tensor_1 sin_default
output: output mul_tensor""",
    )
