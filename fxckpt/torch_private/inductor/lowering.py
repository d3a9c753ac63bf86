"""Inductor's own lowering of a half, asked for before it compiles: looked at, and kept for the compile that follows."""

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
from fxckpt.torch_private.dynamo import outside_trace
from fxckpt.torch_private.inductor.cpp_outer_loops import whole_rows
from fxckpt.torch_private.inductor.default_partitioner import copied
from fxckpt.torch_private.inductor.early import compile_early
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.layouts import wants_channels_last
from fxckpt.torch_private.inductor.lowered import LoweredHalf, _Counted, _Kept
from fxckpt.torch_private.inductor.options import inductor_configuration, no_compiler


def free_early(half: fx.GraphModule) -> None:
    """Mark a half to be compiled to let go of each buffer when its last reader has run.

    Inductor keeps the memory for a later buffer of the same size where, by its own estimate, that does not raise the peak. The estimate counts
    twice what a kernel writes over, so that it may.
    """
    for node in half.graph.nodes:
        # What a half is given may share its metadata with the joint graph.
        if node.op == "call_function":
            node.meta[FREES_EARLY] = True


AS_PLANNED = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}
"""While a half is only looked at, nothing is timed,"""

UNTOLD = {"trace.enabled": False}
"""nor written to the folder that TORCH_COMPILE_DEBUG asks for, which is the compile's own."""

FREEING_EARLY = {"allow_buffer_reuse": False}

FREES_EARLY = "fxckpt_lets_go"
"""Metadata of the nodes of a half that is compiled so."""

WRITTEN_IN_PLACE = ("index_put", "_scatter", "auto_functionalized", "triton_kernel_wrapper")
"""In the names of ops that Inductor's reinplacing looks at."""


class Lowerings:
    """Lowers halves to be looked at; what Inductor compiles thereafter goes neither through its passes nor through lowering twice.

    A lowered graph is handed out once, for a graph of the same nodes, in the same places and layouts, with the same inputs and configuration.
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
        """Let Inductor lower and schedule a copy of a half as it would to compile it, and read what it allocates; no code is made.

        ``donated`` are the inputs of a backward that it may write over, by position; None for a forward. ``strides`` are those of inputs that do
        not come in the layout they were traced in.
        """
        from torch._guards import detect_fake_mode
        from torch._inductor import compile_fx, config

        gm = copied(half)
        mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
        inputs = _laid_out(gm, strides)
        assert mode is not None, "a captured graph has fake values"
        configured = inductor_configuration()
        is_timed = any(getattr(config, name) != value for name, value in AS_PLANNED.items())
        _mark_visible_outputs(gm, is_backward=donated is not None)
        compile_fx.view_to_reshape(gm)  # type: ignore[attr-defined]
        with _only_looking(
            gm, mode, "forward" if donated is None else "backward", self.keep_order
        ) as counted:
            if strides or _writes_what_runs_again(gm):
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
        """Compile one half as ``compile_fx_inner`` does, which goes on with what was lowered where it would lower just that."""
        from torch._inductor import compile_fx, config
        from torch._inductor.utils import get_donated_idxs

        names = ("_recursive_post_grad_passes", "GraphLowering")
        stock: list[Any] = [vars(compile_fx)[name] for name in names]
        passes: Any = stock[0]
        lowering: Any = stock[1]
        passed: dict[fx.GraphModule, _Kept] = {}
        configured = inductor_configuration()
        given_to_gm = _given(
            example_inputs, list(get_donated_idxs() or ()) if given.get("is_backward") else []
        )

        def offered_passes(gm: fx.GraphModule, is_inference: bool = False) -> None:
            kept = self._same(gm, given_to_gm, configured) if not is_inference else None
            if kept is None:
                passes(gm, is_inference)
            else:
                _take_over(gm, kept.graph.module)
                kept.counted.add()
                passed[gm] = kept

        class Offered(lowering):
            def __new__(cls, gm: fx.GraphModule, **given: Any) -> Any:
                # No instance of this class, so that it is not initialized again.
                kept = passed.get(gm)
                if kept is not None and _is_as_lowered(kept, given):
                    return _handed_over(kept.graph, given)
                # What compile_fx_inner is told of layouts is in the cache's key, and goes no further.
                forced = wants_channels_last(gm)
                return lowering(
                    gm, **(given if forced is None else {**given, "layout_opt": forced})
                )

        offered: list[Any] = [offered_passes, Offered]
        try:
            vars(compile_fx).update(zip(names, offered, strict=True))
            with (
                config.patch(
                    FREEING_EARLY
                    if any(FREES_EARLY in node.meta for node in gm.graph.nodes)
                    else {}
                ),
                whole_rows(),
            ):
                return compile_fx.compile_fx_inner(
                    gm, example_inputs, **{"layout_opt": wants_channels_last(gm), **given}
                )
        finally:
            vars(compile_fx).update(zip(names, stock, strict=True))
            is_backward = given.get("is_backward", False)
            self._kept = [kept for kept in self._kept if kept.graph.is_backward != is_backward]

    def compile_alone(
        self, half: fx.GraphModule, is_backward: bool, strides: Mapping[str, tuple[int, ...]]
    ) -> Any:
        """Compile a half, which is left alone, to a function of a list that it empties; ``strides`` as for :meth:`lower`."""
        from torch._inductor import config
        from torch._inductor.utils import BoxedBool

        gm = copied(half)
        inputs = _laid_out(gm, strides)
        _mark_visible_outputs(gm, is_backward=is_backward)
        with config.patch({"_pre_fusion_custom_pass": self.keep_order}):
            return self.compile(gm, inputs, is_backward=is_backward, cudagraphs=BoxedBool(False))

    def _identity(self, gm: fx.GraphModule) -> Any:
        """Return what decides how a graph is lowered, its inputs aside; two that are equal are lowered alike."""
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
            # As text, nodes are their names and sizes what they stand for: two sizes cannot be compared without a guard.
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
        """Return what was lowered of a graph that Inductor is about to lower; None if nothing was. It is not returned again."""
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


@contextlib.contextmanager
def _only_looking(
    gm: fx.GraphModule, mode: Any, half: str, keep_order: KeepExecutionOrder | None
) -> Iterator[_Counted]:
    """Let a half be lowered as in a compile of it, with nothing timed, written or counted by Inductor; hold what it would have counted."""
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.virtualized import V

    with (
        # As in a compile: what Inductor makes up on the way would otherwise be fake, which takes longer.
        outside_trace(),
        V.set_fake_mode(mode),
        V.set_debug_handler(DebugContext()),
        _counted_apart() as counted,
        config.patch(AS_PLANNED | UNTOLD | {"_pre_fusion_custom_pass": keep_order}),
        compile_fx.get_cuda_device_context(gm),
        _named(half),
        torch.no_grad(),
    ):
        yield counted


def _scheduled(
    gm: fx.GraphModule, inputs: list[Any], shape_env: Any, donated: Sequence[int] | None
) -> tuple[Any, LoweredHalf]:
    """Return Inductor's lowering of a half after its passes, scheduled, and what is read from that."""
    from torch._inductor import compile_fx, config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    # Not at the top: it imports the whole of Inductor, which takes long.
    from fxckpt.torch_private.inductor.buffers import read_schedule

    # torch 2.11 finds the decompositions by itself.
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
            # Of a graph with graphs inside, those were scheduled, and cannot be scheduled again.
            if donated is not None and config.allow_buffer_reuse and not found.inside:
                with config.patch(FREEING_EARLY):
                    found = replace(found, letting_go=read_schedule(graph))
    return graph, found


def _writes_what_runs_again(gm: fx.GraphModule) -> bool:
    """Return whether Inductor may let an op write over a value that was made again.

    It asks by the storages of the nodes' values, which those that run again share with the first run until they are propagated anew.
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
    """Make ``gm`` what it would be after Inductor's passes: they made ``passed`` of an equal graph."""
    for node in passed.graph.find_nodes(op="get_attr"):
        setattr(gm, node.target, getattr(passed, node.target))
    gm.graph = passed.graph


def _laid_out(gm: fx.GraphModule, strides: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Return the values of a graph's inputs, those in ``strides`` laid out like that."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in placeholders:
        value = node.meta["val"]
        if node.name in strides and tuple(value.stride()) != strides[node.name]:
            node.meta["val"] = value.as_strided(value.shape, strides[node.name])
    return [node.meta["val"] for node in placeholders]


@contextlib.contextmanager
def _errors_of_inductor() -> Iterator[None]:
    """Tell what Inductor cannot lower from what fxckpt cannot plan."""
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
            "Without backend='fxckpt' torch.compile lowers the same ops: where it fails too, that is a limit of Inductor, "
            "and options={'inner': 'aot_eager'}, fxckpt.Backend(inner='aot_eager') plans without it; where it does not, this is a defect of fxckpt."
        ) from error


@contextlib.contextmanager
def _named(half: str) -> Iterator[None]:
    """Let what is lowered bear the name that it will be compiled under, in place of the joint graph's."""
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
    """Mark the outputs whose strides the user sees, as compile_fx marks them: Inductor keeps them as they are."""
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
    """Return what decides how Inductor lowers a graph beside the graph: its inputs, those that it may write over."""
    from torch._inductor.utils import should_assume_input_aligned

    aligned = [isinstance(t, torch.Tensor) and should_assume_input_aligned(t) for t in inputs]
    return [_layout(t) for t in inputs], donated, aligned


def _constant(value: Any) -> Any:
    """Return what tells a constant of a graph from others: a small one, which may be copied between two looks, by what it holds."""
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
    """Return whether Inductor lowers with what :class:`Lowerings` lowered with, beside the graph and its inputs."""
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
    """Return a lowered and scheduled graph that, told to lower and schedule itself, does nothing, once."""
    for name in ("example_inputs", "graph_id", "inputs_to_check"):
        setattr(graph, name, given.get(name))
    for name in ("run", "init_wrapper_code", "_update_scheduler"):
        vars(graph)[name] = _once(graph, name)
    compile_early(graph.wrapper_code)
    return graph


def _once(graph: Any, name: str) -> Any:
    def nothing(*args: Any) -> None:
        del vars(graph)[name]

    return nothing


@contextlib.contextmanager
def _counted_apart() -> Iterator[_Counted]:
    """Put Inductor's metrics and pattern counters back at the end, and hold by how much they changed."""
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
