"""Capture by Dynamo and its error messages."""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar
from unittest import mock

import torch.utils.checkpoint
from torch import fx
from torch._dynamo.exc import ShortenTraceback, TorchRuntimeError, Unsupported, UserError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from fxckpt.errors import CaptureError, FxckptError, NotOneGraph

F = TypeVar("F", bound=Callable[..., Any])


def is_recording() -> bool:
    """Return whether a dispatch mode is active, such as a trace of ATen ops or a FLOP counter."""
    return torch._C._len_torch_dispatch_stack() > 0


def not_compiled(function: Callable[..., Any]) -> None:
    """Make Dynamo skip a function and everything it calls, without a wrapper on each call."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(
        function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    )


def is_traced() -> bool:
    """Return whether ``make_fx`` or AOTAutograd is tracing ops into a graph."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_jit_traced() -> bool:
    """Return whether ``torch.jit.trace`` is recording ops."""
    return torch._C._get_tracing_state() is not None


def tracing_lock() -> threading.RLock:
    """Return the lock that Dynamo holds to compile, since torch traces one graph at a time."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


@contextlib.contextmanager
def modules_of(function: Callable[..., Any]) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the path of the running module.

    Paths start at the module that ``function`` is, is a method of, or closes over.
    """
    root = _module_behind(function)
    names = {} if root is None else {module: name for name, module in root.named_modules()}
    stack: list[str] = []
    here = threading.get_ident()

    # Global module hooks fire in every thread.
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
    """Return the module that ``function`` is, is a method of, or closes over, if any."""
    while isinstance(function, partial):
        function = function.func
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    candidates = [function, getattr(function, "__self__", None), *cells]
    return next((c for c in candidates if isinstance(c, torch.nn.Module)), None)


def calling_line() -> str:
    """Return the running line of the user's code in the form ``"file.py:12"``.

    It is that of the innermost frame outside of torch and fxckpt; empty if there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def inline_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a Dynamo graph with its ``nested_compile_region`` calls inlined.

    A plan spans all regions, whereas AOTAutograd would partition each on its own.
    """
    try:
        from torch._higher_order_ops.passes.inline_invoke_subgraph import inline_invoke_subgraph
    except ModuleNotFoundError:  # New in torch 2.13.
        return _inlined(gm)
    return inline_invoke_subgraph(gm)


def _inlined(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with the nodes of its regions in place of their calls, as torch 2.13 does."""
    graph = gm.graph
    while calls := graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.invoke_subgraph
    ):
        for call in calls:
            body, _, *operands = call.args
            with graph.inserting_before(call):
                results = copied_body(gm, body.target, operands)
            for item in list(call.users):
                assert item.target is operator.getitem
                item.replace_all_uses_with(results[item.args[1]])
                graph.erase_node(item)
            graph.erase_node(call)
    gm.recompile()
    return gm


def copied_body(
    gm: fx.GraphModule,
    name: str,
    operands: Sequence[Any],
    adapt: Callable[[fx.Node], None] = lambda copied: None,
) -> Sequence[Any]:
    """Copy the nodes of a region's body into a graph, and return its results.

    ``adapt`` is called with each copy.
    """
    module = operator.attrgetter(name)(gm)
    inputs = module.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: values[n])  # type: ignore[no-any-return]
        if node.op == "placeholder":
            continue
        values[node] = copied = gm.graph.node_copy(node, lambda n: values[n])
        adapt(copied)
        if node.op == "get_attr":
            copied.target = f"{name}_{node.target}".replace(".", "_")
            setattr(gm, copied.target, operator.attrgetter(node.target)(module))
    raise AssertionError("a graph ends with its output")


def is_cut_short(gm: fx.GraphModule) -> bool:
    """Return whether a Dynamo graph ends at a graph break; others hold the rest of the model."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def break_after(gm: fx.GraphModule) -> tuple[str, str]:
    """Return the reason for the graph break that ends a graph, and its line of the user's code.

    The graph must be one that :func:`is_cut_short`. The line is empty if Dynamo does not know it.
    """
    reason: Any = gm.compile_subgraph_reason
    frame = reason.user_stack[-1] if reason.user_stack else None
    lines = [line.strip() for line in str(reason.reason).splitlines() if line.strip()]
    return (
        lines[0] if lines else "graph break"
    ), "" if frame is None else f"{Path(frame.filename).name}:{frame.lineno}"


def failed_frames(begun: float) -> list[tuple[str, str]]:
    """Return the reason and the line of each function that Dynamo gave up on since a time.

    ``begun`` is in seconds, as of ``time.time()``. Dynamo runs such a function in Python; those
    that it calls are compiled by themselves. It remembers the latest 64 compiles.
    """
    found = []
    for each in _failed_compiles(begun):
        name, line = each.fail_user_frame_filename, each.fail_user_frame_lineno
        # The innermost line may be torch's own.
        if name is None or line is None or name.startswith(str(Path(torch.__file__).parent)):
            name, line = each.co_filename, each.co_firstlineno
        source = "" if name is None else f"{Path(name).name}:{line}"
        found.append((_first_line(each.fail_reason), source))
    return found


def frames_over_limit(begun: float) -> set[int]:
    """Return the numbers of the functions that Dynamo compiles no more, of those since a time.

    They had ``torch._dynamo.config.recompile_limit`` compiles; what fits none of them is run in
    Python. ``begun`` is as for :func:`failed_frames`.
    """
    return {
        int(frame)
        for each in _failed_compiles(begun)
        if "recompile limit" in _first_line(each.fail_reason)
        and (frame := (each.compile_id or "").rpartition("/")[0]).isdigit()
    }


def compiled_frame() -> int | None:
    """Return the number of the function that Dynamo compiles now, None if it compiles none."""
    from torch._guards import CompileContext

    found = CompileContext.current_compile_id()
    return None if found is None else found.frame_id


def _failed_compiles(begun: float) -> Iterator[Any]:
    """Yield what Dynamo noted of the compiles that it gave up on since a time, of the latest 64."""
    from torch._dynamo.utils import get_compilation_metrics

    for each in get_compilation_metrics():
        is_new = each.start_time_us is not None and each.start_time_us >= 1e6 * begun
        if is_new and each.fail_type == Unsupported.__name__:
            yield each


def _first_line(text: str | None) -> str:
    return next(iter((text or "").strip().splitlines()), "")


def make_boxed(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an inner compiler so that its compiled functions take their arguments in a list.

    AOTAutograd calls this convention boxed: the callee may empty the list to free its arguments.
    """
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
    """Return an error of the same class that Dynamo neither wraps nor swallows.

    Dynamo raises subclasses of ``ShortenTraceback`` as their own method has it: without its frames,
    of which there are dozens, unless ``TORCHDYNAMO_VERBOSE=1``. A defect keeps its frames and the
    error that caused it.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    if isinstance(error, ShortenTraceback):
        return error
    message, cause = str(error), error.__cause__
    is_defect = cause is not None and not isinstance(cause, FxckptError)

    def without_frames(self: Exception) -> Exception:
        if is_defect:
            raise self from cause  # Dynamo would raise it from None.
        return self if torch._dynamo.config.verbose else self.with_traceback(None)

    # Dynamo appends advice on debugging its own internals to the message.
    own = {
        "__init__": Exception.__init__,
        "__str__": lambda self: message,
        "__module__": kind.__module__,
        "remove_dynamo_frames": without_frames,
    }
    wrapped: Exception = type(kind.__name__, (kind, ShortenTraceback), own)(message)
    wrapped.__dict__.update(error.__dict__)
    wrapped.first_useful_frame = None  # type: ignore[attr-defined]
    return wrapped


def untraced(function: F) -> F:
    """Run a function in Python wherever it is called, in code that Dynamo traces too."""
    kept: F = torch.compiler.disable(function)
    return kept


def isolated(**limits: int) -> dict[str, Any]:
    """Return options of ``torch.compile`` that count its compilations apart from all others.

    They are new in torch 2.13. In older versions all compilations of one function share one limit.
    """
    options = {"isolate_recompiles": True, **limits}
    known = inspect.signature(torch.compile).parameters
    return {name: value for name, value in options.items() if name in known}


def compile_whole(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function as one static graph per shape, isolated from its other compilations.

    It raises :class:`CaptureError` when called, if Dynamo cannot capture one graph.
    """
    options = isolated(recompile_limit=64)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            # By default Dynamo assumes that a module's hooks never change. The option is read when
            # Dynamo writes its guards, hence the patch around the call.
            with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
                return compiled(*args, **kwargs)
        except Unsupported as error:
            raise no_whole_graph(error) from error

    return run


DATA = "data-dependent"
"""What torch calls code that reads values of tensors."""


def no_whole_graph(error: Exception) -> NotOneGraph:
    """Return the error for a model that Dynamo cannot capture as one graph."""
    return NotOneGraph(
        f"the model does not capture as one graph: {_told(error)}\n"
        "Remove the graph break, or plan the step of several graphs: fxckpt.plan_step(model, ...). "
        "Compiled with fxckpt.Backend, backend.plans has a plan of each."
    )


def _told(error: Exception) -> str:
    """Return what Dynamo found, the user's lines, its explanation and its first hint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    more = [
        line.partition(": ")[2]
        for kind in ("Explanation: ", "Hint: ")
        if (line := next((each for each in lines if each.startswith(kind)), ""))
    ]
    stack = getattr(error, "real_stack", None)
    return "\n".join(((lines or [type(error).__name__])[0] + _calling_lines(stack), *more))


def _innermost(error: TorchRuntimeError) -> str:
    """Return the error that an op raised on fake tensors, and the lines that called it."""
    cause: BaseException = error
    while (behind := cause.__cause__ or cause.__context__) is not None:
        cause = behind
    return f"{type(cause).__name__}: {cause}{_calling_lines(error.real_stack)}"


def _calling_lines(stack: Any) -> str:
    """Return the innermost lines of a stack outside torch, and outside installed packages.

    Without any, it is the innermost of torch.
    """
    frames = list(stack or ())
    torch_folder = str(Path(torch.__file__).parent)
    outside = [frame for frame in frames if not frame.filename.startswith(torch_folder)]
    own = [frame for frame in outside if "site-packages" not in Path(frame.filename).parts]
    shown = [*(outside or frames)[-1:], *(frame for frame in own[-1:] if frame != outside[-1])]
    return "".join(f"\n  at {frame.filename}:{frame.lineno}: {frame.line}" for frame in shown)


class CaptureDone(ShortenTraceback):
    """Signal that the graph was received and the compile can be abandoned."""


def leave_capture() -> NoReturn:
    """Raise the signal that ends a capture successfully and abandons its compile."""
    raise CaptureDone(first_useful_frame=None)


@contextlib.contextmanager
def errors_told_once() -> Iterator[None]:
    """Silence torch's log record, with traceback, of an op that fails on fake tensors.

    The error itself is raised and carries the same message.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


@contextlib.contextmanager
def _placing(place: torch.device | None) -> Iterator[None]:
    """Move fake tensors from the meta device to one that could run a step.

    With ``place``, every fake tensor moves there.
    Fake tensors of every mode: Dynamo makes its own of what a function closes over.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    from_tensor = FakeTensorMode.from_tensor

    def placed(mode: FakeTensorMode, tensor: torch.Tensor, **kwargs: Any) -> FakeTensor:
        fake = from_tensor(mode, tensor, **kwargs)
        if place is not None or fake.fake_device.type == "meta":
            fake.fake_device = device if place is None else place
        return fake

    with mock.patch.object(FakeTensorMode, "from_tensor", placed):
        yield


class _Unlisted(set[Callable[..., Any]]):
    """A set of functions whose copy is empty.

    torch 2.11 copies its configuration at each compile, to log it, and cannot sort functions: it
    logs that error with a traceback.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> set[Callable[..., Any]]:
        return set()


def _logging_methods() -> _Unlisted:
    """Return every method of every class of loggers, such as those that packages add."""
    classes = [logging.Logger]
    for each in classes:
        classes += each.__subclasses__()
    return _Unlisted(m for each in classes for m in vars(each).values() if callable(m))


def _to_fakes(mode: FakeTensorMode, given: Any) -> Any:
    """Return arguments with a fake tensor in place of each real one."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        return mode.from_tensor(leaf)

    return pytree.tree_map(fake, given)


UNLIMITED: dict[str, Any] = {"recompile_limit": 2**16, "accumulated_recompile_limit": 2**16}
"""Dynamo counts the compiles of all captures together: those of a class of models, or, before torch
2.13, of all steps."""


@contextlib.contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Restore on exit what Dynamo notes of compiles: the sizes seen, and how many a function had.

    Captures are not limited, and neither make a later compile dynamic nor count in its limit.
    """
    import copy

    from torch._dynamo import config, convert_frame, pgo

    state, counts = pgo.get_code_state(), convert_frame.FRAME_COMPILE_COUNTER
    before, counted = copy.deepcopy(dict(state)), dict(counts)
    try:
        with config.patch(**UNLIMITED):
            yield
    finally:
        state.clear()
        state.update(before)
        counts.clear()
        counts.update(counted)


def capture_whole(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    receive: Callable[[fx.GraphModule, list[Any]], Any],
    place: torch.device | None = None,
) -> None:
    """Capture ``function(*args, **kwargs)`` as one Dynamo graph and pass it to ``receive``.

    Everything runs on fake tensors; nothing is executed. A module, or a method's module, is first
    copied with fake parameters, which takes no memory and leaves the caller's module unchanged.
    The compile is abandoned after ``receive`` returns, so Dynamo keeps no cache entry for it.

    Tensors on the meta device are treated as tensors on the accelerator, or on the CPU if there is
    none, because torch 2.13 traces some ops (``nll_loss``) without their gradient on meta. With
    ``place``, all tensors are treated as tensors there. Calls of loggers, at which a compile breaks
    the graph, are left out.

    Raises :class:`CaptureError` if Dynamo cannot capture one graph, the function fails on these
    inputs, or it contains no tensor operation.
    """
    import copy

    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException
    from torch._subclasses.fake_tensor import FakeCopyMode

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        receive(inline_regions(gm), inputs)
        leave_capture()

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    ignored = _logging_methods()
    ignored |= config.ignore_logging_functions
    try:
        with _placing(place), config.patch(ignore_logging_functions=ignored):
            if isinstance(getattr(function, "__self__", function), torch.nn.Module):
                with FakeCopyMode(mode):
                    function = copy.deepcopy(function)
            args, kwargs = _to_fakes(mode, (args, kwargs))
            with mode, leaving_no_trace(), errors_told_once():
                torch.compile(function, backend=backend, fullgraph=True)(*args, **kwargs)
    except CaptureDone:
        return
    except TorchDynamoException as error:
        if isinstance(error, FxckptError):
            raise
        if isinstance(found := getattr(error, "inner_exception", None), CaptureError):
            raise found from None  # The backend's own, about this graph.
        # Dynamo's own stack, of hundreds of lines, helps those who debug Dynamo.
        raise _capture_error(error) from (error if config.verbose else None)
    raise CaptureError("nothing to plan: the function was captured without any tensor operation.")


def _capture_error(error: Exception) -> CaptureError:
    if isinstance(error, Unsupported) or (DATA in str(error) and isinstance(error, UserError)):
        return no_whole_graph(error)  # Without fullgraph=True it breaks the graph.
    if isinstance(error, TorchRuntimeError):
        return CaptureError(f"the model does not run on these inputs: {_innermost(error)}")
    return CaptureError(f"Dynamo could not capture the model: {_told(error)}")


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """Leave the fake tensor and tracing modes of a compile in progress to run real ops."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield
