"""Carriers: a plan followed by torch's own checkpoint and partitioner, and by others' passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import fxckpt
from fxckpt.memory_meter import meter_of

BUDGETS = (None, 0.9, 0.75, "min")


class Block(nn.Module):
    """An MLP with a residual, which may drop out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm, self.drop = nn.LayerNorm(64), nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.drop(nn.functional.gelu(self.up(x)))) * 0.5)


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(3)))


def inputs() -> Tensor:
    return torch.randn(8, 32, 64)


def gradients(net: nn.Module, step: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    step(x).square().sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def held_bytes(step: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return the bytes between a forward and its backward, without the output."""
    meter = meter_of("cpu")
    start = meter.allocated()
    y = step(x)
    held = meter.allocated() - start - y.untyped_storage().nbytes()
    y.sum().backward()
    return held


def unplanned_results(plan: fxckpt.Plan) -> int:
    """Return the bytes of results that torch keeps beside a saved one of the same op."""
    assert plan.snapshot is not None
    program = plan.snapshot.program
    saved = {i for i, storage in enumerate(program.storages) if storage.name in plan.saved}
    return sum(
        program.storages[s].bytes
        for op in program.ops
        if saved.intersection(op.writes)
        for s in set(op.writes) - saved
        if not program.storages[s].is_output
    )


@pytest.mark.parametrize("dropout", (0.0, 0.3))
@pytest.mark.parametrize("budget", BUDGETS)
def test_torch_checkpoint_saves_what_is_planned(budget: Any, dropout: float) -> None:
    """Gradients are equal bitwise, and without dropout so are the bytes, but for generators."""
    net, x = model(dropout), inputs()
    plan = fxckpt.plan(net, x, budget=budget)

    def step(x: Tensor) -> Tensor:
        return checkpoint(net, x, use_reentrant=False, context_fn=plan.as_context_fn())

    expected = gradients(net, net, x)
    found = gradients(net, step, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(found) == len(expected)
    states = torch.get_rng_state().nbytes
    held = held_bytes(step, x) - states
    if dropout:
        assert held <= plan.saved_bytes
    else:
        # Eager torch saves the factor of each block, a number of eight bytes.
        assert held == plan.saved_bytes + unplanned_results(plan) + 3 * 8


@pytest.mark.parametrize("budget", BUDGETS)
def test_formulas_of_gradients_are_no_calls(budget: Any) -> None:
    """A gradient's own products, of values of the forward alone, count for nothing."""
    up, down = nn.Linear(64, 128), nn.Linear(128, 64)

    def region(x: Tensor) -> Tensor:
        h = up(x)
        found: Tensor = down(h.pow(2) * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1))
        return found

    net, x = nn.ModuleList((up, down)), inputs()
    plan = fxckpt.plan(region, x, budget=budget)

    def step(x: Tensor) -> Tensor:
        return checkpoint(region, x, use_reentrant=False, context_fn=plan.as_context_fn())

    found, expected = gradients(net, step, x), gradients(net, region, x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("budget", BUDGETS)
def test_another_function_is_a_mismatch(budget: Any) -> None:
    """A region that runs an op more often, or less often, than planned is an error."""
    net, x = model(), inputs()
    plan = fxckpt.plan(net, x, budget=budget)
    for other in (net[:2], nn.Sequential(*net, *net), nn.Linear(64, 64), nn.Conv1d(32, 32, 1)):
        with pytest.raises(fxckpt.PlanMismatch, match="Plan the function that is the region"):
            checkpoint(other, x, use_reentrant=False, context_fn=plan.as_context_fn())


def test_a_missing_saved_op_is_a_mismatch() -> None:
    """A norm whose results are saved, and which the region does not have, is told of."""
    net, x = model(), inputs()
    plan = fxckpt.plan(net, x)
    for block in net:
        block.norm = nn.Identity()
    with pytest.raises(fxckpt.PlanMismatch, match="ran native_layer_norm 0 times"):
        checkpoint(net, x, use_reentrant=False, context_fn=plan.as_context_fn())


def test_torch_partitioner_follows_the_tags() -> None:
    """Torch saves the planned values, and of an op of several results all that are needed."""
    net, x = model(), inputs()
    plan = fxckpt.plan(net, x, budget=0.75)
    saved: set[str] = set()

    def partition(joint: fx.GraphModule, given: Any, **options: Any) -> Any:
        plan.tag(joint)
        halves = min_cut_rematerialization_partition(joint, given, **options)
        outputs = halves[0].graph.find_nodes(op="output")[0].args[0]
        saved.update(node.name for node in outputs if node.op == "call_function")
        return halves

    def run(graph: fx.GraphModule, given: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)
    compiled = torch.compile(copy.deepcopy(net), backend=backend)
    expected = gradients(net, net, x)
    found = gradients(compiled, compiled, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert set(plan.saved) - saved == set()
    extra = {label.op for label in plan.snapshot.labels if label.name in saved - set(plan.saved)}
    assert extra <= {"native_layer_norm"}


def test_tags_of_another_graph_are_a_mismatch() -> None:
    """A graph without a saved node is refused before it is changed."""
    net, x = model(), inputs()
    plan = fxckpt.plan(net, x, budget=0.75)
    with pytest.raises(fxckpt.PlanMismatch, match="the plan saves"):
        plan.tag(fx.symbolic_trace(nn.Sequential(nn.Tanh())))


def test_nodes_are_found_by_module_and_occurrence() -> None:
    """Another graph's nodes get the decisions of the plan; what it lacks may be recomputed."""
    net, x = model(0.3), inputs()
    plan = fxckpt.plan(net, x, budget=0.75)
    graph = fx.Graph()
    value = graph.placeholder("x")
    made = {}
    aten = torch.ops.aten
    for path, op in (
        ("0.up", aten.addmm.default),
        ("1.up", aten.addmm.default),
        ("2.up", aten.addmm.default),
        ("2.drop", aten.native_dropout.default),
        ("", aten.sin.default),
    ):
        node = graph.call_function(op, (value,))
        node.meta["custom"] = {"module_fqn": path}
        made[path] = node
    policy = plan.as_node_policy()
    for path, name in (("0.up", "addmm"), ("1.up", "addmm_2"), ("2.up", "addmm_4")):
        is_saved = name in plan.saved
        answer = CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE
        assert policy(made[path]) is answer
    assert policy(made["2.drop"]) is CheckpointPolicy.MUST_SAVE
    assert policy(made[""]) is CheckpointPolicy.PREFER_RECOMPUTE


def test_regions_are_saved_by_their_share() -> None:
    """A plan that saves all saves all regions, the least saves fewer; a share may be asked."""
    net, x = model(), inputs()
    names = [f"{i}.{part}" for i in range(3) for part in ("up", "down", "norm")]
    everything = fxckpt.plan(net, x).saved_regions(names)
    least = fxckpt.plan(net, x, budget="min").saved_regions(names)
    assert {n for n in names if n.endswith("up")} <= everything and least < everything
    assert fxckpt.plan(net, x, budget="min").saved_regions(["0", "2"], share=0) == {"0", "2"}
    with pytest.raises(fxckpt.InvalidOption, match="names no module"):
        fxckpt.plan(net, x).saved_regions(["0.attention"])
