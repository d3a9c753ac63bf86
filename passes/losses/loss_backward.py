"""Loss backward: cross entropy's backward as one op, in place of two.

Autograd first computes the gradient of the log-probabilities, as large as they are and zero but for
one number a row, and from it that of the logits. One op stores a few rows of the former at a time,
and may write the latter over the log-probabilities, if nothing else reads these: one wide value is
live in place of two.

Expects a joint graph. Leaves one that computes the same bits.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.ops.kernels import cross_entropy_backward
from fxckpt.passes.analysis.byte_counts import storage_bytes

aten = torch.ops.aten

LARGE = 16 << 20
"""Bytes of log-probabilities from which it pays: parts of smaller ones take longer to launch than
to compute."""


def join_loss_backward(graph: fx.Graph) -> None:
    """Join each ``nll_loss_backward`` with the ``_log_softmax_backward_data`` that alone reads it.

    The log-probabilities are a large matrix, normalized along its rows.
    """
    target = aten._log_softmax_backward_data.default
    for node in graph.find_nodes(op="call_function", target=target):
        of_scores, scores, dim, dtype = node.args
        if (
            of_scores.target is aten.nll_loss_backward.default
            and list(of_scores.users) == [node]
            and _undetached(of_scores.args[1]) is _undetached(scores)
            and scores.meta["val"].dim() == 2
            and dim in (1, -1)
            and storage_bytes(scores.meta["val"]) >= LARGE
        ):
            node.target, node.args = cross_entropy_backward, (*of_scores.args, dtype)
            graph.erase_node(of_scores)


def _undetached(value: fx.Node) -> fx.Node:
    """Return what a value is a mere alias of, as autograd saves results of ops."""
    while value.target in (aten.detach.default, aten.alias.default):
        (value,) = value.all_input_nodes
    return value
