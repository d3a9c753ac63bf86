"""Joint graphs of AOTAutograd, their partitioner tags, and the split into two halves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.utils.checkpoint
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import _extract_fwd_bwd_modules

from fxckpt.errors import CaptureError, FxckptError
from fxckpt.torch_private.capture.dynamo import CaptureDone, errors_told_once, leave_capture
from fxckpt.torch_private.ops.rng import lower_rng
from fxckpt.torch_private.ops.storages import storage_id


def written_after(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a joint graph that AOTAutograd's wrapper writes after the forward.

    The new value of such an input is an output of the forward, and the wrapper copies it in.
    """
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    (output,) = graph.find_nodes(op="output")
    written = [
        d.mutated_input
        for d in output.meta.get("desc") or ()
        if isinstance(d, InputMutationAOTOutput)
    ]
    return (
        [n for n in graph.find_nodes(op="placeholder") if n.meta.get("desc") in written]
        if written
        else []
    )


def may_act_before_failing(forward: fx.Graph, *, in_order: bool) -> bool:
    """Return whether a forward that runs out of memory may have acted on what outlives it.

    Such acts are ordered effects, and writes of inputs, unless the ops run ``in_order`` and none
    allocates after the first write.
    """
    wrote = False
    outside = {
        storage_id(value)
        for node in forward.nodes
        if node.op in ("placeholder", "get_attr")
        and isinstance(value := node.meta.get("val"), torch.Tensor)
    }
    for node in forward.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.higher_order.with_effects:
            return True
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            value = node.meta.get("val")
            returns = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
            if returns == [True] and storage_id(value) not in outside:
                continue  # It writes a value of the graph's own, and returns it.
            wrote = True
            if not in_order:
                return True
        elif wrote and not (schema is not None and all(r.alias_info for r in schema.returns)):
            return True
    return False


def partitioner_tag(node: fx.Node) -> str | None:
    """Return the tag by which AOTAutograd marks the half that it traced ``node`` in, if any."""
    tag = node.meta.get("partitioner_tag")
    return str(tag) if tag is not None else None


def is_traced_in_backward(node: fx.Node) -> bool:
    """Return whether AOTAutograd traced ``node`` in the backward; the split may move it."""
    return partitioner_tag(node) == "is_backward"


def is_pinned_to_backward(node: fx.Node) -> bool:
    """Return whether ``node`` must stay in the backward half of the split."""
    return partitioner_tag(node) == "must_be_in_backward"


def tag_side(node: fx.Node, *, backward: bool) -> None:
    """Pin ``node`` to one half of the split."""
    node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def untag_side(node: fx.Node) -> None:
    """Allow the split to place ``node`` in either half or in both."""
    node.meta.pop("partitioner_tag", None)


def extract_halves(
    joint: fx.GraphModule,
    saved: Sequence[fx.Node],
    symbolic: Sequence[fx.Node],
    *,
    num_fwd_outputs: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and backward of a joint graph, under AOTAutograd's own contract.

    The contract covers the order of saved values (SymInts last), version checks, opaque objects
    and tangents.
    """
    return _extract_fwd_bwd_modules(
        joint, list(saved), list(symbolic), num_fwd_outputs=num_fwd_outputs
    )


def boxed(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    record: Callable[[fx.GraphModule], object] | None = None,
) -> Callable[..., Any]:
    """Compile a graph to Python code that takes its arguments in a list and empties that list.

    Each argument is thus freed after its last use. With ``record``, a second version of the code
    runs while a profiler is enabled: ``record`` is called with the graph module once, right before
    that version is generated on first use.
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
    """Generate the code of a graph module and return it, unaffected by later recompilations."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    gm.recompile()
    _LazyGraphModule.force_recompile(gm)
    forward: Callable[[list[Any]], Any] = gm.forward
    return forward


def trace_joint(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], receive: Callable[..., Any]
) -> None:
    """Trace the joint graph of ``gm`` on fake inputs and pass it to ``receive``.

    Nothing is executed. ``receive`` is called with the joint graph and the number of forward
    outputs, or not at all if no output requires a gradient.

    Raises :class:`CaptureError` if torch cannot trace the joint graph.
    """

    def partition(
        joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> NoReturn:
        receive(joint, num_fwd_outputs)
        leave_capture()

    compile_graph = aot_autograd(
        fw_compiler=boxed,
        inference_compiler=boxed,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    try:
        with errors_told_once():
            compile_graph(gm, list(inputs))
    except CaptureDone:
        return
    except FxckptError:
        raise
    except Exception as error:
        raise CaptureError(
            f"torch could not trace the gradient of the region: {type(error).__name__}: {error}"
        ) from error
