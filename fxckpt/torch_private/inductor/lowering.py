"""Inductor's own lowering of a half, before the compile: examined, and kept for the compile."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.errors import FxckptError, PlanningFailed
from fxckpt.torch_private.capture.dynamo import outside_trace
from fxckpt.torch_private.inductor.cpp_outer_loops import whole_rows
from fxckpt.torch_private.inductor.default_partitioner import copied
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.known_sizes import write_known_sizes
from fxckpt.torch_private.inductor.layouts import wants_channels_last
from fxckpt.torch_private.inductor.lowered import LoweredHalf, _Counted, _Kept
from fxckpt.torch_private.inductor.options import inductor_configuration, no_compiler
from fxckpt.torch_private.versions import is_newer


def free_early(half: fx.Graph) -> None:
    """Mark a half to be compiled so that it frees each buffer after its last reader.

    Inductor keeps the memory for a later buffer of the same size if, by its estimate, that does not
    raise the peak. It may raise it: the estimate counts a buffer twice that a kernel overwrites.
    """
    for node in half.nodes:
        # Inputs of a half may share their metadata with the joint graph.
        if node.op == "call_function":
            node.meta[FREES_EARLY] = True


AS_PLANNED = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}
"""Options while a half is only examined: nothing is timed."""

NO_TRACE = {"trace.enabled": False}
"""Options that keep an examined half out of ``TORCH_COMPILE_DEBUG``'s folder."""

FREEING_EARLY = {"allow_buffer_reuse": False}
"""Options of a half that frees each buffer after its last reader."""

IN_PLANNED_ORDER = {"triton.reorder_for_reducing_graph_partitions": False}
"""Options of a half without CUDA graphs, whatever the mode.

Inductor partitions a graph for CUDA graphs on the CPU too, and then delays each kernel that only
makes outputs to the end, with its operands alive.
"""

FREES_EARLY = "fxckpt_frees_early"
"""Key in the metadata of the nodes of a half that is compiled with :data:`FREEING_EARLY`."""

WRITTEN_IN_PLACE = ("index_put", "_scatter", "auto_functionalized", "triton_kernel_wrapper")
"""Parts of the names of ops that Inductor's reinplacing rewrites."""


class Lowerings:
    """Lowers halves ahead of their compile, which then skips Inductor's passes and lowering.

    A lowered graph serves one compile, of a graph of the same nodes in the same order and layouts,
    with the same inputs and options.
    """

    def __init__(self, keep_order: KeepExecutionOrder | None) -> None:
        self.keep_order = keep_order
        self._kept: list[_Kept] = []

    def lower(
        self,
        half: fx.GraphModule,
        donated: Sequence[int] | None,
        strides: Mapping[str, tuple[int, ...]],
    ) -> LoweredHalf:
        """Lower and schedule a copy of a half as for a compile, and return its kernels and buffers.

        No code is generated. ``donated`` are the positions of inputs that a backward may overwrite,
        None for a forward; ``strides`` those of inputs whose layout differs from the traced one.
        """
        from torch._guards import detect_fake_mode
        from torch._inductor import compile_fx, config

        gm = copied(half)
        write_known_sizes(gm)
        mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
        inputs = _laid_out(gm, strides)
        assert mode is not None, "a captured graph has fake values"
        configured = inductor_configuration()
        is_timed = any(getattr(config, name) != value for name, value in AS_PLANNED.items())
        _mark_visible_outputs(gm, is_backward=donated is not None)
        compile_fx.view_to_reshape(gm)  # type: ignore[attr-defined]
        with _lowering_context(
            gm, mode, "forward" if donated is None else "backward", self.keep_order
        ) as counted:
            if strides or _overwrites_recomputed(gm):
                compile_fx.fake_tensor_prop(gm, inputs)  # type: ignore[attr-defined]
            compile_fx.record_original_output_strides(gm)
            identity = self._identity(gm)
            with _errors_of_inductor():
                compile_fx._recursive_post_grad_passes(gm, is_inference=False)
            graph, found = _scheduled(gm, inputs, mode.shape_env, donated)
        if not is_timed and not found.inside:
            self._kept.append(
                _Kept(identity, _given(inputs, list(donated or ())), configured, graph, counted)
            )
        return found

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Any:
        """Compile one half as ``compile_fx_inner`` does, from its lowered graph if there is one."""
        from torch._inductor import compile_fx, config
        from torch._inductor.utils import get_donated_idxs

        if is_newer():
            # Nothing of torch is patched there, so nothing can be patched wrongly.
            self._kept.clear()
            with config.patch(self._options(gm)):
                return compile_fx.compile_fx_inner(gm, example_inputs, **given)
        names = ("_recursive_post_grad_passes", "GraphLowering")
        original: list[Any] = [vars(compile_fx)[name] for name in names]
        passes: Any = original[0]
        lowering: Any = original[1]
        passed: dict[fx.GraphModule, _Kept] = {}
        configured = inductor_configuration()
        given_to_gm = _given(
            example_inputs, list(get_donated_idxs() or ()) if given.get("is_backward") else []
        )

        def kept_or_passes(gm: fx.GraphModule, is_inference: bool = False) -> None:
            kept = self._same(gm, given_to_gm, configured) if not is_inference else None
            if kept is None:
                passes(gm, is_inference)
            else:
                _take_over(gm, kept.graph.module)
                kept.counted.add()
                passed[gm] = kept

        class _KeptOrLowered(lowering):
            def __new__(cls, gm: fx.GraphModule, **given: Any) -> Any:
                # Not an instance of this class, so that __init__ does not run.
                kept = passed.get(gm)
                if kept is not None and _is_as_lowered(kept, given):
                    return _handed_over(kept.graph, given)
                # The layout option of compile_fx_inner is only part of the cache's key.
                forced = wants_channels_last(gm)
                return lowering(
                    gm, **(given if forced is None else {**given, "layout_opt": forced})
                )

        patched: list[Any] = [kept_or_passes, _KeptOrLowered]
        try:
            vars(compile_fx).update(zip(names, patched, strict=True))
            with config.patch(self._options(gm)), whole_rows():
                return compile_fx.compile_fx_inner(
                    gm, example_inputs, **{"layout_opt": wants_channels_last(gm), **given}
                )
        finally:
            vars(compile_fx).update(zip(names, original, strict=True))
            is_backward = given.get("is_backward", False)
            self._kept = [kept for kept in self._kept if kept.graph.is_backward != is_backward]

    def compile_alone(
        self, half: fx.GraphModule, is_backward: bool, strides: Mapping[str, tuple[int, ...]]
    ) -> Any:
        """Compile a copy of a half to a function of a list of inputs, which it empties.

        ``strides`` as for :meth:`lower`.
        """
        from torch._inductor import config
        from torch._inductor.utils import BoxedBool

        gm = copied(half)
        inputs = _laid_out(gm, strides)
        _mark_visible_outputs(gm, is_backward=is_backward)
        with config.patch({"_pre_fusion_custom_pass": self.keep_order}):
            return self.compile(gm, inputs, is_backward=is_backward, cudagraphs=BoxedBool(False))

    def compile_donated(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        donated: Sequence[int],
        **given: Any,
    ) -> Any:
        """Compile a whole backward that may write to the inputs ``donated``.

        They are positions among what AOTAutograd was given. The key of Inductor's cache lacks them:
        a configuration must tell such compiles apart.
        """
        from torch._functorch._aot_autograd.descriptors import PlainAOTInput
        from torch._guards import TracingContext

        metadata: Any = TracingContext.get().fw_metadata
        before, metadata.bw_donated_idxs = (
            metadata.bw_donated_idxs,
            [
                i
                for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))
                if isinstance(of := node.meta.get("desc"), PlainAOTInput) and of.idx in donated
            ],
        )
        try:
            # Inductor writes to inputs of backwards alone.
            given |= {"is_backward": True, "is_inference": False}
            return self.compile(gm, example_inputs, **given)
        finally:
            metadata.bw_donated_idxs = before

    def _options(self, gm: fx.GraphModule) -> dict[str, bool]:
        """Return the options of a half: to free early if it is marked so, and to stay in order."""
        is_marked = any(FREES_EARLY in node.meta for node in gm.graph.nodes)
        return (FREEING_EARLY if is_marked else {}) | _ordered(gm, self.keep_order)

    def _identity(self, gm: fx.GraphModule) -> Any:
        """Return all that determines the lowering of a graph, except its inputs."""
        mark, nodes = self.keep_order.mark if self.keep_order is not None else "", []
        for node in gm.graph.nodes:
            target = (
                _constant(getattr(gm, node.target))
                if node.op == "get_attr" and "." not in node.target
                else node.target
            )
            made = (
                pytree.tree_map(_layout, node.meta.get("val"))
                if node.op in ("placeholder", "call_function")
                else None
            )
            # Text, as two symbolic sizes cannot be compared without a guard.
            nodes.append(
                (
                    node.op,
                    node.name,
                    target,
                    str((node.args, node.kwargs)),
                    made,
                    node.meta.get(mark),
                )
            )
        output = gm.graph.output_node().meta
        return (
            nodes,
            output.get("user_visible_output_idxs"),
            str(output.get("original_output_strides")),
        )

    def _same(self, gm: fx.GraphModule, given: Any, configured: str) -> _Kept | None:
        """Remove and return the lowered graph that equals one to be lowered; None without it."""
        identity = self._identity(gm) if self._kept else None
        for kept in self._kept:
            if (
                kept.identity == identity
                and kept.given == given
                and kept.configuration == configured
            ):
                self._kept.remove(kept)
                return kept
        return None


def _ordered(gm: fx.GraphModule, keep_order: KeepExecutionOrder | None) -> dict[str, bool]:
    """Return :data:`IN_PLANNED_ORDER` for a half held to an order that is on the CPU alone."""
    if keep_order is None or not any(keep_order.mark in node.meta for node in gm.graph.nodes):
        return {}
    leaves = (t for node in gm.graph.nodes for t in pytree.tree_leaves(node.meta.get("val")))
    is_cpu = all(t.device.type == "cpu" for t in leaves if isinstance(t, torch.Tensor))
    return IN_PLANNED_ORDER if is_cpu else {}


@contextlib.contextmanager
def _lowering_context(
    gm: fx.GraphModule, mode: Any, half: str, keep_order: KeepExecutionOrder | None
) -> Iterator[_Counted]:
    """Provide the context of a compile, with nothing timed, traced or counted by Inductor.

    Yields the counts that Inductor would have made.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.virtualized import V

    with (
        # As in a compile: tensors that Inductor creates would otherwise be fake, which is slower.
        outside_trace(),
        V.set_fake_mode(mode),
        V.set_debug_handler(DebugContext()),
        _counted_apart() as counted,
        config.patch(
            AS_PLANNED
            | NO_TRACE
            | _ordered(gm, keep_order)
            | {"_pre_fusion_custom_pass": keep_order}
        ),
        compile_fx.get_cuda_device_context(gm),
        _named(half),
        torch.no_grad(),
    ):
        yield counted


def _scheduled(
    gm: fx.GraphModule, inputs: list[Any], shape_env: Any, donated: Sequence[int] | None
) -> tuple[Any, LoweredHalf]:
    """Return Inductor's lowered and scheduled graph of a half after its passes, and its buffers."""
    from torch._inductor import compile_fx, config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    # Not at the top: it imports all of Inductor, which is slow.
    from fxckpt.torch_private.inductor.buffers import read_schedule

    # torch 2.11 finds the decompositions itself.
    takes_them = "get_decomp_fn" in signature(GraphLowering.__init__).parameters
    more: dict[str, Any] = {"get_decomp_fn": select_decomp_table} if takes_them else {}
    more |= {"is_backward": donated is not None, "layout_opt": wants_channels_last(gm)}
    with compile_fx.maybe_disable_comprehensive_padding(inputs):  # type: ignore[attr-defined]
        graph = GraphLowering(gm, example_inputs=inputs, shape_env=shape_env, **more)
        graph.bw_donated_idxs = list(donated or ())
        graph.freeze_runtime_asserts()
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            with _errors_of_inductor():
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
            found = read_schedule(graph)
            # Subgraphs were scheduled by the first reading, and cannot be a second time.
            if donated is not None and config.allow_buffer_reuse and not found.inside:
                with config.patch(FREEING_EARLY):
                    found = replace(found, freeing_early=read_schedule(graph))
    return graph, found


def _overwrites_recomputed(gm: fx.GraphModule) -> bool:
    """Return whether Inductor may let an op overwrite a recomputed value.

    It decides by the storages of fake values, which a recomputed value shares with the first one
    until values are propagated through the half.
    """
    ops = (
        n
        for n in gm.graph.nodes
        if n.op == "call_function" and any(name in str(n.target) for name in WRITTEN_IN_PLACE)
    )
    return any(
        "recompute_of" in each.meta.get("custom", {})
        for node in ops
        for each in (node, *node.all_input_nodes)
    )


def _take_over(gm: fx.GraphModule, passed: fx.GraphModule) -> None:
    """Turn ``gm`` into ``passed``, the result of Inductor's passes on an equal graph."""
    for node in passed.graph.find_nodes(op="get_attr"):
        setattr(gm, node.target, getattr(passed, node.target))
    gm.graph = passed.graph


def _laid_out(gm: fx.GraphModule, strides: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Return the fake inputs of a graph, those in ``strides`` with these strides."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in placeholders:
        value = node.meta["val"]
        if node.name in strides and tuple(value.stride()) != strides[node.name]:
            node.meta["val"] = value.as_strided(value.shape, strides[node.name])
    return [node.meta["val"] for node in placeholders]


@contextlib.contextmanager
def _errors_of_inductor() -> Iterator[None]:
    """Raise errors of Inductor's lowering as :class:`PlanningFailed`."""
    from torch._inductor.exc import InvalidCxxCompiler, TritonMissing

    try:
        yield
    except (FxckptError, Warning):
        raise
    except (InvalidCxxCompiler, TritonMissing) as error:
        raise no_compiler(error) from error
    except Exception as error:
        raise PlanningFailed(
            f"Inductor does not lower this graph: {type(error).__name__}: {error}\n"
            "Without backend='fxckpt' torch.compile lowers the same ops: where it fails too, that "
            "is a limit of Inductor, and options={'inner': 'aot_eager'}, "
            "fxckpt.Backend(inner='aot_eager') plans without it; where it does not, this is a "
            "defect of fxckpt."
        ) from error


@contextlib.contextmanager
def _named(half: str) -> Iterator[None]:
    """Name the lowered graph as its compile will, in place of the joint graph's name."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    before = context.aot_graph_name if context is not None else None
    if context is not None and before:
        context.aot_graph_name = [name.replace("_joint", f"_{half}") for name in before]
    try:
        yield
    finally:
        if context is not None:
            context.aot_graph_name = before


def _mark_visible_outputs(gm: fx.GraphModule, *, is_backward: bool) -> None:
    """Mark the outputs whose strides are visible to the user, as compile_fx does.

    Inductor preserves their strides.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
    from torch._inductor import config

    output = gm.graph.output_node()
    values = pytree.arg_tree_leaves(*output.args)
    visible: list[int] = []
    if is_backward and config.bw_outputs_user_visible:
        visible = list(range(len(values)))
    if not is_backward and config.keep_output_stride:
        visible = [
            i for i, of in enumerate(output.meta.get("desc", ())) if isinstance(of, PlainAOTOutput)
        ]
    output.meta["user_visible_output_idxs"] = [i for i in visible if isinstance(values[i], fx.Node)]


def _given(inputs: Sequence[Any], donated: list[int]) -> Any:
    """Return the inputs' part of a lowering's identity: layouts, donated inputs and alignment."""
    from torch._inductor.utils import should_assume_input_aligned

    aligned = [isinstance(t, torch.Tensor) and should_assume_input_aligned(t) for t in inputs]
    return [_layout(t) for t in inputs], donated, aligned


def _constant(value: Any) -> Any:
    """Return the identity of a constant: the values of a small one, which may be copied."""
    if (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.numel() <= 1000
    ):
        return _layout(value), str(value.tolist())
    return id(value)


def _layout(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    strided = (value.stride(), value.storage_offset()) if value.layout == torch.strided else ()
    return str((value.shape, strided, value.dtype, value.device))


def _is_as_lowered(kept: _Kept, given: dict[str, Any]) -> bool:
    """Return whether Inductor lowers with the same settings as :class:`Lowerings` did."""
    from torch._inductor.decomposition import select_decomp_table

    special = (
        "cpp_wrapper",
        "fx_wrapper",
        "aot_mode",
        "is_inference",
        "const_module",
        "const_output_index",
    )
    return (
        not any(given.get(name) for name in special)
        and given.get("shape_env") is kept.graph._shape_env
        and given.get("is_backward", False) == kept.graph.is_backward
        and given.get("get_decomp_fn", select_decomp_table) is select_decomp_table
    )


def _handed_over(graph: Any, given: dict[str, Any]) -> Any:
    """Return a lowered graph that skips the next request to lower and schedule itself."""
    for name in ("example_inputs", "graph_id", "inputs_to_check"):
        setattr(graph, name, given.get(name))
    for name in ("run", "init_wrapper_code", "_update_scheduler"):
        vars(graph)[name] = _once(graph, name)
    return graph


def _once(graph: Any, name: str) -> Any:
    def nothing(*args: Any) -> None:
        del vars(graph)[name]

    return nothing


@contextlib.contextmanager
def _counted_apart() -> Iterator[_Counted]:
    """Restore Inductor's metrics and Dynamo's counters at the end; yield their differences."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    before = copy.deepcopy(dict(counters))
    helper, counted = metrics.CachedMetricsHelper(), _Counted()
    try:
        yield counted
    finally:
        counted.deltas.append(helper.get_deltas())
        for name, figure in helper.cached_metrics.items():
            setattr(metrics, name, figure)
        for name, now in counters.items():
            counted.counters[name] = now - before.get(name, Counter())
        counters.clear()
        counters.update(before)
