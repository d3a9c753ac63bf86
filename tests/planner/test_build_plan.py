"""From a schedule to a plan: names, figures, and a reason for every value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import fxckpt
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.pipeline import prepare
from fxckpt.planner.planner import Planner
from fxckpt.policies import as_policy, recompute_all
from fxckpt.reason import Decision, Reason
from fxckpt.solver.simulate import simulate


def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a mask, and return an output that the backward reads."""
    kept = (torch.nn.functional.dropout(x @ w, 0.5).sin() @ w).tanh().cos().exp()
    return kept, (kept.sin() @ w).cos().sum()


@pytest.fixture(scope="module")
def plans() -> dict[str, fxckpt.Plan]:
    """Return plans that save all and recompute all, and one at a budget."""
    inputs = [torch.ones(32, 32, requires_grad=True) for _ in range(2)]
    found = {}
    for name, policy, budget in (
        ("all saved", as_policy(lambda *_: CheckpointPolicy.MUST_SAVE), None),
        ("all recomputed", recompute_all, None),
        ("budget", None, 0.9),
    ):
        joint = capture_joint(function, inputs, {})
        planner = Planner(budget, policy, "flops", measure_workspace=False)
        _, found[name] = planner.plan(prepare(joint))
    return found


def test_every_saved_and_recomputed_value_has_a_row(plans: dict[str, fxckpt.Plan]) -> None:
    """Rows are the saved values and the recomputed ops, by name."""
    for plan in plans.values():
        rows = {(row.name, row.decision) for row in plan.rows}
        assert rows == {(name, Decision.SAVED) for name in plan.saved} | {
            (name, Decision.RECOMPUTED) for name in plan.recomputed
        }


def test_reasons_of_saved_values(plans: dict[str, fxckpt.Plan]) -> None:
    """An output is saved as an output, a generator's state as one."""
    reasons = {row.name: row.reason for row in plans["all recomputed"].rows}
    assert Reason.OUTPUT in reasons.values() and Reason.RNG_STATE in reasons.values()
    assert Reason.RNG_STATE not in {row.reason for row in plans["all saved"].rows}


def test_a_policy_is_the_reason_it_recomputes(plans: dict[str, fxckpt.Plan]) -> None:
    """An op that costs and may not be saved is recomputed by policy."""
    rows = [r for r in plans["all recomputed"].rows if r.decision is Decision.RECOMPUTED]
    assert {r.reason for r in rows} <= {Reason.POLICY, Reason.FREE}
    assert Reason.POLICY in {r.reason for r in rows}


def test_figures_are_the_simulation_s(plans: dict[str, fxckpt.Plan]) -> None:
    """Peak, profile and bytes are those of the schedule, simulated again."""
    for plan in plans.values():
        assert plan.snapshot is not None
        program = plan.snapshot.program
        index = {op.name: i for i, op in enumerate(program.ops)}
        backward = {op.name: j for j, op in enumerate(program.backward)}
        from fxckpt.solver.schedule import with_runs

        schedule = with_runs(
            program,
            tuple(index[run.name] for run in plan.schedule),
            tuple(backward[run.before] for run in plan.schedule),
        )
        simulation = simulate(program, schedule)
        assert (plan.peak_bytes, plan.profile) == (simulation.peak_bytes, simulation.profile)
        assert plan.recompute_flops == simulation.extra_flops
        assert max(plan.profile) == plan.peak_bytes


def test_bounds_lie_below_the_figures(plans: dict[str, fxckpt.Plan]) -> None:
    """Bounds never exceed what the plan reaches; without a budget there is nothing to save next."""
    for plan in plans.values():
        assert plan.lower_bound_seconds <= plan.recompute_seconds
        assert plan.floor_bound_bytes <= plan.floor_bytes <= plan.peak_bytes
    assert plans["all saved"].next_seconds == 0 and plans["all saved"].budget_bytes is None
    assert plans["budget"].peak_bytes <= plans["budget"].budget_bytes
