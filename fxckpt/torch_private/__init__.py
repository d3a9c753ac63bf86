"""Private names of torch that fxckpt uses, one module per subject.

Differences between versions of torch are commented where they matter; fxckpt is tested with the
versions in ``versions.TESTED``.
"""

# ruff: noqa: E402
from __future__ import annotations

from fxckpt.torch_private.versions import refuse_older

# Must precede the imports of private names, which an older torch may lack.
refuse_older()

from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen

from fxckpt.torch_private.aot import (
    boxed,
    may_act_before_failing,
    partitioner_tag,
    split,
    tag_side,
    trace_joint,
    untag_side,
    written_after,
)
from fxckpt.torch_private.autograd import (
    after_backward,
    at_engine_exit,
    below_autograd,
    current_backward,
    frees_incoming_gradients,
    is_transformed,
    keep_saved_values,
    let_autograd_own,
    surrounding_hooks,
)
from fxckpt.torch_private.compiled_backward import (
    backward_node,
    has_saved_values,
    keeps_graph,
    watch_backward,
)
from fxckpt.torch_private.cpp_build import cpp_command
from fxckpt.torch_private.dispatcher import has_effect, holds_python, overloads_of
from fxckpt.torch_private.dynamo import (
    CaptureDone,
    break_after,
    calling_line,
    capture_whole,
    compile_whole,
    errors_told_once,
    failed_frames,
    inline_regions,
    is_cut_short,
    is_jit_traced,
    is_recording,
    is_traced,
    leave_capture,
    make_boxed,
    modules_of,
    no_whole_graph,
    not_compiled,
    outside_trace,
    through_dynamo,
    tracing_lock,
)
from fxckpt.torch_private.export import guards_function, guards_module, guards_namespace
from fxckpt.torch_private.gpu_ops import GpuAttention
from fxckpt.torch_private.graph_modules import GRAPH_FIELDS, MODULE_FIELDS, M, with_code
from fxckpt.torch_private.kept_graph import (
    KeptGraph,
    after_optimizers,
    is_in_a_forward,
)
from fxckpt.torch_private.name_op import NAME, name_op
from fxckpt.torch_private.profiler import RECORD_FUNCTION, allocation_events
from fxckpt.torch_private.region_budgets import (
    annotate,
    annotates,
    constant_in_graph,
    graph_budget,
    new_key,
    region_keys,
    traced_nodes,
    without_torch_regions,
)
from fxckpt.torch_private.rng import default_generator, fake_rng_state, lower_rng
from fxckpt.torch_private.selective_checkpoint import (
    REPLACED,
    TAKES_HOOKS_OPTION,
    Selective,
    debug_override,
    is_called_by_compiler,
    modules_with,
    policy_context,
    policy_output,
    selective_policy,
    torch_checkpoint,
    torch_selective_contexts,
)
from fxckpt.torch_private.sizes import (
    BINDINGS,
    MOST,
    assuming,
    bindings_of,
    greatest,
    growing_sizes,
    guard_sizes,
    is_surely_equal,
    is_symbolic,
    size_hint,
    unbounded_sizes,
    upper_bound,
)
from fxckpt.torch_private.storages import (
    CUDA_BLOCK_BYTES,
    allocated_bytes,
    fake_like,
    forget_storage,
    laid_out,
    move_fake,
    parts_of,
    remember_storage,
    seen_in,
    share_version,
    shown,
    storage_addresses,
    storage_id,
    storage_key,
)
from fxckpt.torch_private.streams import stream_of, unwrap_syncs, wrap_syncs
from fxckpt.torch_private.switches import SWITCHES, kernel_switches

__all__ = [
    "BINDINGS",
    "CUDA_BLOCK_BYTES",
    "GRAPH_FIELDS",
    "MODULE_FIELDS",
    "MOST",
    "NAME",
    "RECORD_FUNCTION",
    "REPLACED",
    "SWITCHES",
    "TAKES_HOOKS_OPTION",
    "BackendCompilerFailed",
    "CaptureDone",
    "FakeTensor",
    "FakeTensorMode",
    "GpuAttention",
    "HigherOrderOperator",
    "KeptGraph",
    "M",
    "OpOverload",
    "OpOverloadPacket",
    "PyTreeCodeGen",
    "Selective",
    "after_backward",
    "after_optimizers",
    "allocated_bytes",
    "allocation_events",
    "annotate",
    "annotates",
    "aot_autograd",
    "assuming",
    "at_engine_exit",
    "backward_node",
    "below_autograd",
    "bindings_of",
    "boxed",
    "break_after",
    "calling_line",
    "capture_whole",
    "compile_whole",
    "constant_in_graph",
    "cpp_command",
    "current_backward",
    "debug_override",
    "default_generator",
    "errors_told_once",
    "failed_frames",
    "fake_like",
    "fake_rng_state",
    "forget_storage",
    "frees_incoming_gradients",
    "graph_budget",
    "greatest",
    "growing_sizes",
    "guard_sizes",
    "guards_function",
    "guards_module",
    "guards_namespace",
    "has_effect",
    "has_saved_values",
    "holds_python",
    "inline_regions",
    "is_called_by_compiler",
    "is_cut_short",
    "is_in_a_forward",
    "is_jit_traced",
    "is_recording",
    "is_surely_equal",
    "is_symbolic",
    "is_traced",
    "is_transformed",
    "keep_saved_values",
    "keeps_graph",
    "kernel_switches",
    "laid_out",
    "leave_capture",
    "let_autograd_own",
    "lower_rng",
    "make_boxed",
    "may_act_before_failing",
    "modules_of",
    "modules_with",
    "move_fake",
    "name_op",
    "new_key",
    "no_whole_graph",
    "not_compiled",
    "outside_trace",
    "overloads_of",
    "partitioner_tag",
    "parts_of",
    "policy_context",
    "policy_output",
    "region_keys",
    "remember_storage",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "seen_in",
    "selective_policy",
    "share_version",
    "shown",
    "size_hint",
    "split",
    "storage_addresses",
    "storage_id",
    "storage_key",
    "stream_of",
    "surrounding_hooks",
    "tag_side",
    "through_dynamo",
    "torch_checkpoint",
    "torch_selective_contexts",
    "trace_joint",
    "traced_nodes",
    "tracing_lock",
    "unbounded_sizes",
    "untag_side",
    "unwrap_syncs",
    "upper_bound",
    "watch_backward",
    "with_code",
    "without_torch_regions",
    "wrap_syncs",
    "written_after",
]
