"""Cuts of all stages yield legal schedules."""

from __future__ import annotations

import pytest
from hypothesis import given

from fxckpt.solver.cuts.staged_cut import StagedCut
from fxckpt.solver.cuts.stages import StageBoundaries
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import emit
from tests.solver.programs import interpret, programs


@pytest.mark.parametrize("colors", [1, 4, 100])
@given(program=programs())
def test_any_coloring_is_legal(program: Program, colors: int) -> None:
    """Any distance of stages decided together yields legal schedules."""
    cut = StagedCut(colors=colors)
    layout = cut.lay_out(program, StageBoundaries(program).stages(5))
    for prices, decided in zip(
        choices := [[p] * (len(layout.starts) + 1) for p in (0.1, 1.0, 10.0)],
        cut(layout, choices),
        strict=True,
    ):
        assert decided == cut(layout, [prices])[0]
        for assignment in decided:
            interpret(program, emit(program, assignment))
