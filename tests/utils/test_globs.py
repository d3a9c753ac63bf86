"""Globs over the names of modules, ops and values."""

from __future__ import annotations

import pytest

from fxckpt.utils.globs import fits, is_inside


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("softmax", "soft*", True),
        ("softmax", "Soft*", False),
        ("mm_1", "mm_?", True),
        ("mm_12", "mm_?", False),
        ("mm_1", "mm_[12]", True),
        ("mm_3", "mm_[12]", False),
    ],
)
def test_wildcards(text: str, pattern: str, expected: bool) -> None:
    """``*``, ``?`` and ``[...]`` match as in a shell, with case."""
    assert fits(text, pattern) is expected


def test_brackets_match_themselves() -> None:
    """An index in a name needs no escape."""
    assert fits("heads[0]", "heads[0]") and fits("a.heads[0]", "*.heads[0]")
    assert not fits("heads[1]", "heads[0]")


def test_a_submodule_is_inside() -> None:
    """A pattern fits a module and all below it, but no neighbor of a longer name."""
    assert is_inside("layers.0", "layers.0") and is_inside("layers.0.attn.q", "layers.0")
    assert not is_inside("layers.01", "layers.0")
    assert not is_inside("layers", "layers.0")
