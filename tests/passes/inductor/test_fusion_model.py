"""Fusion model: the values that a fusing compiler never stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.costs.models import FlopCost, checked
from fxckpt.passes.analysis.joint import Facts, read_facts
from fxckpt.passes.inductor.fusion_model import FusionModel
from fxckpt.torch_private.inductor.default_partitioner import fuses
from tests.joints import plain_joint
from tests.passes.graphs import lines_of


def x() -> Tensor:
    return torch.randn(64, 64, requires_grad=True)


def never_stored(
    function: Callable[..., Any], *inputs: Tensor, stored: tuple[str, ...] = ()
) -> set[str]:
    joint, _ = plain_joint(function, *inputs)
    return {node.name for node in FusionModel(fuses)(joint.graph, stored)}


def facts(function: Callable[..., Any], *inputs: Tensor) -> Facts:
    joint, count = plain_joint(function, *inputs)
    return read_facts(
        joint,
        num_fwd_outputs=count,
        cost=checked(FlopCost()),
        never_stored=FusionModel(fuses)(joint.graph),
    )


def chain(a: Tensor, b: Tensor) -> Tensor:
    return ((a @ b).sin().cos() @ b).sum()


def test_pointwise_op_is_inlined() -> None:
    """An element-wise op is inlined into its reader."""
    assert "sin" in never_stored(chain, x(), x())


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("repeat", lambda a: a.repeat(2, 1)),
        ("flip", lambda a: a.flip(0)),
        ("constant_pad_nd", lambda a: torch.nn.functional.pad(a, (1, 1))),
    ],
)
def test_ops_that_move_elements_are_inlined(name: str, moved: Callable[[Tensor], Tensor]) -> None:
    """Ops that only index are inlined too."""
    assert name in never_stored(lambda a, b: moved(a @ b).sin().sum(), x(), x())


def test_operands_of_extern_kernels_are_stored() -> None:
    """Extern kernels read, and write, memory."""
    assert never_stored(chain, x(), x()).isdisjoint({"cos", "mm", "mm_1"})


def test_values_named_as_stored_are_stored() -> None:
    """The default partitioner's saved values are realized."""
    assert "sin" not in never_stored(chain, x(), x(), stored=("sin",))


def test_mask_of_counters_is_never_stored() -> None:
    """A mask from loop counters is inlined even if the default partitioner saves it."""

    def masked(a: Tensor) -> Tensor:
        places = torch.ops.prims.iota(
            64, start=0, step=1, dtype=torch.int64, device="cpu", requires_grad=False
        )
        return a.where(places[:, None] <= places, 0.0).softmax(-1).sum()

    def masked_by_values(a: Tensor) -> Tensor:
        return a.where(a <= 0, 0.0).softmax(-1).sum()

    assert "le" in never_stored(masked, x(), stored=("le",))
    assert "le" not in never_stored(masked_by_values, x(), stored=("le",))


def test_outputs_are_stored() -> None:
    """The caller reads memory."""
    assert "sin" not in never_stored(lambda a: (a.sin(), a.sin().cos().sum()), x())


def test_heavy_ops_with_two_readers_are_stored() -> None:
    """A logarithm is inlined into one reader, not into two."""

    def once(a: Tensor, b: Tensor) -> Tensor:
        return ((a @ b).abs().log() + a).sum()

    def twice(a: Tensor, b: Tensor) -> Tensor:
        y = (a @ b).abs().log()
        return (y + a).sum() * y.amax()

    assert "log" in never_stored(once, x(), x())
    assert "log" not in never_stored(twice, x(), x())


def test_value_smaller_than_its_inputs_is_stored() -> None:
    """A sum may then be saved in place of its two parts."""

    def residual(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ((a @ b) + (a @ c)).sin().sum()

    assert "add" not in never_stored(residual, x(), x(), x())


def test_reader_reads_the_inputs_of_inlined_values() -> None:
    """In the program, the read of an inlined value is a read of its inputs."""
    program = facts(chain, x(), x()).program
    cos = next(op for op in program.ops if op.name == "cos")
    assert [program.storages[s].name for s in cos.reads] == ["mm"]


def test_views_of_inlined_values_are_inlined() -> None:
    """A view between the two changes nothing."""
    program = facts(lambda a, b: ((a @ b).sin().t().cos() @ b).sum(), x(), x()).program
    cos = next(op for op in program.ops if op.name == "cos")
    assert [program.storages[s].name for s in cos.reads] == ["mm"]


def test_facts_move_to_a_copied_graph() -> None:
    """Nodes in facts are replaced by those of the same names."""
    joint, count = plain_joint(chain, x(), x())
    kernels = FusionModel(fuses)(joint.graph)
    found = read_facts(joint, num_fwd_outputs=count, cost=checked(FlopCost()), never_stored=kernels)
    copied = torch.fx.Graph()
    copied.graph_copy(joint.graph, {})
    moved = found.moved_to(joint.graph)
    assert moved == found
    assert {n.name for n in found.moved_to(copied).never_stored} == {
        n.name for n in found.never_stored
    }


def test_graph_with_its_inlined_values() -> None:
    """Marked nodes are never stored: each element-wise op without a reader outside loops."""
    joint, _ = plain_joint(chain, x(), x())
    inlined = FusionModel(fuses)(joint.graph)
    lines = [
        f"{'inlined' if node in inlined else '-':7} {line}" for node, line in lines_of(joint.graph)
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
-       primals_1: input
-       primals_2: input
-       tangents_1: input
-       mm = mm(primals_1, primals_2)
inlined sin = sin(mm)
-       cos = cos(sin)
-       mm_1 = mm(cos, primals_2)
-       sum_1 = sum(mm_1)
-       expand = expand(tangents_1, [64, 64])
-       t = t(cos)
-       mm_2 = mm(t, expand)
-       t_1 = t(primals_2)
-       mm_3 = mm(expand, t_1)
inlined sin_1 = sin(sin)
inlined neg = neg(sin_1)
-       mul = mul(mm_3, neg)
inlined cos_1 = cos(mm)
-       mul_1 = mul(mul, cos_1)
-       t_2 = t(primals_1)
-       mm_4 = mm(t_2, mul_1)
-       t_3 = t(primals_2)
-       mm_5 = mm(mul_1, t_3)
-       add = add(mm_2, mm_4)
-       return [sum_1, mm_5, add]""",
    )
