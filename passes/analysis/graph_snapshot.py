"""Graph snapshot: the joint graph a plan was made for, as plain data: its program, and what its nodes are called.

A plan carries its step along, so that reports, pictures and pages can be made long after the graph is gone: who needs a value, what running
it again would take, what the memory holds at any moment. It has names, never ``fx.Node``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.joint import Facts
from fxckpt.plans.snapshot import GraphSnapshot, NodeKind, NodeLabel
from fxckpt.torch_private import is_symbolic, size_hint, storage_id

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

_EXPRESSION = re.compile(r"[LG]\[|L__|G\.|self\b|__|getattr\(")
"""How a path begins that Dynamo wrote, as the Python that gets at the module; other traces write what ``named_modules()`` does."""

_KEY = re.compile(r"""\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+)\]""")


def snapshot_of(graph: fx.Graph, facts: Facts) -> GraphSnapshot:
    """Return the step that ``facts`` were read from. Leaves the graph alone."""
    module_of, line_of, type_of = (
        _Remembered(_clean_path),
        _Remembered(_last_frame),
        _Remembered(_type_name),
    )
    index = {storage.name: s for s, storage in enumerate(facts.program.storages)}
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
        held: tuple[int, ...]
        if node.op != "call_function":
            kind, held = NodeKind.SIZE if is_symbolic(node) else NodeKind.INPUT, ()
        elif node.name in writes:
            kind, held = NodeKind.OP, writes[node.name]
        elif node.target is operator.getitem and node.name in index:
            kind, held = NodeKind.PART, (index[node.name],)
        else:
            kind, held = (
                (NodeKind.SIZE if first is None else NodeKind.VIEW),
                _shown(node, [labels[i] for i in inputs]),
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
                storages=held,
                is_backward=node in facts.tangent_closure,
                is_in_region=isinstance(meta.get("recompute"), CheckpointPolicy),
            )
        )
    return GraphSnapshot(facts.program, tuple(labels))


def _shown(node: fx.Node, inputs: list[NodeLabel]) -> tuple[int, ...]:
    """Return the storages that a view shows: its inputs', where there is a doubt by what torch says."""
    if len(inputs) == 1:
        return inputs[0].storages
    found = tuple(dict.fromkeys(s for label in inputs for s in label.storages))
    shown = {storage_id(t) for t in tensors(node.meta.get("val"))}
    if len(found) < 2 or not shown:
        return found
    same = [
        arg
        for arg in node.all_input_nodes
        if any(storage_id(t) in shown for t in tensors(arg.meta.get("val")))
    ]
    chosen = {arg.name for arg in same}
    return tuple(
        dict.fromkeys(s for label in inputs if label.name in chosen for s in label.storages)
    )


class _Remembered(dict[Any, str]):
    """Answers once per distinct question: thousands of nodes share a few hundred modules and lines."""

    def __init__(self, answer: Callable[[Any], str]) -> None:
        super().__init__()
        self.answer = answer

    def __missing__(self, question: Any) -> str:
        found = self[question] = self.answer(question)
        return found

    __call__ = dict.__getitem__


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    shape = tensor.shape
    return tuple([n if type(n) is int else size_hint(n) for n in shape])


def op_name(node: fx.Node) -> str:
    """Return the op's name without its namespace (``mm``, ``bernoulli.p``); a tuple's item is named after its op."""
    while node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        node = parent
    name = str(node.target).removeprefix("aten.")
    return name.removesuffix(".default")


def module_path(node: fx.Node) -> str:
    """Return the path of the module that made a node, as ``named_modules()`` spells it; empty for the model itself."""
    return _clean_path(_raw_path(node))


def _raw_path(node: fx.Node) -> str:
    stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _clean_path(path: str) -> str:
    path = path.replace("._orig_mod", "")
    if not _EXPRESSION.match(path):
        return path
    path = re.sub(r"getattr\((.+), '([^']+)'\)", r"\1.\2", path)
    path = re.sub(
        r"^G\.fxckpt_rewritten_step\w*\.source", "", path
    )  # a rewritten module that Dynamo goes through
    path = path.replace("._modules", "")
    path = re.sub(r"^L\[['\"][^\]]+['\"]\](\.__self__)?|^L__[a-z]+___|^self\b|^__", "", path)
    # A key may have brackets and quotes of its own; of some, Dynamo has taken the quotes off and left the backslashes doubled.
    path = _KEY.sub(lambda key: "." + str(ast.literal_eval(key[1])), path)
    return path.replace("\\\\", "\\").strip(".")


def source_line(node: fx.Node) -> str:
    """Return ``file.py:12`` of the user's code that made a node; empty if the trace did not record it."""
    return _last_frame(node.meta.get("stack_trace") or "")


def _last_frame(trace: str) -> str:
    start = trace.rfind('File "')
    match = _FRAME.match(trace, start) if start >= 0 else None
    return f"{match[1].rsplit('/', 1)[-1]}:{match[2]}" if match else ""
