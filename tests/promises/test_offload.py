"""Steps that send values away: the same bits, exact peaks, no race, nothing left behind."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

import fxckpt
from fxckpt.tiers import Host, Tier
from fxckpt.tiers.ops import fetched, sent
from fxckpt.tiers.tier import Copy
from tests.models.zoo import ENTRIES, Entry
from tests.promises.test_models import Trial, same
from tests.steps import differing, fresh, outcome
from tests.tiers.adversary import Adversary


class Layer(nn.Module):
    """A residual layer with dropout, and views of its values in the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(2 * width, width)
        self.gates = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gates(self.norm(x)).chunk(2, dim=-1)
        return x + F.dropout(self.out(F.silu(a) * b.t().contiguous().t()), 0.1)


class WithLoss(nn.Module):
    """A model and its loss in one graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def stack() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(16) for _ in range(5))), (torch.randn(256, 16),)


def compiled(
    model: nn.Module, tier: Tier, budget: object = 0.4, **options: Any
) -> tuple[Callable[..., Any], fxckpt.Backend]:
    options = {"inner": "aot_eager", "scope": "graph", **options}
    backend = fxckpt.Backend(budget, offload=tier, **options)  # type: ignore[arg-type]
    return torch.compile(model, backend=backend), backend


OFTEN = {True: ("gpt2", "t5", "convnext", "resnet", "unet"), False: ("gpt2", "resnet")}
"""Models tried by default, with a late link or an early one; the sweep tries all."""


@pytest.mark.parametrize(
    ("entry", "late"),
    [
        pytest.param(
            entry,
            late,
            id=f"{entry.name}-{'late' if late else 'early'}",
            marks=() if entry.name in OFTEN[late] else pytest.mark.sweep,
        )
        for entry in ENTRIES
        for late in (True, False)
    ],
)
def test_models_are_free_of_races(entry: Entry, late: bool) -> None:
    """Gradients are those of the uncheckpointed step, peaks those of the plan, on any link."""
    trial = Trial(entry)
    expected = trial.step(torch.compile(trial.model, backend="aot_eager_default_partitioner"))
    torch._dynamo.reset()
    host = Adversary(late=late)
    forward, backend = compiled(trial.model, host, 0.7)
    assert same(expected, trial.step(forward)) == []
    (plan,) = backend.plans
    assert plan.offloads
    assert host.sent == host.fetched == len(plan.offloads)
    assert same(expected, trial.step(forward)) == []
    host.restart_peak()
    measured = trial.peak(forward)
    assert measured <= (plan.budget_bytes or 0)
    assert abs(measured - plan.peak_bytes) <= 0.01 * plan.peak_bytes
    assert host.peak_bytes == plan.away_bytes
    assert host.used_bytes == 0


def test_peaks_are_exact_to_the_byte() -> None:
    """The device's peak and the host's are the plan's at every budget that sends values."""
    for budget in (0.7, 0.45, 0.3):
        torch._dynamo.reset()
        layers, (x,) = stack()
        model = WithLoss(layers)
        host = Host("1GiB", 1e9)
        forward, backend = compiled(model, host, budget)

        def step(forward: Callable[..., Any] = forward, x: Tensor = x) -> None:
            forward(x).backward()

        step()
        model.zero_grad(set_to_none=True)
        measured = fxckpt.measure_peak(step)
        (plan,) = backend.plans
        assert plan.offloads
        assert measured == plan.peak_bytes <= (plan.budget_bytes or 0)
        assert host.peak_bytes == plan.away_bytes


def test_values_read_twice_come_back_twice() -> None:
    """A second backward of one forward fetches again, with the same gradients."""
    model, (x,) = stack()
    host = Adversary(late=True)
    forward, backend = compiled(model, host)
    loss = forward(x).square().sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    loss.backward()
    second = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert host.fetched == 2 * host.sent == 2 * len(backend.plans[0].offloads)
    del loss
    assert host.used_bytes == 0


def test_forwards_in_flight_have_blocks_of_their_own() -> None:
    """Two forwards before their backwards, in either order, give the gradients of each."""
    model, (x,) = stack()
    host = Adversary(late=True)
    forward, _ = compiled(model, host)

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    torch.manual_seed(3)
    expected = [gradients(model(scale * x).square().sum()) for scale in (1, 2)]
    torch.manual_seed(3)
    losses = [forward(scale * x).square().sum() for scale in (1, 2)]
    for i in (1, 0):
        found = gradients(losses[i])
        assert all(torch.equal(a, b) for a, b in zip(expected[i], found, strict=True))
    losses.clear()
    assert host.used_bytes == 0


def test_a_forward_without_a_backward_leaks_nothing() -> None:
    model, (x,) = stack()
    host = Host("1GiB", 1e9)
    forward, _ = compiled(model, host)
    out = forward(x)
    assert host.used_bytes > 0
    del out
    gc.collect()
    assert host.used_bytes == 0
    with torch.no_grad():
        forward(x)
    assert host.peak_bytes == backend_bytes(forward, host, x)


def backend_bytes(forward: Callable[..., Any], host: Host, x: Tensor) -> int:
    """The bytes that one more forward has in use at most."""
    host.restart_peak()
    forward(x)
    return host.peak_bytes


class Fails(torch.autograd.Function):
    """Identity whose backward fails when it is told to."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Fails.now:
            raise RuntimeError("the user's own")
        return gradient


def test_an_error_between_leaks_nothing() -> None:
    """After an error between forward and backward all is given back, and the next step is right."""
    model, (x,) = stack()
    host = Adversary(late=True)
    forward, _ = compiled(model, host)

    def step() -> list[Tensor]:
        torch.manual_seed(5)
        loss = Fails.apply(forward(x)).square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = step()
    Fails.now = True
    try:
        with pytest.raises(RuntimeError, match="the user's own"):
            step()
    finally:
        Fails.now = False
    gc.collect()
    assert host.used_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(expected, step(), strict=True))


def test_a_full_tier_ends_the_step_alone() -> None:
    """A second forward in flight does not fit: the error says so, and the next step is right."""
    model, (x,) = stack()
    probe, backend = compiled(model, Host("1GiB", 1e9))
    probe(x)
    (plan,) = backend.plans
    torch._dynamo.reset()
    host = Host(plan.away_bytes, 1e9)
    forward, _ = compiled(model, host)
    first = forward(x)
    with pytest.raises(fxckpt.TierFull, match="more forwards wait for their backward"):
        forward(x)
    first.square().sum().backward()
    del first
    gc.collect()
    assert host.used_bytes == 0
    forward(x).square().sum().backward()
    assert host.used_bytes == 0


def test_dynamic_sizes_move_what_there_is() -> None:
    """One graph for many sizes sends the bytes of each."""
    model, _ = stack()
    host = Adversary(late=True)
    forward, _ = compiled(model, host, "300KiB")
    for rows in (256, 200, 130):
        x = torch.randn(rows, 16)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=256)
        torch.manual_seed(2)
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        torch.manual_seed(2)
        found = torch.autograd.grad(forward(x).square().sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert host.used_bytes == 0
    assert host.sent


@pytest.mark.parametrize("steps", [150, pytest.param(1000, marks=pytest.mark.sweep)])
def test_many_steps_hold_no_more(steps: int) -> None:
    """Blocks, copies and threads are those of the first step."""
    model, (x,) = stack()
    host = Host("1GiB", 1e9)
    forward, backend = compiled(model, host)
    for _ in range(steps):
        forward(x).square().sum().backward()
    assert host.peak_bytes == backend.plans[0].away_bytes
    assert host.used_bytes == 0 and not host.copies
    assert host.reserved_bytes == backend.plans[0].away_bytes


def test_verified_recomputes_go_with_values_away() -> None:
    """Checksums hold of recomputed values, and of fetched ones."""
    make = stack
    model, inputs = fresh(make)
    expected = outcome(model, model, inputs)
    model, inputs = fresh(make)
    host = Adversary(late=True, limit="150KiB")
    forward, backend = compiled(model, host, 0.25, verify="exact")
    assert differing(expected, outcome(model, forward, inputs)) == []
    assert backend.plans[0].offloads and backend.plans[0].schedule


class Faulty(Host):
    """A host that flips a bit of what it gives back."""

    def fetch(self, held: Tensor, value: Tensor) -> Copy:
        """Begin to fetch a value, with a bit changed."""
        super().fetch(held, value).result()
        storage = value.untyped_storage()
        storage[7] ^= 1
        return super().fetch(held.new_empty(0), value.new_empty(0))


def test_a_flipped_bit_is_found() -> None:
    """Under ``verify="exact"`` a value that came back changed is named."""
    model, (x,) = stack()
    forward, backend = compiled(model, Faulty("1GiB", 1e9), verify="exact")
    loss = forward(x).square().sum()
    with pytest.raises(fxckpt.OffloadMismatch, match="came back from where it was sent") as caught:
        loss.backward()
    names = [repr(offload.name) for offload in backend.plans[0].offloads]
    assert any(str(caught.value).startswith(name) for name in names)


Break = Callable[[fx.Graph], None]


def _read_before_the_wait(graph: fx.Graph) -> None:
    """The reader of a fetched value reads it before the wait."""
    for node in graph.find_nodes(op="call_function", target=fetched):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _save_before_the_wait(graph: fx.Graph) -> None:
    """The copy is saved, and fetched, though nothing waited for it."""
    for node in graph.find_nodes(op="call_function", target=sent):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _let_go_before_the_last_reader(graph: fx.Graph) -> None:
    """A value is freed right after it is sent, before the forward has read it."""
    for node in graph.find_nodes(op="call_function", target=sent):
        node.args[0].append(node)


@pytest.mark.parametrize(
    "break_edge", [_read_before_the_wait, _save_before_the_wait, _let_go_before_the_last_reader]
)
def test_a_missing_edge_becomes_nan(break_edge: Break) -> None:
    """Without one of the edges that the ops hang on, the late link gives NaN gradients."""

    def broken(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        break_edge(gm.graph)
        gm.recompile()
        return gm.forward

    model, (x,) = stack()
    forward, backend = compiled(model, Adversary(late=True), inner=broken)
    forward(x).square().sum().backward()
    assert backend.plans[0].offloads
    assert any(bool(p.grad.isnan().any()) for p in model.parameters() if p.grad is not None)


def test_the_plan_tells_what_is_away() -> None:
    """Summary, rows, timeline and JSON agree about the values that are sent away."""
    model, (x,) = stack()
    plan = fxckpt.plan(model, x, budget=0.4, offload=Host("1GiB", 1e9))
    assert plan.offloads
    assert "sent away" in str(plan)
    away = plan.explain().filter(decision="offloaded")
    assert {row.name for row in away.rows} == {offload.name for offload in plan.offloads}
    assert all(plan.explain().why(row.name).startswith("offloaded: frees") for row in away.rows)
    assert fxckpt.Plan.from_json(plan.to_json()) == plan
    timeline = plan.timeline()
    for tick in range(len(timeline.ticks)):
        assert sum(h.bytes for h in timeline.at(tick)) == plan.profile[tick]


def test_a_plan_with_values_away_is_applied() -> None:
    """A plan from JSON needs a tier, sends what it says, and is refused without one."""
    model, (x,) = stack()
    plan = fxckpt.plan(model, x, budget=0.4, offload=Host("1GiB", 1e9))
    given = fxckpt.Plan.from_json(plan.to_json())
    host = Adversary(late=True)
    forward, backend = compiled(model, host, None, policy=given)
    forward(x).square().sum().backward()
    assert host.sent == len(plan.offloads)
    torch._dynamo.reset()
    backend = fxckpt.Backend(policy=given, inner="aot_eager")
    with pytest.raises(fxckpt.InvalidOption, match="and there is no offload="):
        torch.compile(model, backend=backend)(x)


def test_a_plan_for_a_gpu_takes_its_link() -> None:
    """A plan for a device elsewhere prices copies by that device's link."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
        x = torch.empty(8192, 2048, dtype=torch.float32)
    options: dict[str, Any] = {"budget": 0.6, "offload": "64GiB"}
    alone = fxckpt.plan(model, x, budget=0.6, device="GB200")
    far = fxckpt.plan(model, x, device="GB200", **options)
    assert far.offloads
    assert far.lower_bound_seconds <= far.extra_seconds < alone.extra_seconds


def test_an_infeasible_budget_says_what_is_within_reach() -> None:
    """The error of a budget below the floor tells what a tier, or a larger one, would reach."""
    model, (x,) = stack()
    reach = r"could reach about \d"
    with pytest.raises(fxckpt.BudgetInfeasible, match=rf"With offload=.*{reach}"):
        fxckpt.plan(model, x, budget=2000, policy=fxckpt.policies.save_all)
    with pytest.raises(fxckpt.BudgetInfeasible, match=rf"Host\('1KiB'.* holds 1.0 KiB.*{reach}"):
        fxckpt.plan(
            model,
            x,
            budget=2000,
            policy=fxckpt.policies.save_all,
            offload=Host("1KiB", 1e9),
        )


def test_a_policy_sends_values_away() -> None:
    """Values of modules are sent without a budget and with one, and nothing else without."""
    for budget in (None, 0.5):
        model, inputs = fresh(stack)
        expected = outcome(model, model, inputs)
        model, inputs = fresh(stack)
        host = Adversary(late=True)
        policy = fxckpt.policies.offload("1.out", "3.gates")
        forward, backend = compiled(model, host, budget, policy=policy)
        assert differing(expected, outcome(model, forward, inputs)) == []
        rows = backend.plans[0].explain().filter(decision="offloaded").rows
        forced = [row for row in rows if row.reason is fxckpt.Reason.POLICY]
        assert forced and {row.module for row in forced} <= {"1.out", "3.gates"}
        assert host.sent == len(rows)
        assert budget or len(forced) == len(rows)


def test_torchs_own_answers_send_values_away() -> None:
    """MUST_CPU_OFFLOAD binds at a budget that needs none; PREFER_CPU_OFFLOAD without a budget."""
    model, (x,) = stack()

    def answers(answer: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_product = op is torch.ops.aten.addmm.default
            return answer if is_product else CheckpointPolicy.PREFER_SAVE

        return policy

    must, prefer = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD
    for answer, budget, is_sent in ((must, 1.0, True), (prefer, None, True), (prefer, 1.0, False)):
        plan = fxckpt.plan(
            model, x, budget=budget, policy=answers(answer), offload=Host("1GiB", 1e9)
        )
        assert bool(plan.offloads) is is_sent
    with pytest.raises(fxckpt.InvalidOption, match="sends values away, and there is no offload="):
        fxckpt.plan(model, x, policy=answers(must))
    with pytest.raises(fxckpt.InvalidOption, match=r"away, and .*Host\('1KiB'.* holds 1.0 KiB"):
        fxckpt.plan(model, x, policy=answers(must), offload=Host("1KiB", 1e9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": 5}, "is not a place to send values to"),
        ({"offload": "much"}, "its limit is a number of bytes"),
        ({"offload": "1GiB", "inner": "inductor"}, "Inductor compiles them"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxckpt.InvalidOption, match=message):
        fxckpt.Backend(
            **{"budget": 0.5, "inner": "aot_eager", "scope": "graph", **options}  # type: ignore[arg-type]
        )


def test_without_offload_nothing_is_sent() -> None:
    """The default plans as before, and a tier that is not needed is not used."""
    model, (x,) = stack()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = fxckpt.plan(model, x, budget=0.6)
    assert not plain.offloads and plain.stall_seconds == 0
    roomy = fxckpt.plan(model, x, budget=1.0, offload=Host("1GiB", 1e9))
    assert not roomy.offloads


@pytest.mark.parametrize(
    "goal", [{"budget": "min"}, {"budget": None, "max_slowdown": 0.05}], ids=["min", "slowdown"]
)
def test_least_memory_sends_values_away(goal: dict[str, Any]) -> None:
    """The least memory, in any time or in little, is less with a tier, and exact."""
    peaks = []
    for tier in (None, Host("1GiB", 1e12)):
        torch._dynamo.reset()
        layers, (x,) = stack()
        model = WithLoss(layers)
        backend = fxckpt.Backend(inner="aot_eager", scope="graph", offload=tier, **goal)
        forward = torch.compile(model, backend=backend)
        forward(x).backward()
        model.zero_grad(set_to_none=True)
        (plan,) = backend.plans

        def step(forward: Callable[..., Any] = forward, x: Tensor = x) -> None:
            forward(x).backward()

        assert fxckpt.measure_peak(step) == plan.peak_bytes
        peaks.append(plan.peak_bytes)
    assert peaks[1] < peaks[0]
