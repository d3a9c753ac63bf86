"""The kernel graph: what a fusing compiler never stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxckpt.costs.models import FlopCost, checked
from fxckpt.passes.analysis.joint import Facts, collect
from fxckpt.passes.inductor.fusion_model import FusionModel
from fxckpt.torch_private.inductor.default_partitioner import fuses
from tests.joints import plain_joint


def x() -> Tensor:
    return torch.randn(64, 64, requires_grad=True)


def never_stored(
    function: Callable[..., Any], *inputs: Tensor, stored: tuple[str, ...] = ()
) -> set[str]:
    joint, _ = plain_joint(function, *inputs)
    return {node.name for node in FusionModel(fuses)(joint.graph, stored)}


def facts(function: Callable[..., Any], *inputs: Tensor) -> Facts:
    joint, count = plain_joint(function, *inputs)
    return collect(
        joint,
        num_fwd_outputs=count,
        cost=checked(FlopCost()),
        never_stored=FusionModel(fuses)(joint.graph),
    )


def chain(a: Tensor, b: Tensor) -> Tensor:
    return ((a @ b).sin().cos() @ b).sum()


def test_a_loop_is_taken_into_the_loop_that_reads_it() -> None:
    assert "sin" in never_stored(chain, x(), x())


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("repeat", lambda a: a.repeat(2, 1)),
        ("flip", lambda a: a.flip(0)),
        ("constant_pad_nd", lambda a: torch.nn.functional.pad(a, (1, 1))),
    ],
)
def test_what_moves_elements_is_taken_into_the_loop_that_reads_it(
    name: str, moved: Callable[[Tensor], Tensor]
) -> None:
    assert name in never_stored(lambda a, b: moved(a @ b).sin().sum(), x(), x())


def test_what_a_library_call_reads_is_stored() -> None:
    assert never_stored(chain, x(), x()).isdisjoint({"cos", "mm", "mm_1"})


def test_what_torch_saves_is_stored() -> None:
    assert "sin" not in never_stored(chain, x(), x(), stored=("sin",))


def test_a_mask_made_from_nothing_is_not() -> None:
    def masked(a: Tensor) -> Tensor:
        places = torch.ops.prims.iota(
            64, start=0, step=1, dtype=torch.int64, device="cpu", requires_grad=False
        )
        return a.where(places[:, None] <= places, 0.0).softmax(-1).sum()

    def masked_by_values(a: Tensor) -> Tensor:
        return a.where(a <= 0, 0.0).softmax(-1).sum()

    assert "le" in never_stored(masked, x(), stored=("le",))
    assert "le" not in never_stored(masked_by_values, x(), stored=("le",))


def test_what_the_caller_gets_is_stored() -> None:
    assert "sin" not in never_stored(lambda a: (a.sin(), a.sin().cos().sum()), x())


def test_heavy_work_read_twice_is_stored() -> None:
    def once(a: Tensor, b: Tensor) -> Tensor:
        return ((a @ b).abs().log() + a).sum()

    def twice(a: Tensor, b: Tensor) -> Tensor:
        y = (a @ b).abs().log()
        return (y + a).sum() * y.amax()

    assert "log" in never_stored(once, x(), x())
    assert "log" not in never_stored(twice, x(), x())


def test_a_sum_is_stored_so_that_it_may_be_saved_in_place_of_its_parts() -> None:
    def residual(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ((a @ b) + (a @ c)).sin().sum()

    assert "add" not in never_stored(residual, x(), x(), x())


def test_a_reader_reads_what_the_loop_was_made_from() -> None:
    program = facts(chain, x(), x()).program
    cos = next(op for op in program.ops if op.name == "cos")
    assert [program.storages[s].name for s in cos.reads] == ["mm"]


def test_a_view_of_a_loop_reads_what_the_loop_was_made_from() -> None:
    program = facts(lambda a, b: ((a @ b).sin().t().cos() @ b).sum(), x(), x()).program
    cos = next(op for op in program.ops if op.name == "cos")
    assert [program.storages[s].name for s in cos.reads] == ["mm"]


def test_facts_move_to_a_copy_of_the_graph() -> None:
    joint, count = plain_joint(chain, x(), x())
    kernels = FusionModel(fuses)(joint.graph)
    found = collect(joint, num_fwd_outputs=count, cost=checked(FlopCost()), never_stored=kernels)
    copied = torch.fx.Graph()
    copied.graph_copy(joint.graph, {})
    moved = found.moved_to(joint.graph)
    assert moved == found
    assert {n.name for n in found.moved_to(copied).never_stored} == {
        n.name for n in found.never_stored
    }
