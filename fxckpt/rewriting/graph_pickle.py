"""Pickling of graph modules, as plain data.

A ``GraphModule`` pickles as code, which loses its nodes' metadata (module, name, source line), may
rename nodes, and fails for exported graphs, whose input checks, hooks and ``train`` are closures.
Here each node keeps its name and that metadata; the checks are kept as bytecode
(:mod:`fxckpt.rewriting.export_guards`), and replace an export's own hooks.
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

META_KEYS = ("stack_trace", "recompute", "ac_graph_id", NAME)
"""Metadata kept unchanged; of ``nn_module_stack`` only the paths are kept."""


@dataclass(frozen=True)
class _NodeRef:
    """A reference to a node, as an argument."""

    name: str
    """The node's name."""


@dataclass(frozen=True)
class _OpRef:
    """A reference to an op, as a target or an argument."""

    path: tuple[str, ...]
    """The op's path under ``torch.ops``."""


@dataclass(frozen=True)
class _NodeData:
    """A node as data."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Packed:
    """A graph module as data."""

    name: str
    nodes: tuple[_NodeData, ...]
    codegen: Any
    attributes: Mapping[str, Any]
    """Parameters, buffers, hooks, mode and any other attributes."""
    children: Mapping[str, Any]
    """Submodules by name; graph modules as data."""
    has_one_mode: bool
    """Whether ``train`` and ``eval`` raise, as those of exported graphs do."""


def pack_module(module: nn.Module) -> nn.Module | Packed | Guards:
    """Return a graph module or an export's guards as data, and any other module unchanged."""
    if not isinstance(module, fx.GraphModule):
        return guards_of(module) or module
    held = vars(module)
    return Packed(
        type(module).__name__,
        tuple(
            _NodeData(
                n.op, n.name, _encode_target(n), _encode(n.args), _encode(n.kwargs), _metadata(n)
            )
            for n in module.graph.nodes
        ),
        module.graph._codegen if isinstance(module.graph._codegen, PyTreeCodeGen) else None,
        {
            name: _without_export_hooks(name, value)
            for name, value in held.items()
            if name not in (*GRAPH_FIELDS, *MODES, "_modules")
        },
        {name: child and pack_module(child) for name, child in module._modules.items()},
        all(name in held for name in MODES),
    )


def unpack_module(packed: nn.Module | Packed | Guards) -> nn.Module:
    """Return the module from :func:`pack_module`'s data.

    Raises :class:`CaptureError` for input checks made by another version of Python.
    """
    if isinstance(packed, Guards):
        return packed.load()
    if not isinstance(packed, Packed):
        return packed
    root = nn.Module()
    root.__dict__.update(packed.attributes)
    for name, child in packed.children.items():
        root.add_module(name, child and unpack_module(child))
    graph = fx.Graph()
    if packed.codegen is not None:
        graph.set_codegen(packed.codegen)
    made: dict[str, fx.Node] = {}
    for node in packed.nodes:
        args, kwargs = _decode(node.args, made), _decode(node.kwargs, made)
        new = graph.create_node(node.op, _decode(node.target, made), args, kwargs, name=node.name)
        assert new.name == node.name, (new.name, node.name)
        new.meta.update(node.metadata)
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


def _without_export_hooks(name: str, value: Any) -> Any:
    """Return an attribute, without the hooks that ``torch.export`` registered."""
    if name not in MODULE_FIELDS or not isinstance(value, OrderedDict):
        return value
    return OrderedDict(
        (key, hook)
        for key, hook in value.items()
        if not str(getattr(hook, "__module__", "")).startswith("torch.export.")
    )


def _encode_target(node: fx.Node) -> Any:
    return _encode_op(node.target) if node.op == "call_function" else node.target


def _encode_op(value: Any) -> Any:
    if isinstance(value, OpOverload):
        return _OpRef((value.namespace, value._opname, value._overloadname))
    if isinstance(value, OpOverloadPacket):
        return _OpRef(tuple(value._qualified_op_name.split("::")))
    return (
        _OpRef(("higher_order", value.name())) if isinstance(value, HigherOrderOperator) else value
    )


def _encode(argument: Any) -> Any:
    def leaf(value: Any) -> Any:
        return _NodeRef(value.name) if isinstance(value, fx.Node) else _encode_op(value)

    return fx.node.map_aggregate(argument, leaf)


def _decode(argument: Any, made: Mapping[str, fx.Node]) -> Any:
    def leaf(value: Any) -> Any:
        if isinstance(value, _NodeRef):
            return made[value.name]
        if not isinstance(value, _OpRef):
            return value
        found: Any = torch.ops
        for part in value.path:
            found = getattr(found, part)
        return found

    return fx.node.map_aggregate(argument, leaf)


def _metadata(node: fx.Node) -> dict[str, Any]:
    metadata = {key: node.meta[key] for key in META_KEYS if key in node.meta}
    if stack := node.meta.get("nn_module_stack"):
        metadata["nn_module_stack"] = {key: (str(entry[0]), "") for key, entry in stack.items()}
    return metadata
