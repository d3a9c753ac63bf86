"""The pipeline: passes in order, and the hook between them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import fx

from fxckpt.errors import VerifyError
from fxckpt.ops.properties import tensors
from fxckpt.passes.graphs import Joint
from fxckpt.planner.pipeline import (
    EMIT,
    EMIT_INDUCTOR,
    PREPARE,
    PREPARE_INDUCTOR,
    Emission,
    OnHalf,
    OnJoint,
    Place,
    emit_halves,
    prepare,
)
from tests.passes.graphs import chain, planned, traced


def joint() -> fx.GraphModule:
    return traced(chain, torch.ones(4), torch.ones(4))


def emission() -> Emission:
    module = joint()
    return Emission(Joint(module, 1), *planned(module))


def test_passes_run_in_order_and_are_timed(caplog: pytest.LogCaptureFixture) -> None:
    """The log names each pass of a tuple, in its order."""
    with caplog.at_level(logging.DEBUG, "fxckpt"):
        prepare(Joint(joint(), 1))
        emit_halves(emission())
    names = [r.message.split(" took ")[0] for r in caplog.records if " took " in r.message]
    assert names == [step.name for step in (*PREPARE, *EMIT)]


def test_inductor_has_the_plain_passes_and_more() -> None:
    """The plain passes keep their order among Inductor's, but for what Inductor does itself."""
    others = ("insert_checks", "insert_offload_ops", "write_in_place")
    emit = tuple(step for step in EMIT if step.name not in others)
    # The last three are of values that kernels other than Inductor's allocate.
    for plain, more in ((PREPARE[:-3], PREPARE_INDUCTOR), (emit, EMIT_INDUCTOR)):
        names = [step.name for step in more]
        assert [name for name in names if name in {step.name for step in plain}] == [
            step.name for step in plain
        ]


def test_the_hook_lints_between_passes() -> None:
    """A rewrite that leaves a reader before its value is refused at once."""

    def misplace(graph: fx.Graph) -> None:
        first, *_, last = [n for n in graph.nodes if n.op == "call_function"]
        first.prepend(last)

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        prepare(Joint(joint(), 1), (OnJoint(misplace),))


def test_the_hook_verifies_the_halves() -> None:
    """A pass that drops a recompute breaks the plan and is refused."""

    def save_more(backward: fx.Graph) -> None:
        recomputed = next(n for n in backward.nodes if n.op == "call_function")
        with backward.inserting_before():
            recomputed.replace_all_uses_with(backward.placeholder("sin_saved"))
        backward.erase_node(recomputed)

    with pytest.raises(VerifyError):
        emit_halves(emission(), (*EMIT, OnHalf("backward", save_more)))


def test_graph_for_another_device_is_placed_first(caplog: pytest.LogCaptureFixture) -> None:
    """The pass that puts values on the planned device runs under the hook."""
    module = joint()
    with caplog.at_level(logging.DEBUG, "fxckpt"):
        prepare(Joint(module, 1), (Place(torch.device("cuda", 0)),))
    found = {t.device.type for n in module.graph.nodes for t in tensors(n.meta.get("val"))}
    assert found == {"cuda"}
    names = [r.message.split(" took ")[0] for r in caplog.records if " took " in r.message]
    assert names == ["place"]


def test_rewrite_that_does_not_apply_is_omitted() -> None:
    """A pass of the backward runs only for emissions to which it applies."""
    seen: list[str] = []

    @dataclass(frozen=True)
    class Noting:
        label: str
        __name__ = "noting"

        def __call__(self, backward: fx.Graph) -> None:
            seen.append(self.label)

    emit_halves(
        emission(),
        (
            *EMIT,
            OnHalf("backward", Noting("never"), lambda _: False),
            OnHalf("backward", Noting("always")),
        ),
    )
    assert seen == ["always"]
