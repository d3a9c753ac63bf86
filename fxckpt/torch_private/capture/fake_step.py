"""Steps on fake tensors: a model's graphs and the code between them, without memory or data."""

from __future__ import annotations

import contextlib
import copy
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo import OptimizedModule, config
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils import _pytree as pytree

from fxckpt.errors import CaptureError, FxckptError
from fxckpt.torch_private.capture.compiled_modules import (
    ModuleCompiler,
    compiled_parts,
    forget_compilations,
    give_own_code,
    is_container,
    with_own_code,
)
from fxckpt.torch_private.capture.dynamo import (
    DATA,
    _calling_lines,
    _capture_error,
    _logging_methods,
    _placing,
    _to_fakes,
    errors_told_once,
    isolated,
    leaving_no_trace,
)

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
"""A frame of a stack trace in text."""
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""Errors of code that reads what a fake tensor does not have."""


def run_on_fakes(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    watched: contextlib.AbstractContextManager[object],
    place: torch.device | None = None,
) -> None:
    """Run a forward of ``function(*args, **kwargs)`` and its backward on fake tensors.

    ``compiler`` gets each graph that Dynamo makes of the whole, or of the parts that the user
    compiled, if there are any. The step runs inside ``watched``; its outputs get gradients of ones.
    The caller's module is unchanged.

    Raises :class:`CaptureError` if the step does not run on these inputs, or code outside of the
    graphs reads values of tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compiler(gm, inputs)

    ignored = {*config.ignore_logging_functions, *_logging_methods()}
    try:
        with _placing(place), config.patch(ignore_logging_functions=ignored):
            run = _copied_to_fakes(function, mode, backend)
            args, kwargs = _to_fakes(mode, (tuple(args), dict(kwargs)))
            with mode, leaving_no_trace(), errors_told_once(), torch.enable_grad(), watched:
                found = [
                    leaf
                    for leaf in pytree.tree_leaves(run(*args, **kwargs))
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad
                ]
                with _gradients_kept(found):
                    torch.autograd.backward(found, [torch.ones_like(leaf) for leaf in found])
    except NEEDS_DATA as error:
        stack = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(str(Path(__file__).parents[2]))
        ]
        raise _needs_data(error, stack) from error
    except TorchDynamoException as error:
        if isinstance(error, FxckptError):
            raise
        if DATA in str(error):
            raise _needs_data(error, getattr(error, "real_stack", None)) from error
        raise _capture_error(error) from (error if config.verbose else None)
    finally:
        forget_compilations(backend)


@contextlib.contextmanager
def _gradients_kept(outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore on exit the gradients of the caller's parameters, which a function closes over."""
    nodes: list[Any] = [leaf.grad_fn for leaf in outputs]
    seen = set(nodes)
    for node in nodes:  # It grows.
        more = {after for after, _ in getattr(node, "next_functions", ())} - seen
        seen |= more
        nodes += more
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    before = {leaf: leaf.grad for leaf in leaves if not isinstance(leaf, FakeTensor)}
    for leaf in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before.items():
            leaf.grad = gradient


def _copied_to_fakes(
    function: Callable[..., Any],
    mode: FakeTensorMode,
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Return a function compiled like the user's; a module, or a method's, with fake parameters."""

    def compiled(of: Any) -> Any:
        return torch.compile(of, backend=compiler, dynamic=False, **isolated())

    while isinstance(function, OptimizedModule):
        function = function._orig_mod
    module = getattr(function, "__self__", function)
    if not isinstance(module, torch.nn.Module):
        return compiled(function)  # type: ignore[no-any-return]
    parts = compiled_parts(module)
    memo: dict[int, Any] = {}
    with FakeCopyMode(mode):
        # A copy of a compiled module would keep what compiled it.
        for part in parts.values():
            if isinstance(part, OptimizedModule):
                memo[id(part)] = copy.deepcopy(part._orig_mod, memo)  # And under its own id.
        copied = copy.deepcopy(function, memo)
    if not parts or "" in parts:
        whole: Any = getattr(copied, "__self__", copied)
        give_own_code([whole])
        if isinstance(copied, torch.nn.Module) and is_container(copied):
            copied = with_own_code(copied)
        return compiled(copied)  # type: ignore[no-any-return]
    originals = [p._orig_mod if isinstance(p, OptimizedModule) else p for p in parts.values()]
    copies = [memo[id(part)] for part in originals]
    give_own_code(copies)
    modules = ModuleCompiler(compiler, dynamic=False)
    for part in copies:
        modules.compile(part)
    return copied  # type: ignore[no-any-return]


def _needs_data(error: Exception, stack: Any) -> CaptureError:
    """Return the error for code outside of the graphs that reads values of tensors."""
    found = (str(error).strip() or type(error).__name__).splitlines()[0]
    return CaptureError(
        f"code outside of the graphs reads values of tensors, and a plan has none: {found}"
        f"{_calling_lines(stack)}\nRun a step compiled with fxckpt.Backend(budget), and "
        "print(backend.report())."
    )


def first_line(graph: fx.Graph) -> str:
    """Return the line of the compiled function with which a Dynamo graph begins, if known."""
    for node in graph.nodes:
        found = FRAME.search(node.stack_trace or "") if node.op == "call_function" else None
        if found is not None:
            return f"{Path(found[1]).name}:{found[2]}"
    return ""


def differentiable_outputs(gm: fx.GraphModule) -> list[bool]:
    """Return whether each output of a Dynamo graph needs a gradient."""
    (output,) = gm.graph.find_nodes(op="output")
    examples = [
        node.meta.get("example_value") if isinstance(node, fx.Node) else node
        for node in output.args[0]
    ]
    return [isinstance(e, torch.Tensor) and e.requires_grad for e in examples]
