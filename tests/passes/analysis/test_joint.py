"""Joint graph: the program that is planned, read from a graph."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.errors import CaptureError
from fxckpt.passes.analysis import placement
from fxckpt.passes.analysis.joint import Facts
from tests.passes.graphs import chain, dropped, facts_of, traced


@pytest.fixture(autouse=True)
def engine_hands_over_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of torch 2.13: it keeps no incoming gradient."""
    monkeypatch.setattr(placement, "frees_incoming_gradients", lambda: True)


def text(facts: Facts) -> str:
    """The ops of a program with the storages they read and write."""
    program = facts.program
    names = [storage.name for storage in program.storages]
    return "\n".join(
        f"{op.side.name.lower()}: {op.name}({', '.join(names[s] for s in op.needs)})"
        + (f" -> {', '.join(names[s] for s in op.writes)}" if op.writes else "")
        + (f", {op.no_recompute.name}" if op.no_recompute else "")
        for op in (*program.ops, *program.backward)
    )


def test_program_of_a_chain() -> None:
    """``cos`` reads no tangent, so it may run in either half; inputs are free and not listed."""
    assert_expected_inline(
        text(facts_of(traced(chain, torch.ones(4), torch.ones(4)))),
        """\
forward: sin() -> sin
forward: sin_1(sin) -> sin_1
either: cos(sin) -> cos
either: cos_1() -> cos_1
backward: mul(tangents_1, cos) -> mul
backward: mul_1(mul, cos_1) -> mul_1
backward: output(mul_1)""",
    )


def test_gradient_that_the_engine_holds_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of torch 2.11 holds incoming gradients until the backward returns."""
    monkeypatch.setattr(placement, "frees_incoming_gradients", lambda: False)
    facts = facts_of(traced(chain, torch.ones(4), torch.ones(4)))
    assert text(facts).endswith("backward: output(tangents_1, mul_1)")


def test_view_is_no_op() -> None:
    """The transposed mask is a view: its readers read the mask itself."""
    facts = facts_of(traced(dropped, torch.ones(64, 64), torch.ones(64, 64)))
    assert {node.name for node in facts.views} == {"t"}
    assert_expected_inline(
        text(facts),
        """\
forward: bernoulli(bernoulli.rng_state) -> bernoulli
forward: exp(bernoulli) -> exp
backward: mul(bernoulli, tangents_1) -> mul
backward: output(mul)""",
    )


def test_small_random_value_is_saved() -> None:
    """A mask of 16 bytes is cheaper to save than its generator state."""
    facts = facts_of(traced(dropped, torch.ones(2, 2), torch.ones(2, 2)))
    assert_expected_inline(
        text(facts),
        """\
forward: bernoulli() -> bernoulli, SMALLER_THAN_STATE
forward: exp(bernoulli) -> exp
backward: mul(bernoulli, tangents_1) -> mul
backward: output(mul)""",
    )


def test_never_stored_value_is_inlined() -> None:
    """Readers of a value that is never stored read its operands."""
    joint = traced(chain, torch.ones(4), torch.ones(4))
    inlined = frozenset(node for node in joint.graph.nodes if node.name == "cos")
    facts = facts_of(joint, never_stored=inlined)
    assert facts.never_stored == inlined
    assert_expected_inline(
        text(facts),
        """\
forward: sin() -> sin
forward: sin_1(sin) -> sin_1
either: cos_1() -> cos_1
backward: mul(tangents_1, sin) -> mul
backward: mul_1(mul, cos_1) -> mul_1
backward: output(mul_1)""",
    )


def test_items_own_their_storages() -> None:
    """A tuple's storages are saved by its items."""

    def largest(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = primals.topk(1)
        return values.exp(), tangents * indices

    facts = facts_of(traced(largest, torch.ones(4), torch.ones(1)))
    assert {"getitem", "getitem_1"} <= facts.owner.keys()
    assert facts.moved_to(facts.owner["getitem"].graph) == facts


def test_node_without_a_value_is_refused() -> None:
    """The error says how to get the missing metadata."""
    joint = traced(chain, torch.ones(4), torch.ones(4))
    del next(node for node in joint.graph.nodes if node.name == "cos").meta["val"]
    with pytest.raises(CaptureError, match=r"'cos' .* has no meta"):
        facts_of(joint)


def test_module_call_is_refused() -> None:
    """A joint graph has no module calls."""
    joint = traced(chain, torch.ones(4), torch.ones(4))
    joint.add_submodule("layer", torch.nn.Identity())
    with joint.graph.inserting_before(joint.graph.output_node()):
        joint.graph.call_module("layer", ())
    with pytest.raises(CaptureError, match="is a call_module"):
        facts_of(joint)
