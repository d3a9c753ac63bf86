"""Op counts: FLOPs, bytes and random numbers of one run of an op."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

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


def _attention_flops(node: fx.Node, *, backward: bool) -> int:
    """Return the FLOPs of CPU flash attention, which torch's registry lacks.

    The formulas are those of the other attention ops in the registry.
    """
    operands = [arg for arg in node.args[: 4 if backward else 3] if isinstance(arg, fx.Node)]
    shapes = [_shape(arg.meta["val"]) for arg in operands]
    if backward:
        grad, query, key, value = shapes
        return int(sdpa_backward_flop_count(grad, query, key, value))
    return int(sdpa_flop_count(*_repeat_heads(*shapes)))


def _repeat_heads(
    query: torch.Size, key: torch.Size, value: torch.Size
) -> tuple[torch.Size, torch.Size, torch.Size]:
    """Return the shapes with the key and value heads repeated to the number of query heads.

    Grouped-query attention reads each key head for several query heads.
    """
    heads = query[1]
    return query, torch.Size((key[0], heads, *key[2:])), torch.Size((value[0], heads, *value[2:]))


def node_flops(node: fx.Node) -> int:
    """Return the FLOPs of one run; a multiply-add counts two.

    A registered count comes first, then torch's formula, then 0.
    """
    count = registered(node.target).flops
    if count is not None:
        return _evaluate_count(node, count)
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is not None:
        return _evaluate_count(node, partial(formula, out_val=node.meta["val"]))
    name = str(packet)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return _attention_flops(node, backward=False)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention_flops(node, backward=True)
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


def _evaluate_count(node: fx.Node, count: Count) -> int:
    """Return a count, or a formula's answer for the arguments of ``node``."""
    if not callable(count):
        return count  # type: ignore[return-value]  # checked by Checked
    args = fx.map_arg(node.args, lambda n: _concrete(n.meta.get("val")))
    kwargs = fx.map_arg(node.kwargs, lambda n: _concrete(n.meta.get("val")))
    answer = count(*args, **kwargs)
    if isinstance(answer, torch.SymInt):
        return size_hint(answer)
    return answer  # type: ignore[return-value]  # checked by Checked


def node_bytes(node: fx.Node) -> int:
    """Return the bytes one run reads and writes.

    A storage counts once, by its largest tensor but at most its own size, so that a broadcast
    tensor counts by the bytes it holds. Views share the storage of their input.
    """
    registered_bytes = registered(node.target).bytes
    if registered_bytes is not None:
        return _evaluate_count(node, registered_bytes)
    storages: dict[int, int] = {}
    for value in [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]:
        for tensor in tensors(value):
            held, key = size_hint(tensor.untyped_storage().nbytes()), storage_id(tensor)
            count = tensor.numel()
            read = (
                count if type(count) is int else math.prod(_shape(tensor))
            ) * tensor.element_size()
            storages[key] = max(storages.get(key, 0), min(held, read))
    return sum(storages.values())


def node_draws(node: fx.Node) -> int:
    """Return the random numbers one run draws: one per element of its largest result."""
    return (
        max((math.prod(_shape(tensor)) for tensor in tensors(node.meta.get("val"))), default=0)
        if draws(node)
        else 0
    )
