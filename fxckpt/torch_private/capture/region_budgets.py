"""Budgets of regions of a model, as annotations of the nodes traced in them.

Dynamo and AOTAutograd copy what :func:`torch.fx.traceback.annotate` sets to every node traced under
it, and from a forward op to the ops of its gradient. A region of ours has a key of its own, so that
regions nest. torch's ``region_activation_memory_budget`` (2.13) has one key for all: the innermost
region hides the others, and two regions of one budget are the same. :func:`_tell_apart` gives each
of them a key like ours as Dynamo enters it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx
from torch._dynamo.variables.ctx_manager import FxTracebackAnnotateVariable
from torch._guards import TracingContext
from torch.fx import traceback

from fxckpt.errors import InvalidBudget
from fxckpt.torch_private.capture.dynamo import calling_line

PREFIX = "fxckpt_budget "
"""First part of our keys in ``meta["custom"]``; the rest is JSON."""
TORCH_KEY: str | None = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)
"""Key of torch's own regions; None before torch 2.13."""

_entered = itertools.count()


F = TypeVar("F", bound=Callable[..., Any])


def constant_in_graph(function: F) -> F:
    """Let Dynamo call a function as it traces, and take the result for a constant."""
    marked: F = torch.compiler.assume_constant_result(function)
    return marked


class RegionKey(NamedTuple):
    """One entry into a region."""

    number: int
    """Number of the entry in this process; -1 for torch's regions of one budget, not told apart."""
    budget: int | float
    """Bytes as int, or a fraction as float."""
    name: str
    """The user's name, or the place in the source."""


def annotates() -> bool:
    """Return whether a graph is being traced whose nodes keep annotations."""
    return torch.compiler.is_compiling() or traceback.has_preserved_node_meta()


def annotate(key: str) -> Any:
    """Return a context manager and decorator, under which traced nodes get ``key``."""
    return traceback.annotate({key: True})


def new_key(budget: int | float, name: str) -> str:
    """Return the key of a new entry into a region."""
    return PREFIX + json.dumps([next(_entered), budget, name or _source()])


def region_keys(node: fx.Node) -> tuple[RegionKey, ...]:
    """Return the regions that a node was traced in, the outermost first."""
    custom = node.meta.get("custom")
    if not isinstance(custom, dict):
        return ()
    keys = [
        RegionKey(*json.loads(key.removeprefix(PREFIX)))
        for key in custom
        if isinstance(key, str) and key.startswith(PREFIX)
    ]
    own = custom.get(TORCH_KEY) if TORCH_KEY is not None else None
    if own is not None and own not in [key.budget for key in keys]:
        keys.append(RegionKey(-1, own, f"region_activation_memory_budget({own})"))
    return tuple(sorted(keys))


def without_torch_regions(gm: fx.GraphModule) -> None:
    """Remove the annotations of torch's own regions: its partitioner takes one budget a graph."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            custom = node.meta.get("custom")
            if isinstance(custom, dict) and TORCH_KEY in custom:
                rest = {key: value for key, value in custom.items() if key != TORCH_KEY}
                node.meta["custom"] = rest


def graph_budget() -> float:
    """Return torch's budget for whole graphs, which is 1.0 unless the user set it.

    Raises
    ------
    InvalidBudget
        If it is no fraction, which torch's own partitioner refuses too.
    """
    from torch._functorch import config

    budget = config.activation_memory_budget
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget <= 1:
        raise InvalidBudget(
            f"torch._functorch.config.activation_memory_budget={budget!r} is not a fraction in "
            "[0, 1]: 0.0 saves the least possible, 1.0 is no limit."
        )
    return float(budget)


def traced_nodes() -> list[fx.Node]:
    """Return the nodes of the graph that Dynamo is compiling; none outside of Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return list(InstructionTranslator.current_tx().output.graph.nodes)
    except AttributeError:
        return []


def _source() -> str:
    """Return the line of the user's code that is traced or runs."""
    if TracingContext.try_get() is None:
        return calling_line()
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    frames = [
        frame for frame in TracingContext.extract_stack() if not frame.filename.startswith(inside)
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _annotation_name(variable: FxTracebackAnnotateVariable) -> str:
    """Return the attribute that holds an annotation: ``target_values`` before torch 2.14."""
    return "annotation" if hasattr(variable, "annotation") else "target_values"


def _tell_apart() -> None:
    """Let Dynamo annotate each entry into one of torch's regions with a key of its own."""
    enter = FxTracebackAnnotateVariable.enter

    def enter_with_key(self: Any, tx: Any, *args: Any) -> Any:
        name = _annotation_name(self)
        values = getattr(self, name)
        if TORCH_KEY is None or not isinstance(values, dict) or TORCH_KEY not in values:
            return enter(self, tx, *args)
        # Only while it is entered: a later entry has its own key, and Dynamo's resume functions
        # enter the region as the user wrote it.
        setattr(self, name, {**values, new_key(values[TORCH_KEY], ""): True})
        try:
            return enter(self, tx, *args)
        finally:
            setattr(self, name, values)

    FxTracebackAnnotateVariable.enter = enter_with_key  # type: ignore[method-assign]


_tell_apart()
