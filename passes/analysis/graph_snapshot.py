"""Graph snapshot: the joint graph of a plan as plain data, its program and the labels of its nodes.

A plan carries the snapshot along, so that reports and plots work long after the graph is gone: who
reads a value, its recompute cost, the contents of memory at any moment. It has names, never
``fx.Node``.

Expects the graph that the facts were read from. Leaves the graph alone.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.meta import DEVICE, MODEL
from fxckpt.plans.snapshot import GraphSnapshot, NodeKind, NodeLabel
from fxckpt.torch_private import is_symbolic, is_traced_in_backward, size_hint, storage_id

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

_EXPRESSION = re.compile(r"[LG]\[|L__|G\.|self\b|__|getattr\(")
"""Beginning of a module path that Dynamo wrote as a Python expression.

Other traces write paths as ``named_modules()`` does.
"""

_KEY = re.compile(r"""\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+)\]""")
"""Subscript in such an expression."""


def snapshot_of(graph: fx.Graph, facts: Facts) -> GraphSnapshot:
    """Return the snapshot of the graph that ``facts`` were read from."""
    module_of, line_of, type_of = _Memo(_clean_path), _Memo(_last_frame), _Memo(_type_name)
    storage_index = {storage.name: s for s, storage in enumerate(facts.program.storages)}
    writes = {op.name: op.writes for op in (*facts.program.ops, *facts.program.backward)}
    op_of: dict[Any, str] = {}
    position: dict[fx.Node, int] = {}
    labels: list[NodeLabel] = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        meta = node.meta
        inputs = tuple([position[arg] for arg in node.all_input_nodes])
        value = meta.get("val")
        first = value if isinstance(value, torch.Tensor) else next(tensors(value), None)
        kind, storages = _kind_and_storages(
            node, first, [labels[i] for i in inputs], writes, storage_index
        )
        if node.target not in op_of or node.target is operator.getitem:
            op_of[node.target] = "" if kind is NodeKind.INPUT else op_name(node)
        position[node] = len(labels)
        labels.append(
            NodeLabel(
                name=node.name,
                kind=kind,
                op=op_of[node.target],
                module=module_of(_raw_path(node)),
                source=line_of(meta.get("stack_trace") or ""),
                shape=_sizes(first) if first is not None else (),
                dtype=type_of(first.dtype) if first is not None else "",
                inputs=inputs,
                storages=storages,
                is_backward=node in facts.tangent_closure,
                is_traced_in_backward=is_traced_in_backward(node),
                is_in_region=isinstance(meta.get("recompute"), CheckpointPolicy),
            )
        )
    noted = graph.owning_module.meta if graph.owning_module is not None else {}
    return GraphSnapshot(
        facts.program,
        tuple(labels),
        model=noted.get(MODEL, ""),
        device=noted.get(DEVICE) or _device_of(graph),
    )


def _kind_and_storages(
    node: fx.Node,
    tensor: torch.Tensor | None,
    inputs: list[NodeLabel],
    writes: Mapping[str, tuple[int, ...]],
    storage_index: Mapping[str, int],
) -> tuple[NodeKind, tuple[int, ...]]:
    """Return the kind of a node, and the storages that it fills or aliases.

    ``tensor`` is its first tensor; ``writes`` are the storages that each op fills.
    """
    if node.op != "call_function":
        return NodeKind.SIZE if is_symbolic(node) else NodeKind.INPUT, ()
    if node.name in writes:
        return NodeKind.OP, writes[node.name]
    if node.target is operator.getitem and node.name in storage_index:
        return NodeKind.PART, (storage_index[node.name],)
    return NodeKind.SIZE if tensor is None else NodeKind.VIEW, _aliased(node, inputs)


def _device_of(graph: fx.Graph) -> str:
    """Return the device of the graph's values: the accelerator, where some are on the CPU."""
    found = {value.device for node in graph.nodes for value in tensors(node.meta.get("val"))}
    return min((str(device) for device in found if device.type != "cpu"), default="cpu")


def _aliased(node: fx.Node, inputs: list[NodeLabel]) -> tuple[int, ...]:
    """Return the storages that a view aliases: with several inputs, only those torch reports."""
    if len(inputs) == 1:
        return inputs[0].storages
    found = tuple(dict.fromkeys(s for label in inputs for s in label.storages))
    reported = {storage_id(t) for t in tensors(node.meta.get("val"))}
    if len(found) < 2 or not reported:
        return found
    same = [
        arg
        for arg in node.all_input_nodes
        if any(storage_id(t) in reported for t in tensors(arg.meta.get("val")))
    ]
    chosen = {arg.name for arg in same}
    return tuple(
        dict.fromkeys(s for label in inputs if label.name in chosen for s in label.storages)
    )


class _Memo(dict[Any, str]):
    """Memo of a function: thousands of nodes share a few hundred modules and lines."""

    def __init__(self, function: Callable[[Any], str]) -> None:
        super().__init__()
        self.function = function

    def __missing__(self, argument: Any) -> str:
        found = self[argument] = self.function(argument)
        return found

    __call__ = dict.__getitem__


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    shape = tensor.shape
    return tuple([n if type(n) is int else size_hint(n) for n in shape])


def op_name(node: fx.Node) -> str:
    """Return the name of an op without its namespace (``mm``, ``bernoulli.p``).

    An item of a tuple is named after the op that returned the tuple.
    """
    while node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        node = parent
    name = str(node.target).removeprefix("aten.")
    return name.removesuffix(".default")


def module_path(node: fx.Node) -> str:
    """Return the path of a node's module as ``named_modules()`` spells it; empty for the model."""
    return _clean_path(_raw_path(node))


def _raw_path(node: fx.Node) -> str:
    stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _clean_path(path: str) -> str:
    path = path.replace("._orig_mod", "")
    if not _EXPRESSION.match(path):
        return path
    path = re.sub(r"getattr\((.+), '([^']+)'\)", r"\1.\2", path)
    # Dynamo traces through the step of a rewritten module.
    path = re.sub(r"^G\.fxckpt_rewritten_step\w*\.source", "", path)
    path = path.replace("._modules", "")
    path = re.sub(r"^L\[['\"][^\]]+['\"]\](\.__self__)?|^L__[a-z]+___|^self\b|^__", "", path)
    # Keys may contain brackets and quotes; from some, Dynamo strips the quotes but leaves doubled
    # backslashes.
    path = _KEY.sub(lambda key: "." + str(ast.literal_eval(key[1])), path)
    return path.replace("\\\\", "\\").strip(".")


def source_line(node: fx.Node) -> str:
    """Return the user's line that called an op, ``file.py:12``; empty if none was recorded."""
    return _last_frame(node.meta.get("stack_trace") or "")


def _last_frame(trace: str) -> str:
    start = trace.rfind('File "')
    match = _FRAME.match(trace, start) if start >= 0 else None
    return f"{match[1].rsplit('/', 1)[-1]}:{match[2]}" if match else ""
