"""What fxckpt asks of Inductor: which ops it fuses, what its own partitioner saves, and what it makes of two halves."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, get_origin

import torch
from torch import fx
from torch._inductor import custom_graph_pass, inductor_prims
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fxckpt.errors import InnerCompilerMissing, InvalidOption
from fxckpt.torch_private import size_hint

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Size and strides of a tensor."""
INDEXING = frozenset(
    (
        *("arange", "empty", "full", "full_like", "inductor_random", "iota", "scalar_tensor"),
        *("_to_copy", "clone", "convert_element_type", "copy", "lift_fresh_copy", "fma"),
        *(
            "_unsafe_index",
            "_unsafe_masked_index",
            "cat",
            "constant_pad_nd",
            "embedding",
            "flip",
            "gather",
            "index",
            "repeat",
            "rev",
            "select_scatter",
            "slice_scatter",
        ),
    )
)
"""Ops that Inductor lowers to element-wise loops, though torch does not tag them as pointwise: they read by an index, make or cast."""


def fuses(node: fx.Node) -> bool:
    """Return whether Inductor lowers an op to an element-wise loop that its readers may take into their own."""
    target = node.target
    return is_view(node) or (isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target._opname in INDEXING))


def is_view(node: fx.Node) -> bool:
    """Return whether an op returns what it reads, shown otherwise."""
    if not isinstance(node.target, OpOverload):
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def stock_saved(joint: fx.GraphModule, *, num_fwd_outputs: int, **given: Any) -> frozenset[str]:
    """Return the names of what torch's own partitioner saves of a joint graph, which is left alone."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward, _ = min_cut_rematerialization_partition(copied(joint), None, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **given)
    (output,) = forward.graph.find_nodes(op="output")
    return frozenset(n.name for n in output.args[0][num_fwd_outputs:] if isinstance(n, fx.Node))


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph module that holds the same constants: real tensors, which cannot be copied among fake ones."""
    constants = (*gm.buffers(), *gm.parameters(), *(value for module in gm.modules() for value in vars(module).values()))
    return copy.deepcopy(gm, {id(c): c for c in constants if isinstance(c, torch.Tensor)})


def cache_folder() -> Path | None:
    """Return the folder of Inductor's caches; None where that of compiled graphs is off."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) if config.fx_graph_cache and not config.force_disable_caches else None


PLUGS = ("custom_partitioner_fn", "_pre_fusion_custom_pass")
"""Options of Inductor's that hold our own code."""


def configuration() -> str:
    """Return Inductor's and AOTAutograd's options as text, ours aside."""
    from torch._functorch import config as functorch

    return repr(sorted((name, repr(value)) for name, value in functorch.get_config_copy().items())) + inductor_configuration()


def inductor_configuration() -> str:
    """Return Inductor's options as text, ours aside."""
    from torch._inductor import config as inductor

    return repr(sorted((name, repr(value)) for name, value in inductor.get_config_copy().items() if name not in PLUGS))


def changes_layout(half: fx.GraphModule) -> bool:
    """Return whether Inductor gives values other layouts than they were traced in (channels last around convolutions)."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(half, is_inference=False))


FORCE_STRIDE_ORDER = inductor_prims.force_stride_order
"""Inductor's own op that lays a value out: ``(tensor, strides) -> tensor``."""


def wants_channels_last(half: fx.GraphModule) -> bool | None:
    """Return whether Inductor is to lay a half's images out channels last: where the half forces it on one; None leaves it to Inductor."""
    forced = (node.meta["val"] for node in half.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER))
    images = (value for value in forced if value.dim() == 4 and not value.is_contiguous())
    return True if any(value.is_contiguous(memory_format=torch.channels_last) for value in images) else None


def is_convolution(node: fx.Node) -> bool:
    """Return whether an op is a convolution, or its backward, whose operands Inductor may lay out anew."""
    return node.target in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def channels_last(node: fx.Node) -> fx.Node:
    """Return a call like ``node`` in a graph of its own, its images channels last; Inductor leaves signals and volumes as they are."""

    def given(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        is_image = isinstance(value, torch.Tensor) and value.dim() == 4
        return torch.empty_like(value, memory_format=torch.channels_last) if is_image else value

    return _called_with(node, given)


def laid_out(node: fx.Node, layouts: Sequence[Layout]) -> fx.Node | None:
    """Return a call like ``node``, its tensors laid out like that, in their order; itself if they were traced so, None if it is not of those."""
    args = [arg for arg in pytree.arg_tree_leaves(*node.args, **node.kwargs) if isinstance(arg, fx.Node)]
    operands = [arg for arg in args if isinstance(arg.meta.get("val"), torch.Tensor)]
    sizes = [tuple(map(size_hint, operand.meta["val"].shape)) for operand in operands]
    if not isinstance(node.target, OpOverload) or sizes != [size for size, _ in layouts]:
        return None
    pairs = (
        (operand, stride, tuple(map(size_hint, operand.meta["val"].stride())))
        for operand, (_, stride) in zip(operands, layouts, strict=True)
    )
    relaid = {operand: stride for operand, stride, traced in pairs if stride != traced}

    def given(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        return value.as_strided(value.shape, relaid[operand]) if operand in relaid else value

    return _called_with(node, given) if relaid else node


def _called_with(node: fx.Node, given: Callable[[fx.Node], Any]) -> fx.Node:
    graph = fx.Graph()

    def placeholder(operand: fx.Node) -> fx.Node:
        made = graph.placeholder(operand.name)
        made.meta["val"] = given(operand)
        return made

    return graph.node_copy(node, placeholder)


def may_donate() -> bool:
    """Return whether a compiled backward may write over what the forward saved for it alone."""
    from torch._functorch import config

    return bool(config.donated_buffer)


# torch 2.11 has one class for passes of graphs and of schedules.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)


class KeepOrder(_SchedulerPass):  # type: ignore[misc]
    """Keeps what a backward runs again from running before its turn, and its own library calls in the order that was planned.

    Kernels that read the same parameters are fused wherever they stand, which would run the same layer's recomputations of many stages at once, with
    all their results alive. A kernel that runs something again is made to wait for the last of the backward's own kernels that come before it
    in the graph: a dependency for the order alone, which keeps nothing alive and costs nothing when the step runs. Library calls, which are not
    fused with each other, wait for the one before: a product put off keeps its operands, and Inductor puts it off where by its own
    estimate, which knows of no kernel that writes over what it reads, the peak is elsewhere.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Add the dependencies to a list of scheduler nodes, and sort it by them."""
        from torch._inductor.dependencies import WeakDep
        from torch._inductor.scheduler import FusedSchedulerNode
        from torch._inductor.virtualized import V

        if any(isinstance(node, FusedSchedulerNode) for node in nodes):
            return nodes  # What is one kernel already has no single place.
        places = _places(nodes, self.mark)
        own = sorted((order, i) for i, (order, again) in enumerate(places) if again is False and nodes[i].get_outputs())
        if not own:
            return nodes

        def wait(node: Any, before: Any) -> None:
            node.add_fake_dep(WeakDep(before.get_outputs()[0].get_name(), mutating_buf=node.get_first_name(), is_fake=True))

        for node, (order, again) in zip(nodes, places, strict=True):
            before = bisect_left(own, (order, -1)) if again else 0
            if before:
                wait(node, nodes[own[before - 1][1]])
        calls = [nodes[i] for _, i in own if nodes[i].is_extern()]
        for earlier, later in pairwise(calls):
            wait(later, earlier)
        scheduler = V.graph.scheduler
        scheduler.nodes = scheduler.topological_sort_schedule(nodes)
        scheduler.compute_ancestors()
        return list(scheduler.nodes)

    def uuid(self) -> str:
        """Return what tells this pass from others; where it applies follows from the graph."""
        return f"fxckpt keeps the order of {self.mark}"


def _places(nodes: Sequence[Any], mark: str) -> list[tuple[int, bool | None]]:
    """Return for each node, in an order that dependencies allow, its place and whether it runs something again; None for what has no mark.

    No node is placed before what it depends on, whatever its mark: what Inductor makes of several nodes has no mark of its own. Dependencies on
    what has an earlier place can so make no cycle.
    """
    found: list[tuple[int, bool | None]] = []
    at: dict[str, int] = {}
    for node in nodes:
        order, again = _place(node, mark) or (-1, None)
        order = max([order, *(at[dep.name] for dep in node.unmet_dependencies if dep.name in at)])
        at.update(dict.fromkeys(node.get_buffer_names(), order))
        found.append((order, again))
    return found


def _place(node: Any, mark: str) -> tuple[int, bool] | None:
    """Return the greatest mark among the graph's nodes that a scheduler node was made from; of equals the backward's own."""
    marks = [o.meta[mark] for n in node.get_nodes() if n.node is not None for o in n.node.get_origins() if mark in o.meta]
    return max(marks, key=lambda m: (m[0], not m[1]), default=None)


def inductor_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the configuration of Inductor that ``torch.compile(mode=..., options=...)`` would set. Raises :class:`InvalidOption`."""
    from torch._inductor import config, list_mode_options

    modes = list_mode_options()
    if mode is not None and (not isinstance(mode, str) or mode not in modes):
        raise InvalidOption(f"mode={mode!r} is not a mode of torch.compile. Use one of {', '.join(map(repr, modes))}.")
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise InvalidOption(
            f"options={options!r} are not Inductor's options by their names. Give a dict. Example: options={{'epilogue_fusion': True}}."
        )
    given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    if taken := [name for name in PLUGS if given.get(name) is not None]:
        raise InvalidOption(
            f"option {taken[0]!r} is where fxckpt itself is plugged into Inductor: it cannot be given beside fxckpt. Leave it out."
        )
    known = config.get_config_copy()
    unknown = [name for name in given if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, 3)
        raise InvalidOption(
            f"unknown option {unknown[0]!r}: neither fxckpt nor Inductor has it."
            + (f" Did you mean {' or '.join(map(repr, near))}?" if near else " torch._inductor.config lists Inductor's.")
        )
    for name, value in given.items():
        kind = config.get_type(name)  # type: ignore[attr-defined]
        # As torch.compile does: what is in a list or a dict is not looked at.
        if get_origin(kind) is None and not isinstance(value, kind):
            raise InvalidOption(f"option {name!r} is {value!r}, a {type(value).__name__}: Inductor takes {kind.__name__}.")
    return {**(modes[mode] if mode is not None else {}), **given}


def _begin_to_look_for_instructions(options: Mapping[str, Any]) -> None:
    """Let Inductor find out, while the graph is traced and planned, which vector instructions it can compile for, and keep what it finds.

    It runs a compiler for that, which takes long with an empty cache, and waits for it only when it writes the first kernel.
    """
    from torch._inductor import config, cpu_vec_isa

    def look() -> None:
        with contextlib.suppress(Exception):  # The compile meets it again, and says so.
            cpu_vec_isa.valid_vec_isa_list()

    with config.patch(dict(options)):
        here = contextvars.copy_context()
    threading.Thread(target=here.run, args=(look,), daemon=True).start()


def inductor_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: CustomPartitionerFn,
    keep_order: KeepOrder,
    options: Mapping[str, Any],
    compile_half: Callable[..., Any],
) -> Any:
    """Compile with Inductor, its joint passes and caches in force, the partition made by ``partitioner``, each half by ``compile_half``.

    AOTAutograd's own cache is left out: a hit would skip the partitioner, and with it the plan that the user can read. The code of both halves
    still comes from Inductor's cache. Raises :class:`InnerCompilerMissing` where Inductor finds no compiler.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import InductorError, InvalidCxxCompiler, TritonMissing

    patches = {**options, "custom_partitioner_fn": partitioner, "_pre_fusion_custom_pass": keep_order}
    if any(isinstance(given, torch.Tensor) and given.device.type == "cpu" for given in example_inputs):
        _begin_to_look_for_instructions(options)
    try:
        with config.patch(enable_autograd_cache=False):
            return compile_fx(gm, list(example_inputs), inner_compile=compile_half, config_patches=patches)
    except (InductorError, TritonMissing) as error:
        found = getattr(error, "inner_exception", error)
        if not isinstance(found, (InvalidCxxCompiler, TritonMissing)):
            raise
        raise no_compiler(found) from error


def no_compiler(error: Exception) -> InnerCompilerMissing:
    """Return what is told where Inductor finds nothing to compile its code with."""
    return InnerCompilerMissing(
        f"inner='inductor' cannot generate code here: {str(error).rstrip(chr(46))}. "
        "Two ways out: install a compiler (g++ or clang++ for the CPU, CXX names it; Triton for a GPU), "
        "or do without code generation: options={'inner': 'aot_eager'}, fxckpt.Backend(inner='aot_eager')."
    )
