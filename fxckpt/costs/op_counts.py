"""Op counts: FLOPs, bytes and random numbers of one run of an op."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fxckpt.costs.fused_losses import fused_loss_bytes, fused_loss_flops
from fxckpt.ops.properties import draws, tensors
from fxckpt.ops.registry import Count, registered
from fxckpt.torch_private import size_hint, storage_id


def _concrete(value: Any) -> Any:
    """Return the hint of a symbolic int, since FLOP formulas need plain ints."""
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    return value


def _shape(value: Any) -> torch.Size:
    return torch.Size(size_hint(n) for n in value.shape)


_ATTENTION = "aten._scaled_dot_product_"
"""Names of the fused attention kernels begin so; those of backwards end in ``_backward``."""


def _attention_flops(node: fx.Node) -> int:
    """Return the FLOPs of a fused attention kernel, whichever device has it.

    torch's formulas of some kernels are missing, and some versions refuse grouped heads: there each
    key head is read for several query heads.
    """
    is_backward = str(node.target.overloadpacket).endswith("_backward")  # type: ignore[union-attr]
    operands = node.args[: 4 if is_backward else 3]
    shapes = [_shape(arg.meta["val"]) for arg in operands if isinstance(arg, fx.Node)]
    *first, key, value = shapes
    heads = first[-1][1]
    repeated = [torch.Size((each[0], heads, *each[2:])) for each in (key, value)]
    count = sdpa_backward_flop_count if is_backward else sdpa_flop_count
    return int(count(*first, *repeated))


def node_flops(node: fx.Node) -> int:
    """Return the FLOPs of one run; a multiply-add counts two.

    A registered count comes first, then a formula of ours or torch's, then 0. A formula of torch
    that refuses the op's arguments counts 0, with a warning: the op then costs what its bytes do.
    """
    count = registered(node.target).flops
    if count is not None:
        return evaluate_count(node, count)
    packet = getattr(node.target, "overloadpacket", None)
    if str(packet).startswith(_ATTENTION):
        return _attention_flops(node)
    formula = flop_registry.get(packet)
    if formula is None:
        return fused_loss_flops(node) or 0
    try:
        return evaluate_count(node, partial(formula, out_val=node.meta["val"]))
    except Exception as error:
        warnings.warn(
            f"torch's FLOP formula of {node.target} refuses its arguments "
            f"({type(error).__name__}: {error}); the op is priced by its bytes alone. "
            "fxckpt.register_op(..., flops=...) gives it another count.",
            stacklevel=2,
        )
        return 0


def formula_call(node: fx.Node) -> Hashable | None:
    """Return the key of a call of torch's FLOP formula; equal keys have equal FLOPs.

    Return None for a node without such a formula, or with arguments other than numbers, None and
    tensors of fixed sizes.
    """
    if (
        registered(node.target).flops is not None
        or getattr(node.target, "overloadpacket", None) not in flop_registry
    ):
        return None
    seen: list[Hashable] = [node.target]
    for arg in (*node.args, *node.kwargs.values()):
        value = arg.meta.get("val") if isinstance(arg, fx.Node) else arg
        if isinstance(value, torch.Tensor) and all(type(n) is int for n in value.shape):
            seen.append(value.shape)
        elif value is None or isinstance(value, (bool, int, float)):
            seen.append(value)
        else:
            return None
    return (*seen, *node.kwargs)


def evaluate_count(node: fx.Node, count: Count) -> int:
    """Return a count, or a formula's answer for the arguments of ``node``."""
    if not callable(count):
        return count  # type: ignore[return-value]  # checked by Checked
    args = fx.map_arg(node.args, lambda n: _concrete(n.meta.get("val")))
    kwargs = fx.map_arg(node.kwargs, lambda n: _concrete(n.meta.get("val")))
    answer = count(*args, **kwargs)
    if isinstance(answer, torch.SymInt):
        return size_hint(answer)
    return answer  # type: ignore[return-value]  # checked by Checked


_GATHERED_LIKE = {
    "aten.embedding": (0, None),
    "aten.gather": (0, None),
    "aten.index_select": (0, None),
    "aten.index": (0, None),
    "aten.nll_loss_forward": (0, 1),
    "aten.nll_loss_backward": (1, 2),
}
"""Ops that read few elements of an argument: its place, and what has as many, None the result."""
_STORED_BETWEEN = frozenset(("fxckpt.cross_entropy_backward",))
"""Ops that write and read, part by part, as many bytes as their result has."""


def _most_read(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the argument of which an op reads few elements, and how many at most."""
    found = _GATHERED_LIKE.get(str(getattr(node.target, "overloadpacket", None)))
    if found is None:
        return None
    source, like = node.args[found[0]], node if found[1] is None else node.args[found[1]]
    if not (isinstance(source, fx.Node) and isinstance(like, fx.Node)):
        return None
    value = like.meta.get("val")
    return (source, math.prod(_shape(value))) if isinstance(value, torch.Tensor) else None


def node_bytes(node: fx.Node) -> int:
    """Return the bytes one run reads and writes.

    A storage counts once, by its largest tensor but at most its own size, so that a broadcast
    tensor counts by the bytes it holds. Views share the storage of their input. Of what an op
    gathers from, as many elements count as it gathers; what it stores between counts twice.
    """
    registered_bytes = registered(node.target).bytes
    if registered_bytes is not None:
        return evaluate_count(node, registered_bytes)
    storages: dict[int, int] = {}
    few = _most_read(node)
    for each in [node, *node.all_input_nodes]:
        for tensor in tensors(each.meta.get("val")):
            held, key = size_hint(tensor.untyped_storage().nbytes()), storage_id(tensor)
            count = tensor.numel()
            read = (
                count if type(count) is int else math.prod(_shape(tensor))
            ) * tensor.element_size()
            if few is not None and each is few[0]:
                read = min(read, few[1] * tensor.element_size())
            storages[key] = max(storages.get(key, 0), min(held, read))
    total = sum(storages.values()) + fused_loss_bytes(node)
    if str(getattr(node.target, "overloadpacket", None)) in _STORED_BETWEEN:
        total += 2 * sum(storages[storage_id(t)] for t in tensors(node.meta.get("val")))
    return total


def node_draws(node: fx.Node) -> int:
    """Return the random numbers one run draws: one per element of its largest result."""
    return (
        max((math.prod(_shape(tensor)) for tensor in tensors(node.meta.get("val"))), default=0)
        if draws(node)
        else 0
    )
