"""Invariants of an emitted forward and backward, which hold whatever the plan.

The forward reads no tangent. Every input of the backward is a tangent, an input, a saved value or a
generator state. A random op is recomputed only under the generator state of its first run. The
recomputed ops and the saved values are the plan's. No saved value is written: a second backward
over a retained graph reads it again.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from fxckpt.errors import VerifyError
from fxckpt.ops.properties import is_random, tensors, written_argument
from fxckpt.passes.meta import CHECKSUM_OF, FIRST_RUN_OF, IS_RECOMPUTE, RECOMPUTE_OF, VIEW_OF
from fxckpt.plans.types import Plan
from fxckpt.torch_private import (
    is_symbolic,
    run_and_save_rng_state,
    run_with_rng_state,
    storage_id,
)


def verify(forward: fx.GraphModule, backward: fx.GraphModule, plan: Plan) -> None:
    """Raise :class:`~fxckpt.errors.VerifyError` unless the two halves follow ``plan``."""
    for node in forward.graph.find_nodes(op="placeholder"):
        if str(node.target).startswith("tangents"):
            raise VerifyError(f"the forward reads the incoming gradient {node.name!r}")
    _verify_random(forward, backward)
    _verify_recomputed(backward, plan)
    _verify_saved(backward, plan)
    _verify_written(backward)


def _verify_random(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Raise :class:`VerifyError` for a random op recomputed under another generator state."""
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


def _verify_written(backward: fx.GraphModule) -> None:
    for node in backward.graph.nodes:
        owner = written_argument(node) if node.op == "call_function" else None
        if owner is None:
            continue
        while (base := _base(owner)) is not None:
            owner = base
        if owner.op == "placeholder" and not str(owner.target).startswith(("primals", "tangents")):
            raise VerifyError(
                f"op {node.name!r} ({node.target}) writes the saved value {owner.name!r}, which a "
                "second backward would read"
            )


def _base(view: fx.Node) -> fx.Node | None:
    """Return the argument whose storage a node shares, or that it writes; None if it has none."""
    if view.op != "call_function":
        return None
    if (written := written_argument(view)) is not None:
        return written
    held = {storage_id(t) for t in tensors(view.meta.get("val"))}
    return next(
        (
            arg
            for arg in view.all_input_nodes
            if any(storage_id(t) in held for t in tensors(arg.meta.get("val")))
        ),
        None,
    )
