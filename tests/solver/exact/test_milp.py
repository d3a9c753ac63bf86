"""The integer program."""

from __future__ import annotations

import pytest

from fxckpt.solver.exact.milp import in_forward, optimum
from fxckpt.solver.program import Op, Program, Side
from tests.solver.programs import two_values


def test_refuses_ops_on_either_side() -> None:
    """The integer program takes only programs whose ops have one side."""
    program = two_values()
    either = Program(
        (Op("cheap", Side.EITHER, 1.0, 1, (), (0,)), program.ops[1]),
        program.backward,
        program.storages,
        (),
    )
    with pytest.raises(ValueError, match="in_forward"):
        optimum(either, 100)
    assert optimum(in_forward(either), 21).seconds == 0.0
