"""Live intervals add up to the simulator's profile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.live_intervals import Holder, aligned, live_intervals, op_runs, stacked
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import emit, save_all
from fxckpt.solver.simulate import simulate
from tests.solver.programs import assignments, programs


@given(data=st.data(), program=programs())
def test_intervals_add_up_to_the_profile(data: st.DataObject, program: Program) -> None:
    """The bytes of all holders are the profile; the forward has no recomputes or gradients."""
    schedule = emit(program, data.draw(assignments(program)))
    profile = simulate(program, schedule).profile
    parts = stacked(live_intervals(program, schedule), len(profile))
    assert [sum(live) for live in zip(*parts.values(), strict=True)] == list(profile)
    forward = simulate(program, schedule).forward_ops
    assert not any(parts[Holder.RECOMPUTED][:forward]) and not any(parts[Holder.GRADIENT][:forward])


@given(data=st.data(), program=programs())
def test_aligned_profile_keeps_its_peak(data: st.DataObject, program: Program) -> None:
    """The uncheckpointed profile has the same peak over the op_runs of another schedule."""
    schedule, baseline = emit(program, data.draw(assignments(program))), save_all(program)
    profile = simulate(program, baseline).profile
    over = aligned(op_runs(program, schedule), op_runs(program, baseline), profile)
    assert len(over) == len(simulate(program, schedule).profile)
    assert max(over) == max(profile)
    assert (
        aligned(op_runs(program, baseline), op_runs(program, baseline), profile)[-1] == profile[-1]
    )
