"""Packing: a graph module as data that pickles.

A ``GraphModule`` pickles as code, which loses what its nodes know (module, name, source line), may rename them, and fails for exported ones, whose
input checks are closures. Here every node is kept under its name, with that much of its metadata; an export's input checks are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxckpt.passes.normalize import NAME
from fxckpt.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket, PyTreeCodeGen

STATE = ("_parameters", "_buffers", "_non_persistent_buffers_set")
NOTES = ("stack_trace", "recompute", "ac_graph_id", NAME)
"""Metadata that is kept as it is; of ``nn_module_stack`` the paths are."""


@dataclass(frozen=True)
class _Ref:
    """A node as an argument."""

    name: str


@dataclass(frozen=True)
class _Op:
    """An op as a target or an argument: its path under ``torch.ops``."""

    path: tuple[str, ...]


@dataclass(frozen=True)
class _Node:
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    notes: Mapping[str, Any]


@dataclass(frozen=True)
class Packed:
    """A graph module as data."""

    name: str
    nodes: tuple[_Node, ...]
    codegen: Any
    state: Mapping[str, Any]
    children: Mapping[str, Any]
    attributes: Mapping[str, Any]
    is_training: bool


def pack(module: nn.Module) -> nn.Module | Packed:
    """Return a graph module as data; any other module as it is."""
    if not isinstance(module, fx.GraphModule):
        return module
    nodes = [node for node in module.graph.nodes if not _is_input_check(node)]
    read = {str(node.target).split(".")[0] for node in nodes if node.op == "get_attr"}
    return Packed(
        type(module).__name__,
        tuple(_Node(n.op, n.name, _target(n), _data(n.args), _data(n.kwargs), _notes(n)) for n in nodes),
        module.graph._codegen if isinstance(module.graph._codegen, PyTreeCodeGen) else None,
        {key: module.__dict__[key] for key in STATE},
        {name: child and pack(child) for name, child in module._modules.items() if name != INPUT_CHECK},
        {name: value for name, value in vars(module).items() if name in read},
        module.training,
    )


def unpack(packed: nn.Module | Packed) -> nn.Module:
    """Return the module that :func:`pack` was given."""
    if not isinstance(packed, Packed):
        return packed
    root = nn.Module()
    root.__dict__.update(packed.state)
    root.__dict__.update(packed.attributes)
    for name, child in packed.children.items():
        root.add_module(name, child and unpack(child))
    graph = fx.Graph()
    if packed.codegen is not None:
        graph.set_codegen(packed.codegen)
    made: dict[str, fx.Node] = {}
    for node in packed.nodes:
        args, kwargs = _live(node.args, made), _live(node.kwargs, made)
        new = graph.create_node(node.op, _live(node.target, made), args, kwargs, name=node.name)
        assert new.name == node.name, (new.name, node.name)
        new.meta.update(node.notes)
        made[node.name] = new
    module = fx.GraphModule(root, graph, packed.name)
    for key in (*STATE, "_modules"):
        module.__dict__[key] = root.__dict__[key]
    module.__dict__["training"] = packed.is_training
    return module


INPUT_CHECK = "_guards_fn"


def _is_input_check(node: fx.Node) -> bool:
    return node.op == "call_module" and node.target == INPUT_CHECK and not node.users


def _target(node: fx.Node) -> Any:
    return _op(node.target) if node.op == "call_function" else node.target


def _op(value: Any) -> Any:
    if isinstance(value, OpOverload):
        return _Op((value.namespace, value._opname, value._overloadname))
    if isinstance(value, OpOverloadPacket):
        return _Op(tuple(value._qualified_op_name.split("::")))
    return _Op(("higher_order", value.name())) if isinstance(value, HigherOrderOperator) else value


def _data(argument: Any) -> Any:
    def leaf(value: Any) -> Any:
        return _Ref(value.name) if isinstance(value, fx.Node) else _op(value)

    return fx.node.map_aggregate(argument, leaf)


def _live(argument: Any, made: Mapping[str, fx.Node]) -> Any:
    def leaf(value: Any) -> Any:
        if isinstance(value, _Ref):
            return made[value.name]
        if not isinstance(value, _Op):
            return value
        found: Any = torch.ops
        for part in value.path:
            found = getattr(found, part)
        return found

    return fx.node.map_aggregate(argument, leaf)


def _notes(node: fx.Node) -> dict[str, Any]:
    notes = {key: node.meta[key] for key in NOTES if key in node.meta}
    if stack := node.meta.get("nn_module_stack"):
        notes["nn_module_stack"] = {key: (str(entry[0]), "") for key, entry in stack.items()}
    return notes
