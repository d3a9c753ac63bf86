"""Liveness in eager mode: what a region's recorder, its Python and autograd's nodes hold."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.passes.analysis import placement
from fxckpt.passes.analysis.eager_liveness import held_by_nodes, held_by_region
from fxckpt.passes.meta import CALL, HAS_STATE, HELD, HELD_TO
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


def draws(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    hidden = primals.sin()
    noise = torch.rand_like(hidden)
    return hidden * noise, tangents * noise


def held(marks: Mapping[str, dict[str, object]]) -> str:
    joint = traced(draws, torch.ones(4), torch.ones(4))
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    for number, node in enumerate(calls):
        node.meta["custom"] = {CALL: number}
        node.meta |= marks.get(node.name, {})
    program = held_by_region(facts_of(joint))
    return "\n".join(f"{s.name}: {s.bytes} to {s.held_to}" for s in program.storages)


def test_states_of_draws_stay_in_the_forward() -> None:
    """``rand_like`` is smaller than its state, which is held all the same."""
    assert_expected_inline(
        held({"rand_like": {HAS_STATE: True}}),
        """\
tangents_1: 16 to -1
sin: 16 to -1
rand_like: 16 to -1
mul: 16 to -1
mul_1: 16 to -1
rand_like.rng_state: 5056 to 2""",
    )


def test_results_live_as_long_as_recorded() -> None:
    """A variable held ``sin`` during the last call; a kernel made more of ``rand_like``."""
    marks: dict[str, dict[str, object]] = {
        "sin": {HELD_TO: {(): (2, 16)}},
        "rand_like": {HELD_TO: {(): (1, 64)}},
    }
    assert_expected_inline(
        held(marks),
        """\
tangents_1: 16 to -1
sin: 16 to 2
rand_like: 64 to 1
mul: 16 to -1
mul_1: 16 to -1""",
    )


def test_held_results_stay_to_the_end() -> None:
    assert_expected_inline(
        held({"sin": {HELD: True}}),
        """\
tangents_1: 16 to -1
sin: 16 to 2
rand_like: 16 to -1
mul: 16 to -1
mul_1: 16 to -1""",
    )
