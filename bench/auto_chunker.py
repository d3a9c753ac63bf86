"""Chunk a head as torch's ``auto_chunker`` does, and measure it beside tiles under Inductor.

The pass runs on a joint graph that is decomposed as Inductor does; its subgraphs, one call for each
chunk, are put in place, so that fxckpt plans the graph as any other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._inductor.inductor_prims
from torch import Tensor, fx, nn
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.auto_chunker import CantChunk, chunk
from torch._inductor.fx_passes.joint_graph import canonicalize_aten_ir_passes
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fxckpt
from fxckpt.passes.graphs import Joint

aten = torch.ops.aten
KEPT = ("embedding_dense_backward", "native_dropout", "native_dropout_backward")
"""Ops that are not decomposed: it needs a GPU, or draws other numbers."""
RATIO = 4
"""Least ratio of a matmul's result to its operands that is chunked here; torch's default is 8."""
ROWS, WIDTH, VOCABULARY = 2048, 128, 8192


def chunked(joint: Joint, ratio: int) -> Joint | str:
    """Return a joint graph, not yet prepared, as the pass leaves it, or what the pass says."""
    holders = joint.module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in holders]
    mode = detect_fake_mode(values)
    assert mode is not None
    kept = {op: f for op, f in select_decomp_table().items() if op.name()[6:] not in KEPT}

    def run(*given: Any) -> Any:
        return fx.Interpreter(joint.module).run(*given, enable_io_processing=False)

    with mode:
        module = make_fx(run, decomposition_table=kept)(*values)
    for node, holder in zip(module.graph.find_nodes(op="placeholder"), holders, strict=True):
        node.name, node.target = holder.name, holder.target
    canonicalize_aten_ir_passes(module)
    remove_noop_ops(module.graph)
    for node in module.graph.find_nodes(op="call_function", target=aten.scalar_tensor.default):
        node.args, node.target = ([], *node.args), aten.full.default
    module.recompile()
    try:
        with V.set_fake_mode(mode), config.patch({"auto_chunker.amplify_ratio_threshold": ratio}):
            module = chunk(module)
    except CantChunk as refusal:
        return str(refusal).partition(": %")[0]
    put_in_place(module)
    FakeTensorProp(module, mode=mode).propagate_dont_convert_inputs(*values)
    return Joint(module, joint.num_fwd_outputs)


def put_in_place(module: fx.GraphModule) -> None:
    """Replace calls of subgraphs by their ops."""
    graph = module.graph
    calls = graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    for call in calls:
        known: dict[fx.Node, fx.Node] = {}
        given = iter(call.args[2:])
        with graph.inserting_before(call):
            for node in getattr(module, call.args[0].target).graph.nodes:
                if node.op == "placeholder":
                    known[node] = next(given)
                elif node.op == "output":
                    results = [known[n] for n in node.args[0]]
                else:
                    known[node] = graph.node_copy(node, known.__getitem__)
        for item in list(call.users):
            assert item.target is operator.getitem
            item.replace_all_uses_with(results[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(call)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    graph.lint()


def measured(head: type[nn.Module], budget: str) -> Iterator[tuple[str, ...]]:
    """Yield peaks of a head that this machine runs under Inductor, predicted and measured."""
    tiled = fxckpt.Backend(budget=budget, tile="auto")
    compilers: list[tuple[str, Any, dict[str, Any]]] = [
        ("Inductor", "inductor", {}),
        (
            "Inductor, auto_chunker",
            "inductor",
            {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": RATIO},
        ),
        ("fxckpt, no budget", fxckpt.Backend(), {}),
        (f"fxckpt, auto, {budget}", tiled, {}),
    ]
    for name, backend, options in compilers:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = head(WIDTH, VOCABULARY)
        hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
        step = torch.compile(model, backend=backend)
        targets = torch.randint(VOCABULARY, (ROWS,))

        def run(step: Any = step, hidden: Tensor = hidden, targets: Tensor = targets) -> None:
            step(hidden, targets).backward()

        with config.patch(options):
            run()
            model.zero_grad()
            hidden.grad = None
            peak = fxckpt.measure_peak(run)
        planned = ""
        if isinstance(backend, fxckpt.Backend):
            planned = f"{backend.plans[0].compiled_peak_bytes / 1e6:.2f}"
        yield name, planned, f"{peak / 1e6:.2f}"
