"""Selectors: patterns over modules, names and ops."""

from __future__ import annotations

import pytest

import fxckpt
from fxckpt.policies import (
    Policy,
    block_boundaries,
    recompute,
    save,
    save_matmuls,
    save_only,
    save_ops,
)
from tests.policies.nets import aten, net


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (
            save("layer.*.attn"),
            r"no module that computes fits 'layer.\*.attn'. Did you mean 'layers.\*.attn'",
        ),
        (recompute("attn"), r"did you mean '\*\*.attn'"),
        (block_boundaries("blocks.*"), "no module that computes fits"),
        (save_only("attnout"), "no value is named 'attnout'. Did you mean 'attn_out'"),
        (
            save_ops(aten.mm),
            "save_ops.aten.mm. matches no op of the graph. Did you mean 'aten.addmm'",
        ),
        (save("nowhere") | save_matmuls, "no module that computes fits 'nowhere'"),
    ],
)
def test_unmatched_pattern_suggests_the_nearest(policy: Policy, says: str) -> None:
    """A pattern that matches nothing raises and suggests the nearest names."""
    model, inputs = net()
    with pytest.raises(fxckpt.PolicyMatchesNothing, match=says):
        fxckpt.rewrite(model, policy, example_inputs=inputs)
