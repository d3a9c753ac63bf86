"""Choices of torch's default partitioner."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fxckpt.torch_private.capture.region_budgets import without_torch_regions

INDEXING = frozenset(
    (
        *("arange", "empty", "full", "full_like", "inductor_random", "iota", "scalar_tensor"),
        *("_to_copy", "clone", "convert_element_type", "copy", "lift_fresh_copy", "fma"),
        *(
            "_unsafe_index",
            "_unsafe_masked_index",
            "cat",
            "constant_pad_nd",
            "embedding",
            "flip",
            "gather",
            "index",
            "repeat",
            "rev",
            "select_scatter",
            "slice_scatter",
        ),
    )
)
"""Ops that Inductor lowers to element-wise loops, though torch does not tag them as pointwise.

They index, create or cast.
"""


def fuses(node: fx.Node) -> bool:
    """Return whether Inductor lowers an op to an element-wise loop that it may inline."""
    target = node.target
    return is_view(node) or (
        isinstance(target, OpOverload)
        and (torch.Tag.pointwise in target.tags or target._opname in INDEXING)
    )


def is_view(node: fx.Node) -> bool:
    """Return whether an op returns an alias of its input."""
    if not isinstance(node.target, OpOverload):
        return False
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns
    )


def default_saved(joint: fx.GraphModule, *, num_fwd_outputs: int, **given: Any) -> frozenset[str]:
    """Return the names of the values that torch's default partitioner saves.

    The joint graph is not modified. Budgets of regions and of the graph are left out.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    copy_of = copied(joint)
    without_torch_regions(copy_of)
    with config.patch(activation_memory_budget=1.0), _fake_mode_of(copy_of.graph):
        forward, _ = min_cut_rematerialization_partition(
            copy_of, None, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **given
        )
    (output,) = forward.graph.find_nodes(op="output")
    return frozenset(n.name for n in output.args[0][num_fwd_outputs:] if isinstance(n, fx.Node))


def _fake_mode_of(graph: fx.Graph) -> AbstractContextManager[Any]:
    """Return the mode that a graph was traced in, to enter where none is active.

    torch makes generator states in it for the random ops of checkpoint regions. A graph from a
    file has no trace around it.
    """
    if detect_fake_mode() is None:
        for value in pytree.tree_leaves([node.meta.get("val") for node in graph.nodes]):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return nullcontext()


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph module that shares its constants.

    They are real tensors, which cannot be copied among fake ones. The copy takes its inputs flat,
    and shares the pytree of a traced graph's arguments: torch 2.13 warns where one is copied.
    """
    constants = (
        *gm.buffers(),
        *gm.parameters(),
        *(value for module in gm.modules() for value in vars(module).values()),
    )
    specs = (getattr(gm, name, None) for name in ("_in_spec", "_out_spec"))
    shared: dict[int, Any] = {id(c): c for c in constants if isinstance(c, torch.Tensor)}
    shared |= {id(spec): spec for spec in specs if spec is not None}
    codegen = gm.graph._codegen
    gm.graph.set_codegen(fx.graph.CodeGen())
    try:
        return copy.deepcopy(gm, shared)
    finally:
        gm.graph.set_codegen(codegen)


def remembered(gm: fx.GraphModule) -> Callable[[], fx.GraphModule]:
    """Return a function that makes a graph module of the graph that ``gm`` has now.

    Only the graph is copied, without code; constants and subgraphs are those of ``gm``.
    """
    codegen = gm.graph._codegen
    gm.graph.set_codegen(fx.graph.CodeGen())
    try:
        graph = copy.deepcopy(gm.graph)
    finally:
        gm.graph.set_codegen(codegen)
    return lambda: fx.GraphModule(gm, graph)


def partition_by_default(
    joint: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    inner: str | None,
    **given: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the halves of torch's own partitioner: Inductor's min-cut, or the one that saves all.

    Only Inductor gets the min-cut, which recomputes random ops without their generator state; there
    they are seeded in the graph.
    """
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    if inner == "inductor":
        return min_cut_rematerialization_partition(
            joint, joint_inputs, compiler=inner, num_fwd_outputs=num_fwd_outputs, **given
        )
    return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **given)
