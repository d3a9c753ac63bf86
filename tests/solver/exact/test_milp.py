"""The integer program."""

from __future__ import annotations

import pytest

from fxckpt.solver.exact.milp import in_forward, optimum
from tests.solver.programs import on_either_side


def test_refuses_ops_on_either_side() -> None:
    """The integer program takes only programs whose ops have one side."""
    with pytest.raises(ValueError, match="in_forward"):
        optimum(on_either_side(), 100)
    assert optimum(in_forward(on_either_side()), 21).seconds == 0.0
