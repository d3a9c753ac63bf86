"""Describe: turn a schedule into a plan that people can read, with a reason for every value."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.passes.facts import Facts
from fxckpt.passes.kinds import tensors
from fxckpt.passes.price_search import Candidate, Found
from fxckpt.passes.program import Side
from fxckpt.plan import Decision, Plan, Reason, Recompute, Row
from fxckpt.torch_private import size_hint

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def describe(facts: Facts, found: Found, chosen: Candidate, *, budget_bytes: int | None, cost: str) -> Plan:
    """Return the plan of a chosen schedule."""
    program, schedule, simulation = facts.program, chosen.schedule, chosen.simulation
    recomputed = sorted(set(schedule.runs))
    return Plan(
        saved=tuple(state_name(program.storages[s].name) for s in chosen.schedule.saved),
        recomputed=tuple(program.ops[o].name for o in recomputed),
        schedule=tuple(
            Recompute(program.ops[o].name, program.backward[j].name) for o, j in zip(schedule.runs, schedule.before, strict=True)
        ),
        saved_bytes=simulation.saved_bytes,
        peak_bytes=simulation.peak_bytes,
        baseline_peak_bytes=found.baseline.simulation.peak_bytes,
        floor_bytes=min(found.floor.simulation.peak_bytes, simulation.peak_bytes),
        floor_bound_bytes=found.floor_bound_bytes,
        recompute_seconds=simulation.extra_seconds,
        lower_bound_seconds=min(found.bound.seconds, simulation.extra_seconds),
        price=found.bound.price * 2**20,
        next_seconds=max(0.0, simulation.extra_seconds - found.next_bound.seconds) if budget_bytes is not None else 0.0,
        recompute_flops=simulation.extra_flops,
        step_seconds=program.step_seconds,
        step_flops=program.step_flops,
        budget_bytes=budget_bytes,
        rows=tuple(_rows(facts, chosen)),
        profile=simulation.profile,
        forward_ops=simulation.forward_ops,
        cost=cost,
    )


def state_name(storage: str) -> str:
    """Return the graph's name for a storage (generator states are named after their op)."""
    return storage.replace(".rng_state", "_rng_state")


def _rows(facts: Facts, chosen: Candidate) -> list[Row]:
    program = facts.program
    runs = Counter(chosen.schedule.runs)
    rows = []
    for s in chosen.schedule.saved:
        storage = program.storages[s]
        name = state_name(storage.name)
        node = facts.owner.get(storage.name)
        if node is None:
            node = facts.op_node[storage.name.split(".rng_state")[0].split("#")[0]]
        op = program.ops[storage.producer] if storage.producer >= 0 else None
        rows.append(
            _row(
                facts,
                node,
                name,
                storage.bytes,
                Decision.SAVED,
                _why_saved(facts, s),
                0,
                op.seconds if op else 0.0,
                op.flops if op else 0,
            )
        )
    for o in sorted(runs):
        op = program.ops[o]
        node = facts.op_node[op.name]
        nbytes = sum(program.storages[s].bytes for s in op.writes)
        rows.append(_row(facts, node, op.name, nbytes, Decision.RECOMPUTED, _why_recomputed(facts, o), runs[o], op.seconds, op.flops))
    return rows


def _why_saved(facts: Facts, s: int) -> Reason:
    storage = facts.program.storages[s]
    if storage.producer < 0:
        return Reason.RNG_STATE
    if storage.is_output:
        return Reason.OUTPUT
    return facts.program.ops[storage.producer].pinned or Reason.CHEAPER_TO_SAVE


def _why_recomputed(facts: Facts, o: int) -> Reason:
    op = facts.program.ops[o]
    if op.writes and not all(facts.program.storages[s].is_savable for s in op.writes):
        tag = facts.op_node[op.name].meta.get("recompute")
        is_region = isinstance(tag, CheckpointPolicy)
        return Reason.REGION if is_region else Reason.POLICY
    if op.seconds == 0.0 or op.side is Side.EITHER:
        return Reason.FREE
    return Reason.CHEAPER_TO_RECOMPUTE


def _row(
    facts: Facts,
    node: fx.Node,
    name: str,
    nbytes: int,
    decision: Decision,
    reason: Reason,
    runs: int,
    seconds: float,
    flops: int,
) -> Row:
    first = next(tensors(node.meta.get("val")), None)
    if reason is Reason.RNG_STATE:
        shape: tuple[int, ...] = (nbytes,)
        dtype = "uint8"
    else:
        shape = tuple(size_hint(n) for n in first.shape) if first is not None else ()
        dtype = str(first.dtype).removeprefix("torch.") if first is not None else ""
    return Row(name, op_name(node), shape, dtype, nbytes, module_path(node), source_line(node), decision, reason, runs, seconds, flops)


def op_name(node: fx.Node) -> str:
    """Return the op's name without its namespace (``mm``, ``bernoulli.p``); a tuple's item is named after its op."""
    while node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        node = parent
    name = str(node.target).removeprefix("aten.")
    return name.removesuffix(".default")


def module_path(node: fx.Node) -> str:
    """Return the path of the module that made a node, as ``named_modules()`` spells it; empty for the model itself."""
    stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = list(stack.values())
    if not entries:
        return ""
    path = str(entries[-1][0])
    path = re.sub(r"getattr\((.+), '([^']+)'\)", r"\1.\2", path)
    path = re.sub(r"^G\.fxckpt_rewritten_step\w*\.source", "", path)  # a rewritten module that Dynamo goes through
    path = path.replace("._modules", "").replace("._orig_mod", "")
    path = re.sub(r"^L\[['\"][^\]]+['\"]\]|^L__[a-z]+___|^self\b|^__", "", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    return path.strip(".")


def source_line(node: fx.Node) -> str:
    """Return ``file.py:12`` of the user's code that made a node; empty if the trace did not record it."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    path, line = frames[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}"
