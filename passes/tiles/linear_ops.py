"""Linear ops: which ops are linear in which of their operands, as tables.

Where an op is linear in an operand, a factor of the operand is one of the result, and a row of
zeros gives a row of zeros.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from torch import fx

from fxckpt.torch_private import OpOverload

# fmt: off
ALONE = frozenset(
    (
        "_to_copy", "_unsafe_view", "alias", "clone", "convert_element_type", "cumsum", "detach",
        "expand", "mean", "neg", "permute", "reshape", "slice", "slice_backward", "squeeze", "sum",
        "t", "transpose", "unsqueeze", "view",
    )
)
"""Ops of one operand that are linear in it."""

IN_FIRST = frozenset(
    (
        "_log_softmax_backward_data", "_softmax_backward_data", "cross_entropy_backward", "div",
        "elu_backward", "gather", "gelu_backward", "hardtanh_backward", "leaky_relu_backward",
        "nll_loss_backward", "sigmoid_backward", "silu_backward", "softplus_backward",
        "tanh_backward", "threshold_backward",
    )
)
"""Ops that are linear in their first operand, for any others."""

IN_EITHER = frozenset(("mm", "mul"))
"""Ops that are linear in each of two operands."""

TOGETHER = frozenset(("add", "sub"))
"""Ops that are linear in all their operands together."""

ZEROS = frozenset(("new_zeros", "zeros_like", "zeros"))
# fmt: on


def bare_name(node: fx.Node) -> str:
    """Return the name of an op of torch or ours, without its overload; empty for others."""
    return node.target._opname if isinstance(node.target, OpOverload) else ""


def is_linear(node: fx.Node, depends: AbstractSet[fx.Node]) -> bool:
    """Return whether an op is linear in those of its operands that ``depends`` holds, together."""
    name = bare_name(node)
    operands = [n for n in node.args if isinstance(n, fx.Node)]
    given = [n for n in operands if n in depends]
    if name in ZEROS:
        return True
    if len(given) != sum(n in depends for n in node.all_input_nodes):
        return False
    if name in ALONE:
        return given == operands[:1]
    if name in IN_FIRST:
        return given == operands[:1] and node.args[0] is given[0]
    if name in IN_EITHER:
        return len(given) == 1
    if name in TOGETHER:
        return len(given) == 2
    if name == "where":
        rest = [n for n in operands[1:] if n not in depends]
        return operands[0] not in depends and all(map(is_zero, rest))
    if name == "masked_fill":
        return given == operands[:1] and bool(node.args[2] == 0)
    if name in ("scatter", "scatter_add"):
        return is_zero(operands[0]) and given == operands[-1:]
    if name == "slice_scatter":
        return is_zero(operands[0]) and given == operands[1:2]
    return False


def is_zero(node: fx.Node) -> bool:
    """Return whether a value is all zeros."""
    filled = {"scalar_tensor": 0, "full": 1, "full_like": 1}.get(bare_name(node))
    return bare_name(node) in ZEROS or (filled is not None and bool(node.args[filled] == 0))
