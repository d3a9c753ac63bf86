"""AOTAutograd: joint graphs, tags of the partitioner, and the split into halves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.utils.checkpoint
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import _extract_fwd_bwd_modules

from fxckpt.errors import CaptureError, FxckptError
from fxckpt.torch_private.dynamo import _CaptureDone, errors_told_once, leave_capture
from fxckpt.torch_private.rng import lower_rng


def written_after(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a joint graph whose new values are forward outputs, which AOTAutograd's own wrapper then copies into them."""
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


def split(
    joint: fx.GraphModule,
    saved: Sequence[fx.Node],
    symbolic: Sequence[fx.Node],
    *,
    num_fwd_outputs: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph by AOTAutograd's own contract (symints last, version checks, opaque objects, tangents)."""
    return _extract_fwd_bwd_modules(
        joint, list(saved), list(symbolic), num_fwd_outputs=num_fwd_outputs
    )


def boxed(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    record: Callable[[fx.GraphModule], object] | None = None,
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


def trace_joint(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], receive: Callable[..., Any]
) -> None:
    """Give the joint graph of ``gm`` on fake inputs to ``receive``, which is called as a partition function; nothing is executed.

    Raises :class:`CaptureError` where torch cannot trace it. ``receive`` is not called where no output needs a gradient.
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
    except _CaptureDone:
        return
    except FxckptError:
        raise
    except Exception as error:
        raise CaptureError(
            f"torch could not trace the gradient of the region: {type(error).__name__}: {error}"
        ) from error
