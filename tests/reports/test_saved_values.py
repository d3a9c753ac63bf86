"""Saved values, one line a value."""

from __future__ import annotations

import fxckpt


def test_text_follows_jax(plan: fxckpt.Plan) -> None:
    """The text has the type, origin and source of each value, as JAX prints them."""
    listed = plan.explain().saved_values()
    assert sum(v.bytes for v in listed.values) == plan.saved_bytes
    lines = str(listed).splitlines()
    assert any(
        "f32[4,4,48,48]" in line and "output of _softmax from modeling_gpt2.py:" in line
        for line in lines
    )
    assert any("from the input primals_" in line for line in lines)


def test_filtered_explanation(plan: fxckpt.Plan) -> None:
    """Saved values are those of the rows and inputs that a filter keeps."""
    shown = plan.explain()
    assert shown.filter(decision="saved").saved_values() == shown.saved_values()
    within = shown.filter(module="*.h.1").saved_values().values
    assert within and all(
        ".h.1" in v.module and v.origin.startswith(("output of", "generator state of"))
        for v in within
    )
    (named,) = shown.filter(name="primals_1").saved_values().values
    assert named.origin == "from the input primals_1"
    assert not shown.filter(decision="recomputed").saved_values().values
    assert len(shown.filter(decision="saved").top(2).saved_values().values) == 2
