"""Packing: a graph module as data that pickles.

A ``GraphModule`` pickles as code, which loses what its nodes know (module, name, source line), may rename them, and fails for exported ones, whose
input checks, hooks and ``train`` are closures. Here every node is kept under its name, with that much of its metadata; the checks are kept as code
(:mod:`fxckpt.rewriting.export_guards`), and do the work of an export's own hooks.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxckpt.passes.meta import NAME
from fxckpt.rewriting.export_guards import Guards, guards_of
from fxckpt.torch_private import (
    GRAPH_FIELDS,
    MODULE_FIELDS,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    PyTreeCodeGen,
)

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
    attributes: Mapping[str, Any]
    """State, hooks, mode, and what else the module was given."""
    children: Mapping[str, Any]
    has_one_mode: bool
    """Whether it refuses to change between training and evaluation, as exported graphs do."""


def pack(module: nn.Module) -> nn.Module | Packed | Guards:
    """Return a graph module as data; any other module as it is."""
    if not isinstance(module, fx.GraphModule):
        return guards_of(module) or module
    held = vars(module)
    return Packed(
        type(module).__name__,
        tuple(
            _Node(n.op, n.name, _target(n), _data(n.args), _data(n.kwargs), _notes(n))
            for n in module.graph.nodes
        ),
        module.graph._codegen if isinstance(module.graph._codegen, PyTreeCodeGen) else None,
        {
            name: _kept(name, value)
            for name, value in held.items()
            if name not in (*GRAPH_FIELDS, *MODES, "_modules")
        },
        {name: child and pack(child) for name, child in module._modules.items()},
        all(name in held for name in MODES),
    )


def unpack(packed: nn.Module | Packed | Guards) -> nn.Module:
    """Return the module that :func:`pack` was given. Raises :class:`CaptureError` for the checks of another version of Python."""
    if isinstance(packed, Guards):
        return packed.load()
    if not isinstance(packed, Packed):
        return packed
    root = nn.Module()
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
    module.__dict__.update(vars(root))
    if packed.has_one_mode:
        module.__dict__.update({name: types.MethodType(_refuse_mode, module) for name in MODES})
    return module


MODES = ("train", "eval")


def _refuse_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    raise NotImplementedError(
        "an exported graph has one mode. Export the model in the mode that you want."
    )


def _kept(name: str, value: Any) -> Any:
    """Return an attribute; of hooks, those that are not an export's own."""
    if name not in MODULE_FIELDS or not isinstance(value, OrderedDict):
        return value
    return OrderedDict(
        (key, hook)
        for key, hook in value.items()
        if not str(getattr(hook, "__module__", "")).startswith("torch.export.")
    )


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
