"""Joint graphs as JSON: ops by name, sizes as numbers, no values and no code."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.errors import InvalidOption
from fxckpt.torch_private import (
    BINDINGS,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    ShapeEnv,
    bindings_of,
    has_hint,
    size_hint,
)

MODULES = {"_operator": operator, "math": math, "torch": torch}
"""Modules of the Python functions that a graph may call, on sizes; of torch those named sym_*."""
TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format)
KEPT = ("ac_graph_id", "partitioner_tag", "seq_nr")
"""Keys of ``node.meta`` that are written as they are."""
Json = dict[str, Any]


class NotWritable(Exception):
    """A graph that has no such form; the message says what it holds."""


def to_json(graph: fx.Graph) -> list[Json]:
    """Return the nodes of a joint graph as JSON values.

    Symbolic sizes become the numbers that they stood for, also where an op takes them. Raises
    :class:`NotWritable` for a graph that holds a tensor subclass or Python objects.
    """
    return [_node(node) for node in graph.nodes]


def from_json(nodes: list[Json]) -> fx.GraphModule:
    """Return the graph of :func:`to_json`, with fake tensors as values.

    The ops run on fake tensors of the written shapes, so that views share storages again. Raises
    :class:`~fxckpt.errors.InvalidOption` for an op that is not registered here.
    """
    sizes = ShapeEnv()
    # Sizes that depend on data are symbols again, which nobody is to bind but the nodes here.
    with (
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes),
        sizes.ignore_fresh_unbacked_symbols(),
    ):
        return _read(nodes)


def _read(nodes: list[Json]) -> fx.GraphModule:
    """Read a graph, or one inside another, where fake tensors are made."""
    graph, root = fx.Graph(), torch.nn.Module()
    made: dict[str, fx.Node] = {}
    values: dict[fx.Node, Any] = {}
    for item in nodes:
        args, kwargs = _decode(item["args"], made), _decode(item["kwargs"], made)
        target = _function(item["target"]) if item["op"] == "call_function" else item["target"]
        node = graph.create_node(item["op"], target, tuple(args), kwargs, item["name"])
        made[item["name"]] = node
        if item["op"] == "call_function":
            given = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.meta["val"] = target(*given[0], **given[1])
            if bindings := bindings_of(node):
                node.meta[BINDINGS] = bindings
        elif item["op"] != "output":
            values[node] = _decode(item["val"], made)
            if not isinstance(values[node], fx.GraphModule):
                node.meta["val"] = values[node]
        if item["op"] == "get_attr":
            setattr(root, target, values[node])
        node.meta.update({key: item[key] for key in KEPT if key in item})
        if "recompute" in item:
            node.meta["recompute"] = CheckpointPolicy[item["recompute"]]
    return fx.GraphModule(root, graph)


def _node(node: fx.Node) -> Json:
    """Return a node as JSON, with the metadata that planning reads."""
    target = _name(node.target) if node.op == "call_function" else str(node.target)
    args, kwargs = node.args, node.kwargs
    if node.op == "call_function":
        args, kwargs = fx.map_arg((args, kwargs), _number_of)
    found: Json = {
        "op": node.op,
        "name": node.name,
        "target": target,
        "args": _encode(list(args)),
        "kwargs": _encode(dict(kwargs)),
    }
    if node.op in ("placeholder", "get_attr"):
        value = node.meta.get("val")
        if node.op == "get_attr":
            value = getattr(node.graph.owning_module, target, None)
        found["val"] = _encode(value)
    found |= {key: node.meta[key] for key in KEPT if isinstance(node.meta.get(key), (int, str))}
    policy = node.meta.get("recompute")
    return {**found, "recompute": policy.name} if isinstance(policy, CheckpointPolicy) else found


def _number_of(node: fx.Node) -> Any:
    """Return the number that a symbolic size stood for, and any other node as it is."""
    value = node.meta.get("val")
    return size_hint(value) if isinstance(value, torch.SymInt) and has_hint(value) else node


def _name(target: Any) -> str:
    """Return the name of a call's target; raise :class:`NotWritable` if it has none."""
    if isinstance(target, OpOverload):
        return f"ops.{target}"
    if isinstance(target, HigherOrderOperator):
        return f"ops.higher_order.{target.name()}"
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    if module in MODULES and getattr(MODULES[module], name, None) is target:
        if module != "torch" or name.startswith("sym_"):
            return f"{module}.{name}"
    raise NotWritable(f"it calls {target}")


def _function(name: str) -> Any:
    """Return the target of a name; raise :class:`InvalidOption` for one that is unknown here."""
    root, *path = name.split(".")
    found: Any = torch.ops if root == "ops" else MODULES.get(root)
    try:
        for part in path:
            found = getattr(found, part)
    except AttributeError:
        found = None
    if root == "ops":
        is_known = isinstance(found, (OpOverload, HigherOrderOperator))
    else:
        is_known = len(path) == 1 and (root != "torch" or path[0].startswith("sym_"))
    if found is None or not is_known:
        raise InvalidOption(f"the graph calls {name}, which is not registered here: import it.")
    return found


def _encode(value: Any) -> Any:
    """Return an argument or value as JSON; objects have one key, their kind."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        is_whole = isinstance(value, (int, torch.SymInt))
        return size_hint(value) if is_whole else float(value)  # type: ignore[arg-type]
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[key, _encode(item)] for key, item in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_encode(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, TORCH_TYPES):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, fx.GraphModule):
        return {"graph": to_json(value.graph)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return {"op": _name(value)}
    if isinstance(value, torch.Tensor) and not hasattr(type(value), "__tensor_flatten__"):
        return {"tensor": _layout(value)}
    raise NotWritable(f"it holds a {type(value).__name__}")


def _layout(tensor: torch.Tensor) -> Json:
    if tensor.layout is not torch.strided:
        raise NotWritable(f"it holds a tensor of layout {tensor.layout}")
    return {
        "shape": [size_hint(size) for size in tensor.shape],
        "stride": [size_hint(size) for size in tensor.stride()],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "requires_grad": tensor.requires_grad,
    }


def _decode(value: Any, made: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, made) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "node":
        return made[held]
    if kind == "torch":
        return getattr(torch, held)
    if kind == "tensor":
        return torch.empty_strided(
            held["shape"],
            held["stride"],
            dtype=getattr(torch, held["dtype"]),
            device=held["device"],
            requires_grad=held["requires_grad"],
        )
    if kind == "dict":
        return {key: _decode(item, made) for key, item in held}
    if kind == "op":
        return _function(held)
    if kind == "graph":
        return _read(held)
    return {"slice": lambda: slice(*_decode(held, made)), "complex": lambda: complex(*held)}.get(
        kind, lambda: torch.device(held)
    )()
