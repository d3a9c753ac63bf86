"""Inductor's own lowering of a half, asked for before it compiles: looked at, and kept for the compile that follows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.torch_private.inductor import KeepOrder, copied


@dataclass(frozen=True)
class LoweredHalf:
    """What Inductor makes of a forward or a backward, kernel by kernel, in the order it runs them.

    A buffer lives from its first kernel to its last, both included; ``len(kernels)`` stands for the end.
    """

    kernels: tuple[tuple[str, ...], ...]
    """Per kernel: the graph's nodes it was made from."""
    inside: dict[int, int]
    """Kernels that run graphs of their own (branches, loops): the bytes that these allocate beyond what they return."""
    allocated: tuple[tuple[str, int, int, int], ...]
    """Buffers that the half allocates: name, bytes, first and last kernel."""
    last_read: dict[str, int]
    """Per input of the graph: the last kernel that reads it, -1 if none does."""
    outputs: tuple[tuple[str, tuple[int, ...]] | None, ...]
    """Per output of the graph: the buffer or input it lies in, and its strides; None for what is no tensor."""


def live_bytes(half: LoweredHalf) -> npt.NDArray[np.int64]:
    """Return the bytes of a half's own buffers during each kernel, and at its end."""
    change = np.zeros(len(half.kernels) + 2, dtype=np.int64)
    for _, nbytes, first, last in half.allocated:
        change[first] += nbytes
        change[last + 1] -= nbytes
    return np.cumsum(change)[:-1]


AS_PLANNED = {"max_autotune": False, "max_autotune_gemm": False, "max_autotune_pointwise": False, "coordinate_descent_tuning": False}
"""While a half is only looked at, nothing is timed."""


class Lowerings:
    """Lowers halves to be looked at; what Inductor compiles thereafter is not lowered twice.

    A lowered graph is handed out once, for a graph of the same nodes, in the same layouts, with the same inputs and configuration.
    """

    def __init__(self, keep_order: KeepOrder | None) -> None:
        self.keep_order = keep_order
        self._kept: list[tuple[Any, Any]] = []

    def lower(self, half: fx.GraphModule, donated: Sequence[int] | None, strides: Mapping[str, tuple[int, ...]]) -> LoweredHalf:
        """Let Inductor lower and schedule a copy of a half as it would to compile it, and read what it allocates; no code is made.

        ``donated`` are the inputs of a backward that it may write over, by position; None for a forward. ``strides`` are those of inputs that do
        not come in the layout they were traced in.
        """
        from torch._guards import detect_fake_mode
        from torch._inductor import compile_fx, config
        from torch._inductor.debug import DebugContext
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.graph import GraphLowering
        from torch._inductor.virtualized import V

        # Not at the top: it imports the whole of Inductor, which takes long.
        from fxckpt.torch_private.scheduled import read_schedule

        gm = copied(half)
        mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
        inputs = _laid_out(gm, strides)
        assert mode is not None, "a captured graph has fake values"
        is_timed = any(getattr(config, name) != value for name, value in AS_PLANNED.items())
        _mark_visible_outputs(gm, is_backward=donated is not None)
        compile_fx.view_to_reshape(gm)  # type: ignore[attr-defined]
        with (
            V.set_fake_mode(mode),
            V.set_debug_handler(DebugContext()),
            _counters_left_alone(),
            config.patch(AS_PLANNED | {"_pre_fusion_custom_pass": self.keep_order}),
            compile_fx.get_cuda_device_context(gm),
            _named("forward" if donated is None else "backward"),
            torch.no_grad(),
        ):
            if strides:
                compile_fx.fake_tensor_prop(gm, inputs)  # type: ignore[attr-defined]
            compile_fx.record_original_output_strides(gm)
            compile_fx._recursive_post_grad_passes(gm, is_inference=False)
            with compile_fx.maybe_disable_comprehensive_padding(inputs):  # type: ignore[attr-defined]
                # torch 2.11 finds the decompositions by itself.
                takes_them = "get_decomp_fn" in signature(GraphLowering.__init__).parameters
                more: dict[str, Any] = {"get_decomp_fn": select_decomp_table} if takes_them else {}
                graph = GraphLowering(gm, example_inputs=inputs, shape_env=mode.shape_env, is_backward=donated is not None, **more)
                graph.bw_donated_idxs = list(donated or ())
                graph.freeze_runtime_asserts()
                with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                    graph.run(*inputs)
                    graph.init_wrapper_code()
                    graph._update_scheduler()
                    found = read_schedule(graph)
        # Of a graph with graphs inside, those were scheduled, and cannot be scheduled again.
        if not is_timed and not found.inside:
            self._kept.append((_identity(gm, inputs, list(donated or ())), graph))
        return found

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Any:
        """Compile one half as ``compile_fx_inner`` does, which goes on with what was lowered where it would lower just that."""
        from torch._inductor import compile_fx

        stock: Any = vars(compile_fx)["GraphLowering"]

        class Offered(stock):
            def __new__(cls, gm: fx.GraphModule, **given: Any) -> Any:
                # No instance of this class, so that it is not initialized again.
                return self._take(gm, given) or stock(gm, **given)

        vars(compile_fx)["GraphLowering"] = Offered
        try:
            return compile_fx.compile_fx_inner(gm, example_inputs, **given)
        finally:
            vars(compile_fx)["GraphLowering"] = stock
            is_backward = given.get("is_backward", False)
            self._kept = [kept for kept in self._kept if kept[1].is_backward != is_backward]

    def compile_alone(self, half: fx.GraphModule, is_backward: bool, strides: Mapping[str, tuple[int, ...]]) -> Any:
        """Compile a half, which is left alone, to a function of a list that it empties; ``strides`` as for :meth:`lower`."""
        from torch._inductor import config
        from torch._inductor.utils import BoxedBool

        gm = copied(half)
        inputs = _laid_out(gm, strides)
        _mark_visible_outputs(gm, is_backward=is_backward)
        with config.patch({"_pre_fusion_custom_pass": self.keep_order}):
            return self.compile(gm, inputs, is_backward=is_backward, cudagraphs=BoxedBool(False))

    def _take(self, gm: fx.GraphModule, given: dict[str, Any]) -> Any:
        """Return what was lowered of a graph that Inductor lowers now; None if nothing was."""
        from torch._inductor.utils import get_donated_idxs

        if not self._kept:
            return None
        donated = list(get_donated_idxs() or ()) if given.get("is_backward") else []
        identity = _identity(gm, given["example_inputs"], donated)
        for kept in self._kept:
            if kept[0] == identity and _is_plain(given, kept[1]):
                self._kept.remove(kept)
                return _handed_over(kept[1], given)
        return None


def _laid_out(gm: fx.GraphModule, strides: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Return the values of a graph's inputs, those in ``strides`` laid out like that."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in placeholders:
        value = node.meta["val"]
        if node.name in strides and tuple(value.stride()) != strides[node.name]:
            node.meta["val"] = value.as_strided(value.shape, strides[node.name])
    return [node.meta["val"] for node in placeholders]


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
        visible = [i for i, of in enumerate(output.meta.get("desc", ())) if isinstance(of, PlainAOTOutput)]
    output.meta["user_visible_output_idxs"] = [i for i in visible if isinstance(values[i], fx.Node)]


def _identity(gm: fx.GraphModule, inputs: Sequence[Any], donated: list[int]) -> Any:
    """Return what decides how Inductor lowers a graph; two that are equal are lowered alike."""
    from torch._inductor.utils import should_assume_input_aligned

    def value(given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return str(given)
        strided = (given.stride(), given.storage_offset()) if given.layout == torch.strided else ()
        return str((given.shape, strided, given.dtype, given.device))

    def argument(given: Any) -> Any:
        return given.name if isinstance(given, fx.Node) else str(given)

    nodes = []
    for node in gm.graph.nodes:
        target = id(getattr(gm, node.target)) if node.op == "get_attr" and "." not in node.target else node.target
        arguments = pytree.tree_map_only((fx.Node, torch.SymInt), argument, (node.args, dict(node.kwargs)))
        made = pytree.tree_map(value, node.meta.get("val")) if node.op in ("placeholder", "call_function") else None
        nodes.append((node.op, node.name, target, str(arguments), made))
    output = gm.graph.output_node().meta
    visible = (output.get("user_visible_output_idxs"), str(output.get("original_output_strides")))
    aligned = [isinstance(t, torch.Tensor) and should_assume_input_aligned(t) for t in inputs]
    return nodes, [value(t) for t in inputs], visible, donated, aligned


def _is_plain(given: dict[str, Any], graph: Any) -> bool:
    """Return whether Inductor lowers with what :class:`Lowerings` lowered with, beside the graph."""
    from torch._inductor.decomposition import select_decomp_table

    special = ("cpp_wrapper", "fx_wrapper", "aot_mode", "is_inference", "const_module", "const_output_index")
    return (
        not any(given.get(name) for name in special)
        and given.get("shape_env") is graph._shape_env
        and given.get("is_backward", False) == graph.is_backward
        and given.get("get_decomp_fn", select_decomp_table) is select_decomp_table
    )


def _handed_over(graph: Any, given: dict[str, Any]) -> Any:
    """Return a lowered and scheduled graph that, told to lower and schedule itself, does nothing, once."""
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
def _counters_left_alone() -> Iterator[None]:
    """Put Inductor's metrics and pattern counters back: what is lowered here is not compiled."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    before = copy.deepcopy(dict(counters))
    figures = {name: getattr(metrics, name) for name in metrics.get_metric_fields()}
    try:
        yield
    finally:
        for name, figure in figures.items():
            setattr(metrics, name, figure)
        counters.clear()
        counters.update(before)
