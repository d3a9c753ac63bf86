"""The backend with Inductor inside: peaks, order, candidates, options of torch.compile."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch.nn import functional as F

import fxckpt
from fxckpt.costs.models import FlopCost, checked
from fxckpt.inductor.attempt import default_candidate
from fxckpt.inductor.memory import backward_bytes, lower_backward
from fxckpt.inductor.planner import InductorPlanner
from fxckpt.passes.analysis.joint import no_workspace, read_facts
from fxckpt.passes.graphs import Joint
from fxckpt.passes.inductor.execution_order import ORDER
from fxckpt.planner.planner import Planner
from fxckpt.plans.types import Plan
from fxckpt.policies import recompute_all
from fxckpt.torch_private.inductor.default_partitioner import default_saved
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.lowering import Lowerings
from tests.joints import inductor_joint
from tests.models.zoo import ENTRIES, Entry
from tests.steps import fresh, outcome


class Block(nn.Module):
    """A transformer block without attention, for its memory."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks and a head that is larger than they are."""

    def __init__(
        self, blocks: int = 2, width: int = 32, classes: int = 512, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


def step(**options: Any) -> tuple[Model, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Model(**options), (torch.randn(512, 32), torch.randint(0, 512, (512,)))


def planned(budget: Any, **options: Any) -> Plan:
    """The plan within a budget; nothing is compiled."""
    model, inputs = step(**options)
    joint, count = inductor_joint(model, *inputs)
    return InductorPlanner(Planner(budget=budget, cost="flops")).partition(Joint(joint, count))[2]


@functools.cache
def unbounded() -> Plan:
    """The plan without a budget, which several tests share."""
    return planned(None)


def test_measured_peak_is_the_lowered_one() -> None:
    model, inputs = step()
    default_peak = unbounded().peak_bytes
    for budget in (None, int(0.8 * default_peak)):
        torch._dynamo.reset()
        backend = fxckpt.Backend(budget=budget, cost="flops")
        compiled = torch.compile(model, backend=backend)
        compiled(*inputs).backward()
        model.zero_grad(set_to_none=True)
        measured = fxckpt.measure_peak(lambda compiled=compiled: compiled(*inputs).backward())
        model.zero_grad(set_to_none=True)
        (plan,) = backend.plans
        predicted = plan.compiled_peak_bytes or plan.peak_bytes
        assert abs(measured - predicted) <= 0.03 * predicted
        assert budget is None or (measured <= budget and plan.schedule)


def test_unbounded_plan_is_the_default_choice() -> None:
    """Saved values are those of the default partitioner, and values that may not be recomputed."""
    model, inputs = step()
    joint, count = inductor_joint(model, *inputs)
    stored = default_saved(joint, num_fwd_outputs=count)
    plan = InductorPlanner(Planner()).partition(Joint(joint, count))[2]
    assert set(plan.saved) <= stored | {
        op.name for op in plan.snapshot.program.ops if op.no_recompute
    }  # type: ignore[union-attr]
    assert plan.saved


def test_default_choice_is_taken_if_it_fits() -> None:
    """A budget of its peak changes nothing."""
    assert planned(unbounded().peak_bytes).saved == unbounded().saved


def test_plan_over_the_budget_is_searched_for_less() -> None:
    """The first lowering reports more than the truth."""
    model, inputs = step()
    joint, count = inductor_joint(model, *inputs)
    budget = int(0.8 * unbounded().peak_bytes)
    calls = []

    def doubtful(half: Any, donated: Any, strides: Any) -> Any:
        found = Lowerings(KeepExecutionOrder(ORDER)).lower(half, donated, strides)
        calls.append(donated is not None)
        extra = ("imagined", budget, 0, len(found.kernels))
        return (
            replace(found, allocated=(*found.allocated, extra)) if calls.count(True) <= 1 else found
        )

    plan = InductorPlanner(Planner(budget=budget), lower=doubtful).partition(Joint(joint, count))[2]
    assert calls.count(True) >= 2
    assert plan.compiled_peak_bytes is not None and plan.compiled_peak_bytes <= budget


def test_named_least_peak_is_feasible() -> None:
    """A budget of the least peak that an error names has a plan."""
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        planned(1)
    peak = planned(caught.value.floor_bytes).compiled_peak_bytes
    assert peak is not None and peak <= caught.value.floor_bytes


class Attention(nn.Module):
    """Self-attention with dropout: layers of one size, whose recomputations Inductor would fuse."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        weights = self.drop((q @ k.transpose(-1, -2)).softmax(-1))
        return x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(rows, length, width)))


def test_recomputations_wait_for_their_turn() -> None:
    """In its own order Inductor fuses recomputations of layers that read the same inputs."""
    model = nn.Sequential(*(Attention() for _ in range(3)))
    joint, count = inductor_joint(model, torch.randn(4, 64, 32))
    facts = read_facts(joint, num_fwd_outputs=count, cost=checked(FlopCost()))
    forward, backward, plan = InductorPlanner(Planner(budget=850_000, cost="flops")).partition(
        Joint(joint, count)
    )

    def peak(order: KeepExecutionOrder | None) -> int:
        lower = Lowerings(order).lower
        lowered = lower_backward(forward, backward, lower, num_fwd_outputs=count)
        left = lower(forward, None, {})
        return int(
            backward_bytes(
                lowered,
                forward,
                backward,
                facts,
                no_workspace,
                num_fwd_outputs=count,
                lowered_forward=left,
            ).max()
        )

    kept, loose = peak(KeepExecutionOrder(ORDER)), peak(None)
    assert kept == plan.compiled_peak_bytes
    assert kept < 0.9 * loose


def test_default_choice_of_unsavable_values_is_no_candidate() -> None:
    """A program that bars all storages from being saved has no default candidate."""
    plan = unbounded()
    assert plan.snapshot is not None
    program = plan.snapshot.program
    barred = replace(
        plan.snapshot,
        program=replace(
            program, storages=tuple(replace(s, is_savable=False) for s in program.storages)
        ),
    )
    assert default_candidate(barred, frozenset(plan.saved)) is None


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(Entry("blocks", step), id="blocks"),
        *(pytest.param(e, id=e.name, marks=pytest.mark.sweep) for e in ENTRIES),
    ],
)
def test_gradients_equal_inductor(entry: Any) -> None:
    """Gradients, outputs and buffers equal those of torch.compile."""
    check_gradients(entry, (0.6,))


@pytest.mark.sweep
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_unbounded_gradients_equal_inductor(entry: Any) -> None:
    """The same without a budget, where the default partitioner's choice is taken."""
    check_gradients(entry, (None,))


def check_gradients(entry: Any, budgets: Sequence[float | None]) -> None:
    """Compare steps within budgets with that of torch.compile."""
    model, inputs = fresh(entry.make)
    expected = outcome(model, torch.compile(model), inputs)
    for budget in budgets:
        model, inputs = fresh(entry.make)
        got = outcome(model, torch.compile(model, backend=fxckpt.Backend(budget=budget)), inputs)
        for key, value in expected.items():
            torch.testing.assert_close(
                got[key],
                value,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, key=key, budget=budget: f"{key} at {budget}: {text}",
            )


def test_plan_for_inductor_is_applied_from_json() -> None:
    """A plan read from JSON is followed as it is."""
    model, inputs = step()
    first = fxckpt.Backend(budget=0.8)
    torch.compile(model, backend=first)(*inputs).backward()
    torch._dynamo.reset()
    again = fxckpt.Backend(policy=fxckpt.Plan.from_json(first.plans[0].to_json()))
    torch.compile(model, backend=again)(*inputs).backward()
    assert again.plans[0].digest == first.plans[0].digest


def test_modes_and_options_of_torch_compile_pass_through() -> None:
    model, inputs = step(blocks=1)
    seen: list[tuple[bool, bool]] = []

    class Peek(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            seen.append(
                (torch._inductor.config.epilogue_fusion, torch._inductor.config.max_autotune)
            )

        def uuid(self) -> str:
            return "peek"

    options = {"budget": 0.9, "epilogue_fusion": False, "post_grad_custom_post_pass": Peek()}
    torch.compile(model, backend="fxckpt", options=options, fullgraph=True)(*inputs).backward()
    assert set(seen) == {(False, False)}
    torch._dynamo.reset()
    seen.clear()
    backend = fxckpt.Backend(
        mode="max-autotune-no-cudagraphs", options={"post_grad_custom_post_pass": Peek()}
    )
    torch.compile(model, backend=backend)(*inputs).backward()
    # Nothing is tuned while a half is only examined.
    assert set(seen) == {(True, False), (True, True)}


class Gated(nn.Module):
    """Residual blocks with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(*sizes) for sizes in ((32, 64), (32, 64), (64, 32)))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in self.blocks:  # type: ignore[misc]
            x = x + down(F.silu(gate(x)) * up(x))
        return x.square().mean()


def test_reduced_overhead_keeps_the_budget() -> None:
    """With ``mode="reduce-overhead"`` 0.6 of the peak is enough, and gradients are those of eager.

    Inductor's partition for CUDA graphs would keep the operands of all weight gradients.
    """
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(256, 32)
    model(x).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    backend = fxckpt.Backend(budget=0.6, mode="reduce-overhead", cost="flops")
    compiled = torch.compile(model, backend=backend)
    compiled(x).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    model.zero_grad(set_to_none=True)
    (plan,) = backend.plans
    peak = fxckpt.measure_peak(lambda: compiled(x).backward())
    assert peak == plan.compiled_peak_bytes
    assert plan.budget_bytes is not None and peak <= plan.budget_bytes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mode": "fastest"}, "'max-autotune'"),
        ({"options": {"epilog_fusion": True}}, "'epilogue_fusion'"),
        ({"options": {"epilogue_fusion": "yes"}}, "takes bool"),
        pytest.param(
            {"options": {"numerics": "strickt"}},
            "'default', .*'strict'",
            marks=pytest.mark.skipif(torch.__version__ < "2.14", reason="new in torch 2.14"),
        ),
        ({"options": 5}, "Give a dict"),
        ({"mode": []}, "'max-autotune'"),
        ({"cost": FlopCost}, "'roofline', 'flops', 'measured'"),
        ({"options": {"_pre_fusion_custom_pass": lambda nodes: nodes}}, "beside fxckpt"),
        ({"inner": "aot_eager", "mode": "max-autotune"}, "not"),
    ],
)
def test_wrong_modes_and_options_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(fxckpt.InvalidOption, match=says):
        fxckpt.Backend(**arguments)


class Rounded(nn.Module):
    """Layers in bfloat16, whose fused kernels skip roundings between ops by default."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(self.norm(x)))
        return x.float().square().mean()


@pytest.mark.skipif(torch.__version__ < "2.14", reason="new in torch 2.14")
def test_strict_numerics_recompute_the_same_bits() -> None:
    """A fused recomputation rounds as the first run did: gradients are Inductor's, bit by bit."""
    options = {"numerics": "strict"}

    def gradients(**how: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Rounded(), torch.randn(131, 48, dtype=torch.bfloat16)
        torch.compile(model, **how)(x).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    backend = fxckpt.Backend(policy=recompute_all, cost="flops", options=options, scope="graph")
    ours = gradients(backend=backend)
    assert any(name.startswith("addmm") for name in backend.plans[0].recomputed)
    assert all(map(torch.equal, ours, gradients(options=options)))


def _written(
    monkeypatch: pytest.MonkeyPatch, *, keep: bool, dynamic: bool
) -> tuple[list[str], int]:
    """The code that Inductor writes, and how often it lowers a graph for it."""
    torch._dynamo.reset()
    code: list[str] = []
    lowered: list[bool] = []
    with monkeypatch.context() as patch, torch._inductor.config.patch(fx_graph_cache=False):
        patch.setattr(GraphLowering, "save_output_code", code.append)
        run = GraphLowering.run
        patch.setattr(
            GraphLowering, "run", lambda graph, *args: (lowered.append(True), run(graph, *args))[1]
        )
        if not keep:
            patch.setattr(
                Lowerings, "compile", lambda self, *args, **given: compile_fx_inner(*args, **given)
            )
        model, inputs = step(blocks=1)
        torch.compile(model, backend=fxckpt.Backend(), dynamic=dynamic)(*inputs).backward()
    return [text[text.index("import") :] for text in code], len(lowered)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_lowered_halves_are_compiled_as_they_are(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    """The code is that of a compile that lowers for itself; some saved values are dynamic sizes."""
    kept, lowered = _written(monkeypatch, keep=True, dynamic=dynamic)
    again, lowered_again = _written(monkeypatch, keep=False, dynamic=dynamic)
    assert (lowered, lowered_again) == (2, 4)
    assert len(kept) == 2 and kept == again


def test_dynamic_sizes_keep_their_budget() -> None:
    """Every size of a dynamic batch stays within the budget."""
    model, _ = step(blocks=2)
    backend = fxckpt.Backend(budget=0.8)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for rows in (256, 128, 512):
        inputs = torch.randn(rows, 32), torch.randint(0, 512, (rows,))
        compiled(*inputs).backward()
        model.zero_grad(set_to_none=True)
        measured = fxckpt.measure_peak(lambda inputs=inputs: compiled(*inputs).backward())
        model.zero_grad(set_to_none=True)
        report = backend.report().step
        assert report is not None and measured <= report.budget_bytes


def test_dynamic_halves_are_cached() -> None:
    """Inductor has no key for a fraction of sizes, as in the gradient of a batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 4, 3))
    again, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    torch._dynamo.utils.counters.clear()
    torch.compile(model, backend=fxckpt.Backend(), dynamic=True)(x).square().sum().backward()
    again(x).square().sum().backward()
    counted = torch._dynamo.utils.counters["inductor"]
    assert counted["fxgraph_cache_bypass"] == 0
    assert counted["fxgraph_cache_miss"] + counted["fxgraph_cache_hit"] == 2
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_report_lists_graph_breaks() -> None:
    """Each break names its reason and the bytes that it holds."""
    model, inputs = step(blocks=2)

    def broken(x: Tensor, labels: Tensor) -> Tensor:
        x = model.blocks[0](x)
        torch._dynamo.graph_break()
        return F.cross_entropy(model.head(model.blocks[1](x)), labels)

    backend = fxckpt.Backend(inner="aot_eager")
    torch.compile(broken, backend=backend)(*inputs).backward()
    (found,) = backend.report().breaks
    assert found.graph == 1 and found.bytes == 512 * 32 * 4
    assert "test_compile.py" in found.source
    assert "graph break: graph 1 ends" in str(backend.report())
