"""Interpreter of a graph with its module's signature, each node under its own metadata.

A trace of it therefore attributes each op to the module, name and source line that the graph knew.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from fxckpt.torch_private import PyTreeCodeGen, with_code


class Interpreted(nn.Module):
    """A module that interprets a graph; state names are the graph's, prefixed with ``graph.``."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph
        self._signature = inspect.signature(with_code(graph).forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        graph = self.graph.graph
        with fx.traceback.preserve_node_meta():
            if not isinstance(graph._codegen, PyTreeCodeGen):
                return _BoundInterpreter(self.graph, bound.arguments.values()).run(
                    enable_io_processing=False
                )
            flat = _flat_inputs(graph._codegen, bound.arguments)
            return graph.process_outputs(
                fx.Interpreter(self.graph).run(*flat, enable_io_processing=False)
            )


class _BoundInterpreter(fx.Interpreter):
    """Interpreter that gives each placeholder one bound argument, by position.

    ``*args`` and ``**kwargs`` are one argument each, a tuple and a dict.
    """

    def __init__(self, graph: fx.GraphModule, given: Iterable[Any]) -> None:
        super().__init__(graph)
        self.given = iter(given)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return next(self.given)


def _flat_inputs(codegen: PyTreeCodeGen, given: dict[str, Any]) -> list[Any]:
    """Return the leaves of a call of a graph that flattens its own arguments."""
    info = codegen.pytree_info
    values = [given[name] for name in info.orig_args if name != "self"]
    if (
        info.in_spec.type is not tuple
        or info.in_spec.num_children != 2
        or info.in_spec.child(1).type is not dict
    ):
        return pytree.arg_tree_leaves(*values)
    positional = info.in_spec.child(0).num_children
    named = dict(zip(info.in_spec.child(1).context, values[positional:], strict=True))
    return pytree.tree_leaves((values[:positional], named))
