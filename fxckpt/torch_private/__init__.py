"""Every private torch name that fxckpt uses, in one place. Where versions of torch differ, a comment names them; ``versions.TESTED`` are tested."""

# ruff: noqa: E402
from __future__ import annotations

from fxckpt.torch_private.versions import refuse_older

# Before the private names, which an older torch may lack.
refuse_older()

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NoReturn, TypeVar

import torch
import torch.utils.checkpoint
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback, TorchRuntimeError, Unsupported
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._higher_order_ops.effects import _get_effect
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._prims_common import compute_required_storage_length
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import SelectiveCheckpointContext

from fxckpt.errors import CaptureError, FxckptError

__all__ = [
    "GRAPH_FIELDS",
    "MODULE_FIELDS",
    "RECORD_FUNCTION",
    "BackendCompilerFailed",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PyTreeCodeGen",
    "aot_autograd",
    "boxed",
    "errors_told_once",
    "frees_incoming_gradients",
    "has_effect",
    "is_recording",
    "is_symbolic",
    "is_traced",
    "leave_capture",
    "let_autograd_own",
    "name_op",
    "overloads_of",
    "partitioner_tag",
    "policy_context",
    "policy_output",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "seen_in",
    "shown",
    "size_hint",
    "split",
    "storage_id",
    "tag_side",
    "untag_side",
]


RECORD_FUNCTION = "torch._C._profiler._RecordFunctionFast"
"""The record that torch's own generated code takes; by name, for it is written into code."""

M = TypeVar("M", bound=torch.nn.Module)

MODULE_FIELDS = frozenset(vars(torch.nn.Module()))
"""What every module keeps its state, hooks and mode in."""

GRAPH_FIELDS = frozenset(vars(fx.GraphModule({}, fx.Graph()))) - MODULE_FIELDS
"""What a graph module keeps its graph and code in."""

NAME = "fxckpt::named"
"""The op behind :func:`fxckpt.name`. It returns nothing, so that neither autograd nor functionalization sees an alias in it."""
torch.library.define(NAME, "(Tensor value, str label) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _name(value: torch.Tensor, label: str) -> None:
    """Do nothing: a name is for those who capture."""


@torch.library.register_fake(NAME)  # type: ignore[untyped-decorator]
def _name_fake(value: torch.Tensor, label: str) -> None:
    """Make nothing."""


@torch.library.impl(NAME, "FuncTorchBatched")
def _name_batched(value: torch.Tensor, label: str) -> None:
    """Name what lies under the batch."""
    name_op(torch._C._functorch.get_unwrapped(value), label)


name_op: OpOverload = torch.ops.fxckpt.named.default
# Nobody uses what it returns, and yet dead code elimination must leave it alone.
fx.node.has_side_effect(name_op)


def is_recording() -> bool:
    """Return whether a dispatch mode is active: a trace of ATen ops, a tape, a counter."""
    return torch._C._len_torch_dispatch_stack() > 0


def size_hint(value: Any) -> int:
    """Return an int for an int or SymInt: its upper bound if it has one, else the hint of the compile; no guard is added.

    A bound is what the user marked (``mark_dynamic(x, 0, max=512)``) or what torch knows (``nonzero`` finds at most
    all). A size that is known only when the step runs, and has no bound, counts as 1.
    """
    if isinstance(value, int):
        return value
    bound = upper_bound(value)
    if bound is not None:
        return bound
    node = value.node
    hint = node.hint if node.has_hint() else None
    return int(hint) if isinstance(hint, int) else 1


MOST = 2**40
"""A greater bound of a size is none."""


CUDA_BLOCK_BYTES = 512
"""The CUDA caching allocator rounds every block up to this."""


def allocated_bytes(nbytes: int, device_type: str) -> int:
    """Return the bytes an allocator takes for so many."""
    return -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES if device_type == "cuda" else nbytes


def upper_bound(value: torch.SymInt) -> int | None:
    """Return the greatest value that a size can take, or None."""
    return greatest(value.node.expr, value.node.shape_env)


def greatest(expr: Any, shape_env: Any) -> int | None:
    """Return the greatest value that a sympy expression of sizes can take, or None."""
    ranges = shape_env.var_to_range
    if not all(s in ranges and ranges[s].upper.is_Integer and ranges[s].upper < MOST for s in expr.free_symbols):
        return None
    upper = shape_env.bound_sympy(expr).upper
    return int(upper) if upper.is_Integer and upper < MOST else None


def is_surely_equal(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal whatever values their symbols take; no guard is added."""
    return bool(statically_known_true(one == other))


def unbounded_sizes(graph: fx.Graph) -> list[str]:
    """Return the sizes in a graph's tensors that are known only when it runs, and have no upper bound."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and not size.node.has_hint() and upper_bound(size) is None:
                found[str(size)] = None
    return list(found)


BINDINGS = "unbacked_bindings"
"""Metadata of an op that finds sizes by looking at numbers: where in its value each is."""


def bindings_of(node: fx.Node) -> dict[Any, Any]:
    """Return the bindings of the sizes in a node's value that are in none of those it reads, and are known only when it runs."""
    from torch.fx.experimental.symbolic_shapes import CallMethodKey, free_unbacked_symbols

    known = {s for arg in node.all_input_nodes for s in free_unbacked_symbols(arg.meta.get("val"))}
    found: dict[Any, Any] = {}
    for path, value in pytree.tree_flatten_with_path(node.meta.get("val"))[0]:
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            symbol = size.node._expr if isinstance(size, torch.SymInt) else None
            if symbol is not None and symbol.is_Symbol and symbol not in known and free_unbacked_symbols(symbol):
                found.setdefault(symbol, (*path, CallMethodKey("size"), pytree.SequenceKey(dim)))
    return found


def written_after(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a joint graph whose new values are forward outputs, which AOTAutograd's own wrapper then copies into them."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    (output,) = graph.find_nodes(op="output")
    written = [d.mutated_input for d in output.meta.get("desc") or () if isinstance(d, InputMutationAOTOutput)]
    return [n for n in graph.find_nodes(op="placeholder") if n.meta.get("desc") in written] if written else []


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; fake tensors of one trace share storages as real ones would."""
    return int(tensor.untyped_storage()._cdata)


def policy_context(output: Any) -> SelectiveCheckpointContext:
    """Return what a policy in torch's form is asked with about an op that gives ``output``."""
    context = SelectiveCheckpointContext(is_recompute=False)
    # torch 2.11 has no such argument; who is asked by fxckpt may read it all the same.
    context.op_output = output
    return context


def policy_output(context: SelectiveCheckpointContext) -> Any:
    """Return what the op gives that a policy is asked about. torch 2.11 itself asks before the op runs: None."""
    return getattr(context, "op_output", None)


def frees_incoming_gradients() -> bool:
    """Return whether the autograd engine hands over its only reference to a gradient, so that the compiled backward can let go of it."""
    return hasattr(torch.autograd.Function, "boxed_grads_call")


def remember_storage(tensor: torch.Tensor) -> int:
    """Keep the address of a tensor's storage from being given to another, though the storage itself may die; undone by :func:`forget_storage`."""
    reference: Any = tensor.untyped_storage()._weak_ref()
    return int(reference)


def forget_storage(remembered: list[int]) -> None:
    """Let go of addresses; the list is emptied."""
    for reference in remembered:
        torch.UntypedStorage._free_weak_ref(reference)
    remembered.clear()


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from others: positive, or negative for a tensor that has none of its own and is told by itself."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter or not hasattr(kind, "__tensor_flatten__"):
        try:
            return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
        except (NotImplementedError, RuntimeError):  # sparse and opaque layouts
            pass
    return -id(tensor)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with a storage of their own that a subclass wraps, or that hold the values of a sparse tensor."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            yield inner
            yield from parts_of(inner)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        yield tensor.values()
    elif tensor.layout is torch.sparse_coo:
        yield tensor._values()


def not_compiled(function: Callable[..., Any]) -> None:
    """Keep Dynamo out of a function and of all it calls, at no cost for a call."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def share_version(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias without a history, whose ``_version`` counts the writes to ``tensor`` too, below autograd as above.

    A parameter is returned as it is, which is quicker: it has no history and will get none.
    """
    if (tensor.requires_grad and tensor.grad_fn is None) or tensor.is_inference():
        return tensor
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops without autograd and without autocast, as they ran below both.

    Grad mode is on as it was in the region: some kernels look at it (mkldnn's LSTM makes its workspace only then).
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


def current_backward() -> object | None:
    """Return what tells the running backward from others: its ``GraphExecGroup``, or its number; None outside of any."""
    group = torch._C._get_graph_exec_group()
    if group is not None:
        return group
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the running backward, unless it belongs to a ``GraphExecGroup``, of which there may be more."""
    if torch._C._get_graph_exec_group() is None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)


def laid_out(data: torch.Tensor, geometry: tuple[Any, ...]) -> torch.Tensor:
    """Return the tensor of a geometry (offset, sizes, strides, dtype, conjugate, negative) over the storage of ``data``."""
    offset, shape, stride, dtype, is_conj, is_neg = geometry
    tensor = torch.empty(0, dtype=dtype, device=data.device).set_(data.untyped_storage(), offset, shape, stride)
    tensor = torch._neg_view(tensor) if is_neg else tensor
    return torch._conj(tensor) if is_conj else tensor


def surrounding_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the hooks for saved tensors that are in force: pack and unpack."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


@dataclass(frozen=True)
class Selective:
    """What ``create_selective_checkpoint_contexts`` was given."""

    function: Callable[..., Any]
    allows_writes: bool


def selective_policy(contexts: tuple[Any, Any]) -> Selective | None:
    """Return the policy behind the contexts that torch's ``create_selective_checkpoint_contexts`` returned; None for other contexts."""
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    forward, recompute = contexts
    if type(forward) is not _CachingTorchDispatchMode or type(recompute) is not _CachedTorchDispatchMode:
        return None
    return Selective(forward.policy_fn, recompute.allow_cache_entry_mutation)


def debug_override(debug: bool) -> bool:
    """Return whether to debug: as ``set_checkpoint_debug_enabled`` says, else ``debug``."""
    override = torch.utils.checkpoint._checkpoint_debug_enabled
    return debug if override is None else bool(override)


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


def is_transformed() -> bool:
    """Return whether a ``torch.func`` transform is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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


def is_symbolic(node: fx.Node) -> bool:
    """Return whether ``node`` is a size or a scalar, which AOTAutograd saves apart from tensors."""
    return bool(is_sym_node(node)) or isinstance(node.meta.get("val"), (bool, int, float))


def partitioner_tag(node: fx.Node) -> str | None:
    """Return AOTAutograd's own word for the half in which it traced ``node``."""
    tag = node.meta.get("partitioner_tag")
    return str(tag) if tag is not None else None


def tag_side(node: fx.Node, *, backward: bool) -> None:
    """Bind ``node`` to one half of the split."""
    node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def untag_side(node: fx.Node) -> None:
    """Let the split put ``node`` in either half, or in both."""
    node.meta.pop("partitioner_tag", None)


def has_effect(target: Any) -> bool:
    """Return whether an op was registered as having side effects (effect tokens)."""
    return isinstance(target, (OpOverload, HigherOrderOperator)) and _get_effect(target) is not None


def overloads_of(op: Any) -> list[OpOverload]:
    """Return the overloads of what a user calls an op: an overload, a packet of them, or a custom op's definition; none for anything else."""
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return [op._opoverload] if isinstance(op, CustomOpDef) else []


def let_autograd_own(node: fx.Node) -> None:
    """Have a value saved by ``save_for_backward``, though a user's ``autograd.Function`` kept it on its ``ctx``.

    What AOTAutograd keeps on a ``ctx``, so that it may be written to before the backward, is there until the backward's graph dies. A value that
    nobody outside the compiled graphs can write to needs none of that.
    """
    node.meta.pop("saved_tensor_with_no_vc_check", None)


def split(
    joint: fx.GraphModule, saved: Sequence[fx.Node], symbolic: Sequence[fx.Node], *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph by AOTAutograd's own contract (symints last, version checks, opaque objects, tangents)."""
    return _extract_fwd_bwd_modules(joint, list(saved), list(symbolic), num_fwd_outputs=num_fwd_outputs)


def boxed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, record: Callable[[fx.GraphModule], object] | None = None
) -> Callable[..., Any]:
    """Compile a graph to Python that takes its arguments in a list it empties, so that each dies after its last use.

    While a profiler runs, other code runs than where none does: ``record`` sees the graph module right before that code is made, at the first need.
    """
    from torch.fx.graph import _BoxedCodeGen

    lower_rng(gm.graph)
    gm.graph.set_codegen(_BoxedCodeGen())
    plain = _forward_of(gm)
    lock = threading.Lock()
    recorded: list[Callable[[list[Any]], Any]] = []

    def run(args: list[Any]) -> Any:
        return plain(args)

    def run_recorded(args: list[Any]) -> Any:
        if not torch.autograd.profiler._is_profiler_enabled:
            return plain(args)
        with lock:
            if not recorded:
                assert record is not None
                record(gm)
                recorded.append(_forward_of(gm))
        return recorded[0](args)

    made = run if record is None else run_recorded
    made._boxed_call = True  # type: ignore[attr-defined]
    return made


def _forward_of(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Make the code of a graph module now, and return it; what is made later leaves it alone."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    gm.recompile()
    _LazyGraphModule.force_recompile(gm)
    forward: Callable[[list[Any]], Any] = gm.forward
    return forward


def keep_saved_values() -> None:
    """Tell AOTAutograd, while it compiles a backward, that nothing writes into saved values, so that the graph can be retained.

    Only Inductor reuses ("donated") saved values; AOTAutograd refuses ``retain_graph`` wherever it found values that could be.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def guard_sizes(joint: fx.GraphModule) -> None:
    """Let Dynamo compile again for sizes greater than those of this trace: a plan keeps its budget up to its own sizes only."""
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = list(value.shape) if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.hint is not None and upper_bound(size) is None:
                bool(size <= size.node.hint)  # evaluating a symbolic comparison records it as a guard


def fake_like(value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a fake tensor on the device of ``value``, of the same trace if that is fake."""
    with value.fake_mode if isinstance(value, FakeTensor) else FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=value.device)


def shown(tensor: torch.Tensor) -> int:
    """Return the elements from the first that a tensor shows to the last, whatever lies before and between."""
    return compute_required_storage_length(tensor.shape, tensor.stride(), 0)


def seen_in(view: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor that shows of the storage of ``new`` what ``view`` shows of that of ``old``, whose like ``new`` is."""
    offset = view.storage_offset() + _begins_at(new, view.element_size()) - _begins_at(old, view.element_size())
    with new.fake_mode if isinstance(new, FakeTensor) else contextlib.nullcontext():
        if view.dtype != new.dtype:
            row = new.as_strided((new.untyped_storage().nbytes() // new.element_size(),), (1,), 0)
            new = torch.view_as_real(row) if row.is_complex() and not view.is_complex() else row.view(view.dtype)
        return new.as_strided(view.shape, view.stride(), offset)


def _begins_at(tensor: torch.Tensor, bytes_each: int) -> int | torch.SymInt:
    """Return where in its storage a tensor begins, in elements of ``bytes_each``."""
    offset, own = tensor.storage_offset(), tensor.element_size()
    return offset if own == bytes_each else offset * own // bytes_each


def fake_rng_state(drawn: torch.Tensor) -> torch.Tensor:
    """Return, as a fake tensor, the state of the generator that ``drawn`` was drawn from: of the same trace as ``drawn``, if it is fake."""
    mode = drawn.fake_mode if isinstance(drawn, FakeTensor) else FakeTensorMode()
    with mode:
        return torch.empty(5056 if drawn.device.type == "cpu" else 16, dtype=torch.uint8)


def guards_function(module: torch.nn.Module) -> FunctionType | None:
    """Return the function that checks the inputs of an exported graph, of the module by which the graph calls it; None for any other module."""
    import inspect

    from torch.export._unlift import GuardsFn

    # Dynamo's wrapper calls it ``func``.
    return inspect.getclosurevars(module.forward).nonlocals["func"] if isinstance(module, GuardsFn) else None


def guards_namespace() -> dict[str, Any]:
    """Return the names that input checks of exported graphs know."""
    import builtins
    import math

    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return {**SYMPY_INTERP, "math": math, "inf": math.inf, "__builtins__": builtins}


def guards_module(check: Callable[..., None]) -> torch.nn.Module:
    """Return the module by which an exported graph calls its input checks."""
    from torch.export._unlift import GuardsFn

    module: Any = GuardsFn()
    module.forward = torch._dynamo.dont_skip_tracing(check)
    module._is_impure = True  # nobody uses what it returns
    return module  # type: ignore[no-any-return]


def with_code(module: M) -> M:
    """Return a module whose ``forward`` is its own: Dynamo's graphs, and copies of them, make their code when it is asked for."""
    if isinstance(module, fx.GraphModule):
        module.code  # noqa: B018
    return module


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
    return (lines[0] if lines else "graph break"), "" if frame is None else f"{Path(frame.filename).name}:{frame.lineno}"


def make_boxed(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an inner compiler so that what it returns takes its arguments in a list (AOTAutograd's fast convention)."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def compile_half(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = compiler(gm, example_inputs)
        if not callable(compiled):
            raise TypeError(f"the inner compiler returned {type(compiled).__name__}, which is not callable")
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
    own = {"__init__": Exception.__init__, "__str__": lambda self: said, "__module__": kind.__module__}
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
    own = [frame for frame in stack if not frame.filename.startswith(str(Path(torch.__file__).parent))]
    at = (own or stack)[-1:]
    return f"{type(cause).__name__}: {cause}" + "".join(f"\n  at {frame.filename}:{frame.lineno}: {frame.line}" for frame in at)


def _without_advice(error: Exception) -> str:
    """Return what Dynamo says of an error, without how its own internals are debugged."""
    return str(error).partition("\nSet TORCHDYNAMO_VERBOSE=1")[0].rstrip()


@contextlib.contextmanager
def _forgetting_sizes() -> Iterator[None]:
    """Put Dynamo's memory of seen sizes back: what was captured here must not make a later compile dynamic."""
    import copy

    from torch._dynamo import pgo

    state = pgo.get_code_state()
    before = copy.deepcopy(dict(state))
    try:
        yield
    finally:
        state.clear()
        state.update(before)


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


def trace_joint(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], receive: Callable[..., Any]) -> None:
    """Give the joint graph of ``gm`` on fake inputs to ``receive``, which is called as a partition function; nothing is executed.

    Raises :class:`CaptureError` where torch cannot trace it. ``receive`` is not called where no output needs a gradient.
    """

    def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any) -> NoReturn:
        receive(joint, num_fwd_outputs)
        leave_capture()

    compile_graph = aot_autograd(fw_compiler=boxed, inference_compiler=boxed, partition_fn=partition, keep_inference_input_mutations=True)
    try:
        with errors_told_once():
            compile_graph(gm, list(inputs))
    except _CaptureDone:
        return
    except FxckptError:
        raise
    except Exception as error:
        raise CaptureError(f"torch could not trace the gradient of the region: {type(error).__name__}: {error}") from error


class _PlacedFakeTensorMode(FakeTensorMode):
    """Gives tensors of the meta device a device that a step could run on."""

    def from_tensor(self, tensor: torch.Tensor, **kwargs: Any) -> FakeTensor:
        fake = super().from_tensor(tensor, **kwargs)
        if fake.fake_device.type == "meta":
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            fake.fake_device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
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
    from torch.utils import _pytree as pytree

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
        raise CaptureError(f"the model does not run on these inputs: {_innermost(error)}") from error
    except TorchDynamoException as error:
        if isinstance(error, FxckptError):
            raise
        raise CaptureError(f"Dynamo could not capture the model: {_without_advice(error)}") from error
    raise CaptureError("nothing to plan: the function was captured without any tensor operation.")


def allocation_events(fn: Callable[[], Any]) -> tuple[list[int], Any]:
    """Run ``fn`` and return the CPU allocator's events in order, in bytes (negative: freed), and what ``fn`` returned."""
    from torch._C._profiler import _ExperimentalConfig

    profiler: Any = torch.autograd
    profiler._enable_profiler_legacy(
        profiler.ProfilerConfig(profiler.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )
    try:
        result = fn()
    finally:
        threads = profiler._disable_profiler_legacy()
    return [int(e.cpu_memory_usage()) for events in threads for e in events if e.kind() == "memory_alloc"], result


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """Leave the fake tensor and tracing modes of a compile in progress, to run something for real."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def _generator_of(device: torch.device) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]:
    """Return how to get and how to set the state of a device's default generator."""
    if device.type in ("cpu", "mps"):
        module = torch if device.type == "cpu" else torch.mps
        return module.get_rng_state, module.set_rng_state
    module = torch.get_device_module(device)
    return partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)


def _run_and_save(device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Run a random op and return the generator state from before it, as ``run_and_save_rng_state`` does."""
    get, _ = _generator_of(device)
    state = get()
    return state, op(*args, **kwargs)


def _run_with(device: torch.device, state: torch.Tensor, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a random op under a generator state and put the generator back, as ``run_with_rng_state`` does."""
    get, put = _generator_of(device)
    now = get()
    put(state)
    try:
        return op(*args, **kwargs)
    finally:
        put(now)


def lower_rng(graph: fx.Graph) -> None:
    """Replace torch's higher-order RNG ops by plain functions, for graphs that run op by op.

    The higher-order ops refuse dispatch modes they do not know, so that a FLOP counter around a step would fail.
    """
    plain = {run_and_save_rng_state: _run_and_save, run_with_rng_state: _run_with}
    for node in graph.nodes:
        if node.target in plain:
            value = node.meta["val"][1] if node.target is run_and_save_rng_state else node.meta["val"]
            first = value if isinstance(value, torch.Tensor) else value[0]
            node.args = (first.device, *node.args)
            node.target = plain[node.target]


SWITCHES = (
    *("mkldnn_enabled", "mkldnn_deterministic", "onednn_allow_tf32", "nnpack_enabled"),
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_allow_tf32", "cublas_allow_tf32"),
    *("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"),
    *("float32_matmul_precision", "deterministic_algorithms", "blas_preferred_backend", "linalg_preferred_backend"),
)
"""What decides, beside an op's arguments, which of torch's kernels runs, and with how much memory."""


def kernel_switches() -> str:
    """Return torch's switches of kernels as text."""
    found = {name: getattr(torch._C, f"_get_{name}", None) for name in SWITCHES}
    return repr({name: str(get()) for name, get in found.items() if get is not None})
