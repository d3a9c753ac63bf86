"""FLOPs, bytes and random numbers of one op."""

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
    """Sizes of a fake value by their hints, so that FLOP formulas see plain ints."""
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    return value


def _shape(value: Any) -> torch.Size:
    return torch.Size(size_hint(n) for n in value.shape)


def _attention_flops(node: fx.Node, *, backward: bool) -> int:
    """FLOPs of CPU flash attention, which torch's registry lacks; same formulas as for the other attention ops there."""
    operands = [arg for arg in node.args[: 4 if backward else 3] if isinstance(arg, fx.Node)]
    shapes = [_shape(arg.meta["val"]) for arg in operands]
    if backward:
        grad, query, key, value = shapes
        return int(sdpa_backward_flop_count(grad, query, key, value))
    return int(sdpa_flop_count(*_repeat_heads(*shapes)))


def _repeat_heads(
    query: torch.Size, key: torch.Size, value: torch.Size
) -> tuple[torch.Size, torch.Size, torch.Size]:
    """Grouped-query attention reads each key head for several query heads."""
    heads = query[1]
    return query, torch.Size((key[0], heads, *key[2:])), torch.Size((value[0], heads, *value[2:]))


def node_flops(node: fx.Node) -> int:
    """Return the FLOPs of one run: torch's own formulas where it has them (a multiply-add counts two), else 0."""
    said = registered(node.target).flops
    if said is not None:
        return _said(node, said)
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is not None:
        return _said(node, partial(formula, out_val=node.meta["val"]))
    name = str(packet)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return _attention_flops(node, backward=False)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention_flops(node, backward=True)
    return 0


def formula_call(node: fx.Node) -> Hashable | None:
    """Return what torch's FLOP formula for a node looks at; None if it has none, or the arguments are not all tensors of known sizes and numbers."""
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


def _said(node: fx.Node, count: Count) -> int:
    """Return a count, or a formula's answer for the arguments of ``node``."""
    if not callable(count):
        return count  # type: ignore[return-value]  # checked by Checked
    args = fx.map_arg(node.args, lambda n: _concrete(n.meta.get("val")))
    kwargs = fx.map_arg(node.kwargs, lambda n: _concrete(n.meta.get("val")))
    answer = count(*args, **kwargs)
    return size_hint(answer) if isinstance(answer, torch.SymInt) else answer  # type: ignore[return-value]  # checked by Checked


def node_bytes(node: fx.Node) -> int:
    """Return the bytes one run reads and writes: each storage once, a broadcast one by what it holds. Views move nothing."""
    said = registered(node.target).bytes
    if said is not None:
        return _said(node, said)
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
    """Return how many random numbers one run makes: one for each element of what it gives."""
    return (
        max((math.prod(_shape(tensor)) for tensor in tensors(node.meta.get("val"))), default=0)
        if draws(node)
        else 0
    )
