"""Capture by Dynamo, and what its errors say."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.utils.checkpoint
from torch import fx
from torch._dynamo.exc import ShortenTraceback, TorchRuntimeError, Unsupported
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from fxckpt.errors import CaptureError, FxckptError
from fxckpt.torch_private.sizes import _forgetting_sizes


def is_recording() -> bool:
    """Return whether a dispatch mode is active: a trace of ATen ops, a tape, a counter."""
    return torch._C._len_torch_dispatch_stack() > 0


def not_compiled(function: Callable[..., Any]) -> None:
    """Keep Dynamo out of a function and of all it calls, at no cost for a call."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(
        function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    )


def is_traced() -> bool:
    """Return whether ops are traced into a graph, by ``make_fx`` or AOTAutograd."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_jit_traced() -> bool:
    """Return whether ``torch.jit.trace`` records ops."""
    return torch._C._get_tracing_state() is not None


def tracing_lock() -> threading.RLock:
    """Return the lock under which Dynamo compiles: torch traces one graph at a time."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


@contextlib.contextmanager
def modules_of(function: Callable[..., Any]) -> Iterator[Callable[[], str]]:
    """Yield what tells the path of the module that is running, from the module that ``function`` is, is a method of, or closes over."""
    root = _module_behind(function)
    names = {} if root is None else {module: name for name, module in root.named_modules()}
    stack: list[str] = []
    here = threading.get_ident()

    # The hooks are for all threads.
    def enter(module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == here:
            stack.append(names.get(module, stack[-1] if stack else ""))

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == here:
            stack.pop()

    hooks = torch.nn.modules.module
    entering = hooks.register_module_forward_pre_hook(enter)
    leaving = hooks.register_module_forward_hook(leave, always_call=True)
    try:
        yield lambda: stack[-1] if stack else ""
    finally:
        entering.remove()
        leaving.remove()


def _module_behind(function: Any) -> torch.nn.Module | None:
    while isinstance(function, partial):
        function = function.func
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    candidates = [function, getattr(function, "__self__", None), *cells]
    return next((c for c in candidates if isinstance(c, torch.nn.Module)), None)


def calling_line() -> str:
    """Return the line of the user's code that runs, ``"file.py:12"``: the innermost that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def inline_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a Dynamo graph without ``nested_compile_region`` calls: a plan spans all of them.

    AOTAutograd would partition each region on its own, without a view of the whole. Before torch 2.13 there is nothing to inline them with.
    """
    try:
        from torch._higher_order_ops.passes.inline_invoke_subgraph import inline_invoke_subgraph
    except ModuleNotFoundError:
        return gm
    return inline_invoke_subgraph(gm)


def is_cut_short(gm: fx.GraphModule) -> bool:
    """Return whether a Dynamo graph ends at a graph break: more of the model is in other graphs."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def break_after(gm: fx.GraphModule) -> tuple[str, str]:
    """Return why a Dynamo graph that :func:`is_cut_short` ends where it does, and the line of the user's code."""
    reason: Any = gm.compile_subgraph_reason
    frame = reason.user_stack[-1] if reason.user_stack else None
    lines = [line.strip() for line in str(reason.reason).splitlines() if line.strip()]
    return (
        lines[0] if lines else "graph break"
    ), "" if frame is None else f"{Path(frame.filename).name}:{frame.lineno}"


def make_boxed(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an inner compiler so that what it returns takes its arguments in a list (AOTAutograd's fast convention)."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def compile_half(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = compiler(gm, example_inputs)
        if not callable(compiled):
            raise TypeError(
                f"the inner compiler returned {type(compiled).__name__}, which is not callable"
            )
        already = getattr(compiled, "_boxed_call", False)
        return compiled if already else make_boxed_func(compiled)  # type: ignore[no-any-return]

    return compile_half


def through_dynamo(error: Exception) -> Exception:
    """Return an error of the same class that Dynamo lets through as it is, instead of wrapping or swallowing it."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    if isinstance(error, ShortenTraceback):
        return error
    said = str(error)
    # Dynamo appends to the message how its own internals are debugged.
    own = {
        "__init__": Exception.__init__,
        "__str__": lambda self: said,
        "__module__": kind.__module__,
    }
    wrapped: Exception = type(kind.__name__, (kind, ShortenTraceback), own)(said)
    wrapped.__dict__.update(error.__dict__)
    wrapped.first_useful_frame = None  # type: ignore[attr-defined]
    return wrapped


def compile_whole(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function as one graph, anew for every shape, apart from whatever else compiles it."""
    import inspect

    # Since torch 2.13; before, all that compile one function share one limit.
    newer = {"recompile_limit": 64, "isolate_recompiles": True}
    known = inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {name: value for name, value in newer.items() if name in known}
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            # Dynamo takes it that hooks do not change, unless told otherwise where it writes its guards.
            with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
                return compiled(*args, **kwargs)
        except Unsupported as error:
            raise no_whole_graph(error) from error

    return run


def no_whole_graph(error: Unsupported) -> CaptureError:
    """Return the error for a model that Dynamo cannot capture as one graph."""
    return CaptureError(
        f"the model does not capture as one graph: {_without_advice(error)}\n"
        "Remove the graph break, or compile with fxckpt.Backend and read backend.plans: one plan a graph."
    )


def _innermost(error: TorchRuntimeError) -> str:
    """Return what an op of the model raised on fake tensors, and the line that called it: the user's own if there is one."""
    cause: BaseException = error
    while (behind := cause.__cause__ or cause.__context__) is not None:
        cause = behind
    stack = list(error.real_stack or ())
    own = [
        frame for frame in stack if not frame.filename.startswith(str(Path(torch.__file__).parent))
    ]
    at = (own or stack)[-1:]
    return f"{type(cause).__name__}: {cause}" + "".join(
        f"\n  at {frame.filename}:{frame.lineno}: {frame.line}" for frame in at
    )


def _without_advice(error: Exception) -> str:
    """Return what Dynamo says of an error, without how its own internals are debugged."""
    return str(error).partition("\nSet TORCHDYNAMO_VERBOSE=1")[0].rstrip()


class _CaptureDone(ShortenTraceback):
    """Leaves the compile once the graph was received."""


def leave_capture() -> NoReturn:
    """Abandon the compile that :func:`capture_whole` began, with success."""
    raise _CaptureDone(first_useful_frame=None)


@contextlib.contextmanager
def errors_told_once() -> Iterator[None]:
    """Keep torch from logging, with its traceback, that an op failed on fake tensors: the error itself is raised, and says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


class _PlacedFakeTensorMode(FakeTensorMode):
    """Gives tensors of the meta device a device that a step could run on."""

    def from_tensor(self, tensor: torch.Tensor, **kwargs: Any) -> FakeTensor:
        fake = super().from_tensor(tensor, **kwargs)
        if fake.fake_device.type == "meta":
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            fake.fake_device = (
                torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
            )
        return fake


def capture_whole(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    receive: Callable[[fx.GraphModule, list[Any]], Any],
) -> None:
    """Capture ``function(*args, **kwargs)`` as one Dynamo graph on fake tensors and give it to ``receive``; nothing is executed.

    Parameters of a module, or of a method's module, are copied as fake tensors first: no memory, and the caller's is left alone. What is on
    the meta device counts as on the accelerator, or the CPU where there is none: torch 2.13 traces some ops (``nll_loss``) without their gradient
    on meta. The compile is abandoned after ``receive`` returns, so Dynamo keeps no cache entry of it. Raises :class:`CaptureError` if Dynamo
    cannot capture one graph.
    """
    import copy

    from torch._dynamo.exc import TorchDynamoException
    from torch._subclasses.fake_tensor import FakeCopyMode

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        receive(inline_regions(gm), inputs)
        leave_capture()

    mode = _PlacedFakeTensorMode(allow_non_fake_inputs=True)
    if isinstance(getattr(function, "__self__", function), torch.nn.Module):
        with FakeCopyMode(mode):
            function = copy.deepcopy(function)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        return mode.from_tensor(leaf)

    args, kwargs = pytree.tree_map(fake, (args, kwargs))
    try:
        with mode, _forgetting_sizes(), errors_told_once():
            torch.compile(function, backend=backend, fullgraph=True)(*args, **kwargs)
    except _CaptureDone:
        return
    except Unsupported as error:
        raise no_whole_graph(error) from error
    except TorchRuntimeError as error:
        raise CaptureError(
            f"the model does not run on these inputs: {_innermost(error)}"
        ) from error
    except TorchDynamoException as error:
        if isinstance(error, FxckptError):
            raise
        raise CaptureError(
            f"Dynamo could not capture the model: {_without_advice(error)}"
        ) from error
    raise CaptureError("nothing to plan: the function was captured without any tensor operation.")


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """Leave the fake tensor and tracing modes of a compile in progress, to run something for real."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield
