"""Verify: what must hold of an emitted forward and backward, whatever was planned.

The forward reads no tangent. Every input of the backward is a tangent, a saved value or a generator state. A random op runs again only under
the state of its first run. What runs again and what is saved is what the plan says. Raises :class:`~fxckpt.errors.VerifyError`.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from fxckpt.errors import VerifyError
from fxckpt.ops.properties import is_random
from fxckpt.passes.meta import CHECKSUM_OF, FIRST_RUN_OF, RECOMPUTE_OF, IS_RECOMPUTE, VIEW_OF
from fxckpt.plans.types import Plan
from fxckpt.torch_private import is_symbolic, run_and_save_rng_state, run_with_rng_state


def verify(forward: fx.GraphModule, backward: fx.GraphModule, plan: Plan) -> None:
    """Check the two halves against ``plan``."""
    for node in forward.graph.find_nodes(op="placeholder"):
        if str(node.target).startswith("tangents"):
            raise VerifyError(f"the forward reads the incoming gradient {node.name!r}")
    _verify_random(forward, backward)
    _verify_runs(backward, plan)
    _verify_saved(backward, plan)


def _verify_random(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    given = {
        user.name: node.meta.get(FIRST_RUN_OF)
        for node in forward.graph.nodes
        if node.target is run_and_save_rng_state
        for user in node.users
        if user.args[1:] == (0,)
    }
    first_runs = {n.name for n in forward.graph.nodes}
    for node in backward.graph.nodes:
        original = node.meta.get(RECOMPUTE_OF)
        if node.target is run_with_rng_state:
            state = node.args[0]
            if (
                not isinstance(state, fx.Node)
                or state.op != "placeholder"
                or given.get(state.name) != original
            ):
                raise VerifyError(
                    f"the backward replays random op {original!r} under {state}, which is not the state of its first run"
                )
        elif is_random(node) and (original is not None or node.name in first_runs):
            raise VerifyError(
                f"random op {node.name!r} ({node.target}) would run in the backward with fresh randomness; "
                "it must be replayed under the generator state of its first run"
            )


def _verify_runs(backward: fx.GraphModule, plan: Plan) -> None:
    planned = Counter(run.name for run in plan.schedule)
    found = Counter(
        str(node.meta[RECOMPUTE_OF]) for node in backward.graph.nodes if node.meta.get(IS_RECOMPUTE)
    )
    if planned != found:
        differ = sorted((planned - found) | (found - planned))[:4]
        raise VerifyError(
            f"the plan runs {planned.total()} ops again, the backward {found.total()}; they differ in {differ}"
        )


def _verify_saved(backward: fx.GraphModule, plan: Plan) -> None:
    allowed = set(plan.saved)
    for node in backward.graph.find_nodes(op="placeholder"):
        is_input = str(node.target).startswith(("primals", "tangents", "bwd_", "fwd_"))
        if (
            is_input
            or is_symbolic(node)
            or node.meta.get(VIEW_OF, node.name) in allowed
            or CHECKSUM_OF in node.meta
        ):
            continue
        raise VerifyError(f"the backward reads {node.name!r}, which the plan does not save")
