"""Discrete ops: ops that turn numbers into choices.

A router's ``topk`` may choose another expert if its scores are recomputed one unit in the last
place away, and then every later shape and sum differs. So the planner retains discrete results.
They come from ops that always choose (``argmax``, ``sort``, ``nonzero``, ...), and from any op that
makes integers or booleans of numbers if these reach an index (``(score > 0.5).nonzero()``,
``x[x > 0]``).

Expects a graph with ``meta["val"]``. Leaves the graph alone.
"""

from __future__ import annotations

from torch import fx

from fxckpt.ops.properties import CHOOSING, tensors
from fxckpt.torch_private import OpOverload

INDEXING = frozenset(
    (
        "_unsafe_index",
        "_unsafe_index_put",
        "bincount",
        "embedding",
        "embedding_dense_backward",
        "gather",
        "index",
        "index_add",
        "index_copy",
        "index_fill",
        "index_put",
        "index_reduce",
        "index_select",
        "masked_scatter",
        "masked_select",
        "nonzero",
        "nonzero_static",
        "put",
        "repeat_interleave",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "take",
        "_local_scalar_dense",
    )
)
"""Ops whose integer and boolean arguments select the elements to read or write."""


def discrete_results(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the ops of ``graph`` that make choices."""
    found = {n for n in graph.nodes if _op_name(n) in CHOOSING}
    stack = [arg for n in graph.nodes if _op_name(n) in INDEXING for arg in n.all_input_nodes]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function" or not _is_discrete(node):
            continue
        seen.add(node)
        if any(not _is_discrete(arg) for arg in node.all_input_nodes):
            found.add(node)
        stack.extend(node.all_input_nodes)
    return frozenset(found)


def _op_name(node: fx.Node) -> str:
    """Return the name of an ATen op without its overload; empty for any other node."""
    target = node.target
    return target._opname if isinstance(target, OpOverload) and target.namespace == "aten" else ""


def _is_discrete(node: fx.Node) -> bool:
    """Return whether any tensor of a node holds integers or booleans.

    A node without tensors counts too: a size or a scalar is not computed from numbers.
    """
    values = list(tensors(node.meta.get("val")))
    return not values or any(not (t.is_floating_point() or t.is_complex()) for t in values)
