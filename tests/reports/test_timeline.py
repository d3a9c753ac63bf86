"""Timelines: live values at every op."""

from __future__ import annotations

import fxckpt
from fxckpt.solver.live_intervals import Holder


def test_timeline_adds_up(plan: fxckpt.Plan) -> None:
    """Live values add up to the profile, and the text names the op at the peak."""
    timeline = plan.timeline()
    assert [sum(live) for live in zip(*timeline.stack.values(), strict=True)] == list(plan.profile)
    peak = timeline.at(timeline.peak_tick)
    assert sum(h.bytes for h in peak) == plan.peak_bytes
    assert max(tick.uncheckpointed_bytes for tick in timeline.ticks) == plan.baseline_peak_bytes
    assert {h.name for h in timeline.held if h.holder is Holder.SAVED} == set(
        plan.saved
    ) - _outputs(plan)
    assert "peak " in str(timeline) and timeline.ticks[timeline.peak_tick].name in str(timeline)


def _outputs(plan: fxckpt.Plan) -> set[str]:
    return {row.name for row in plan.rows if row.reason is fxckpt.Reason.OUTPUT}
