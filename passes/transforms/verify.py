"""Verify: check the invariants of an emitted forward and backward, whatever the plan.

The forward reads no tangent. Every input of the backward is a tangent, an input, a saved value or a
generator state. A random op is recomputed only under the generator state of its first run. The
recomputed ops and the saved values are the plan's.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from fxckpt.errors import VerifyError
from fxckpt.ops.properties import is_random
from fxckpt.passes.meta import CHECKSUM_OF, FIRST_RUN_OF, IS_RECOMPUTE, RECOMPUTE_OF, VIEW_OF
from fxckpt.plans.types import Plan
from fxckpt.torch_private import is_symbolic, run_and_save_rng_state, run_with_rng_state


def verify(forward: fx.GraphModule, backward: fx.GraphModule, plan: Plan) -> None:
    """Raise :class:`~fxckpt.errors.VerifyError` unless the two halves follow ``plan``."""
    for node in forward.graph.find_nodes(op="placeholder"):
        if str(node.target).startswith("tangents"):
            raise VerifyError(f"the forward reads the incoming gradient {node.name!r}")
    _verify_random(forward, backward)
    _verify_recomputed(backward, plan)
    _verify_saved(backward, plan)


def _verify_random(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    op_of_state = {
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
                or op_of_state.get(state.name) != original
            ):
                raise VerifyError(
                    f"the backward recomputes random op {original!r} under {state}, which is not "
                    "the state of its first run"
                )
        elif is_random(node) and (original is not None or node.name in first_runs):
            raise VerifyError(
                f"random op {node.name!r} ({node.target}) would run in the backward with fresh "
                "randomness; it must be recomputed under the generator state of its first run"
            )


def _verify_recomputed(backward: fx.GraphModule, plan: Plan) -> None:
    planned = Counter(run.name for run in plan.schedule)
    found = Counter(
        str(node.meta[RECOMPUTE_OF]) for node in backward.graph.nodes if node.meta.get(IS_RECOMPUTE)
    )
    if planned != found:
        differ = sorted((planned - found) | (found - planned))[:4]
        raise VerifyError(
            f"the plan recomputes {planned.total()} ops, the backward {found.total()}; "
            f"they differ in {differ}"
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
