"""Take names: calls of ``fxckpt.name`` become metadata of what they name."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

import fxckpt
from fxckpt.passes.meta import NAME
from fxckpt.passes.transforms.take_names import take_names
from tests.passes.graphs import text_of, traced


def test_name_moves_to_its_op() -> None:
    """A name of a view names the op that fills its storage, and the call of ``name`` is gone."""
    joint = traced(lambda x: fxckpt.name(x.sin().view(2, 2), "hidden").exp(), torch.ones(4))
    take_names(joint.graph)
    joint.graph.lint()
    assert {n.name: n.meta[NAME] for n in joint.graph.nodes if NAME in n.meta} == {
        "sin": ("hidden",)
    }
    assert_expected_inline(
        text_of(joint.graph),
        """\
x_1: input
sin = sin(x_1)
view = view(sin, [2, 2])
exp = exp(view)
return exp""",
    )
