"""Plan cache: plans on disk, keyed by everything that determines them.

A process that compiles a known graph finds its code in Inductor's cache; the plan behind that code
is kept beside it, so that nothing is searched, lowered or timed a second time. Turning Inductor's
cache off, or clearing it, does the same for the plans.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt import budgets
from fxckpt.costs.isolated_op import signature
from fxckpt.costs.measured import machine
from fxckpt.errors import InvalidPlan
from fxckpt.ops.registry import registered
from fxckpt.passes.meta import NAME
from fxckpt.planner.planner import Planner, device_of
from fxckpt.plans.types import Plan
from fxckpt.torch_private import OpOverload, kernel_switches
from fxckpt.torch_private.inductor.options import cache_folder, configuration
from fxckpt.utils.cache_folder import warn_once

log = logging.getLogger("fxckpt")


@dataclass(frozen=True)
class PlanCache:
    """Plans by key, one file each."""

    folder: Path
    """Folder of the files, made when the first plan is kept."""

    @classmethod
    def beside_inductor(cls) -> PlanCache | None:
        """Return the cache in Inductor's cache folder; None if that cache is off."""
        folder = cache_folder()
        return None if folder is None else cls(folder / "fxckpt")

    def get(self, key: str) -> Plan | None:
        """Return the plan of a key; None if there is none that can be read."""
        path = self._path(key)
        try:
            return Plan.from_json(path.read_text()) if path.exists() else None
        except (OSError, UnicodeDecodeError, InvalidPlan) as error:
            log.warning("%s cannot be read (%s): planning again.", path, error)
            return None

    def keep(self, key: str, plan: Plan) -> None:
        """Store a plan; concurrent processes store the same one."""
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(plan.to_json())
            part.replace(path)
        except OSError as error:
            warn_once(
                path,
                "cannot be written",
                error,
                "every process plans again. TORCHINDUCTOR_CACHE_DIR names another folder.",
            )

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def key_of(joint: fx.GraphModule, planner: Planner, code: str, given: dict[str, Any]) -> str | None:
    """Return the key of a plan: a hash of graph, options, machine and ``code``, the code's version.

    None if more than these determine the plan: a policy, a cost model or a formula given to
    ``register_op`` may be any code, ``"auto"`` depends on free memory, dynamic sizes have ranges.
    """
    if (
        planner.policy is not None
        or not isinstance(planner.cost, str)
        or budgets.parse(planner.budget) == "auto"
        or planner.exact
        or planner.known
    ):
        return None
    nodes = [
        node for gm in joint.modules() if isinstance(gm, fx.GraphModule) for node in gm.graph.nodes
    ]
    if any(isinstance(node.meta.get("val"), torch.SymInt) or _has_formula(node) for node in nodes):
        return None
    asked = (
        planner.budget,
        planner.cost,
        planner.replays,
        planner.measure_workspace,
        planner.offload,
        planner.tile,
        sorted(given.items()),
    )
    parts = [
        code,
        machine(device_of(joint.graph)),
        torch.__version__,
        configuration(),
        kernel_switches(),
        repr(asked),
        *map(_line, nodes),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _has_formula(node: fx.Node) -> bool:
    costs = registered(node.target)
    return callable(costs.flops) or callable(costs.bytes)


KEYED_META = (
    "recompute",
    "ac_graph_id",
    NAME,
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "partitioner_tag",
)
"""Metadata of nodes that plans depend on, or quote."""


def _line(node: fx.Node) -> str:
    arguments = fx.map_arg((node.args, dict(node.kwargs)), str)
    values = [signature(leaf) for leaf in pytree.tree_leaves(node.meta.get("val"))]
    metadata = (node.meta.get(name) for name in KEYED_META)
    # Module stacks are keyed by addresses, which differ between processes.
    stable = [str(list(each.values()) if isinstance(each, dict) else each) for each in metadata]
    op = node.target
    declared = (
        (str(op._schema), sorted(map(str, op.tags)), registered(op))
        if isinstance(op, OpOverload)
        else ()
    )
    return repr((node.name, node.op, str(op), declared, str(arguments), values, stable))
