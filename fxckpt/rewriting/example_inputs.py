"""Example inputs: arguments read from the metadata of a graph's placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils import _pytree as pytree

from fxckpt.torch_private import PyTreeCodeGen, size_hint

UNKNOWN = object()
"""Stands for an input whose metadata is incomplete."""


def inputs_of(source: nn.Module) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """Return (args, kwargs) to plan a graph for, or None if its metadata is incomplete.

    Tensors are new and uninitialized. They are described by ``meta["val"]``,
    ``meta["example_value"]`` or ``meta["tensor_meta"]``. Symbolic sizes take their value in the
    trace, or their upper bound.
    """
    if not isinstance(source, fx.GraphModule):
        return None
    values = [_value(node) for node in source.graph.find_nodes(op="placeholder")]
    if not values or any(value is UNKNOWN for value in values):
        return None
    codegen = source.graph._codegen
    if not isinstance(codegen, PyTreeCodeGen):
        return values, {}
    if codegen.pytree_info.in_spec.num_leaves != len(values):
        return None
    given = pytree.tree_unflatten(values, codegen.pytree_info.in_spec)
    is_call = (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[1], dict)
        and isinstance(given[0], (tuple, list))
    )
    return (tuple(given[0]), given[1]) if is_call else (given, {})


def _value(node: fx.Node) -> Any:
    for key in ("val", "example_value", "tensor_meta"):
        if key in node.meta:
            return _real(node.meta[key])
    return UNKNOWN


def real_like(value: Tensor) -> Tensor:
    """Return an uninitialized tensor of the geometry of a fake one."""
    shape, stride = [size_hint(n) for n in value.shape], [size_hint(n) for n in value.stride()]
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return (
        made.requires_grad_(value.requires_grad)
        if made.is_floating_point() or made.is_complex()
        else made
    )


def _real(value: Any) -> Any:
    if isinstance(value, Tensor):
        try:
            return real_like(value)
        except (RuntimeError, AssertionError):
            return UNKNOWN  # the graph was made for an absent device
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, (int, float, bool, str, type(None))):
        return value
    if not isinstance(value, TensorMetadata):
        return UNKNOWN
    # The metadata of shape propagation omits the device.
    made = torch.empty(value.shape, dtype=value.dtype)
    return made.requires_grad_(value.requires_grad) if made.is_floating_point() else made
