"""Liveness under autograd: the last op of an autograd node reads what its other ops read."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.passes.analysis import placement
from fxckpt.passes.analysis.autograd_liveness import held_by_nodes
from fxckpt.solver.program import Program
from tests.passes.graphs import facts_of, traced


@pytest.fixture(autouse=True)
def engine_hands_over_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of torch 2.13: it keeps no incoming gradient."""
    monkeypatch.setattr(placement, "frees_incoming_gradients", lambda: True)


def reads(program: Program) -> str:
    names = [storage.name for storage in program.storages]
    lines = (f"{op.name}: {' '.join(names[s] for s in op.reads)}" for op in program.backward)
    return "\n".join(lines)


def product(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    hidden = primals.sin()
    return hidden.exp(), (tangents * hidden).neg().cos()


def program_of(numbers: Mapping[str, int]) -> Program:
    joint = traced(product, torch.ones(4), torch.ones(4))
    for node in joint.graph.nodes:
        if node.name in numbers:
            node.meta["seq_nr"] = numbers[node.name]
    return held_by_nodes(facts_of(joint))


def test_last_op_reads_for_its_node() -> None:
    """``cos`` is the last op of a node that saved ``sin``, so it holds ``sin`` and the tangent."""
    assert_expected_inline(
        reads(program_of({"mul": 7, "neg": 7, "cos": 7})),
        """\
mul: tangents_1 sin
neg: mul
cos: neg tangents_1 sin
output: cos""",
    )


def test_other_nodes_free_op_by_op() -> None:
    """Ops of different autograd nodes read what they read in the graph."""
    assert_expected_inline(
        reads(program_of({"mul": 7, "neg": 8, "cos": 9})),
        """\
mul: tangents_1 sin
neg: mul
cos: neg
output: cos""",
    )
