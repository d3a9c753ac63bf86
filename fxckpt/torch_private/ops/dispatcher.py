"""Properties of the dispatcher's ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._higher_order_ops.effects import _get_effect
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.functional_tensor import CppFunctionalizeAPI


def has_effect(target: Any) -> bool:
    """Return whether an op is registered with side effects, ordered by effect tokens."""
    return isinstance(target, (OpOverload, HigherOrderOperator)) and _get_effect(target) is not None


def overloads_of(op: Any) -> list[OpOverload]:
    """Return the overloads of an op given as an overload, a packet or a custom op's definition.

    Returns an empty list for any other object.
    """
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return [op._opoverload] if isinstance(op, CustomOpDef) else []


def functional_kernel(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel that traces an op whose result aliases an input as it is.

    AOTAutograd refuses such ops of others where it traces a graph that has them already, the
    backward of compiled autograd for one. It is right for ops of which nothing writes the result.
    """

    def kernel(*args: Any) -> Any:
        functionalize = CppFunctionalizeAPI()
        given = functionalize.unwrap_tensors(args)
        with functionalize.redispatch_to_next():
            result = op(*given)
        return functionalize.wrap_tensors(result)

    return kernel


def holds_python(graph: fx.Graph) -> bool:
    """Return whether a graph calls tensor hooks in Python, which only compiled autograd can run.

    Inductor refuses such a graph; torch then leaves the backward to compiled autograd, which
    compiles it together with the hooks.
    """
    wrapper = "torch._dynamo._trace_wrapped_higher_order_op"
    return any(
        getattr(node.target, "__module__", None) == wrapper
        for node in graph.nodes
        if node.op == "call_function"
    )
