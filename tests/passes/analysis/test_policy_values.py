"""Policy values: the forward as policies see it."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.passes.analysis.policy_values import values_of
from fxckpt.passes.meta import NAME
from tests.passes.graphs import facts_of, traced


def example(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    hidden = primals.sin()
    product = hidden.view(2, 2) @ hidden.sin().view(2, 2)
    return product, tangents * hidden.cos().view(2, 2)


def test_values_of_an_example() -> None:
    """Views and ops of the backward's formulas have no value; readers look through views."""
    joint = traced(example, torch.ones(4), torch.ones(2, 2))
    nodes = {node.name: node for node in joint.graph.nodes}
    nodes["primals_1"].meta[NAME] = ("x",)
    nodes["sin"].meta[NAME] = ("hidden",)
    nodes["cos"].meta["partitioner_tag"] = "is_backward"
    lines = (
        f"{v.position} {v.node}#{v.occurrence} {list(v.shape)} {v.bytes} B, {v.flops} FLOPs, "
        f"reads {list(v.reads)}, names {list(v.names)}, inputs {list(v.input_names)}"
        for v in values_of(facts_of(joint))
    )
    assert_expected_inline(
        "\n".join(lines),
        """\
0 sin#0 [4] 16 B, 0 FLOPs, reads [], names ['hidden'], inputs ['x']
1 sin_1#1 [4] 16 B, 0 FLOPs, reads [0], names [], inputs []
2 mm#0 [2, 2] 16 B, 16 FLOPs, reads [0, 1], names [], inputs []""",
    )
