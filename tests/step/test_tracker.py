"""One budget for a step of many graphs, from the first step on."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.memory_meter import AcceleratorMeter, Meter, allocation_limit, meter_of
from fxckpt.step import measure
from tests.step.stack import (
    Block,
    Stack,
    X,
    assert_step_is_right,
    clear,
    compiled,
    gradients,
    measured,
    plain,
    step_of,
)


@pytest.mark.parametrize("share", [0.45, 0.7])
def test_blocks_keep_the_step_budget(share: float) -> None:
    """No step is over the budget, from the first on; later ones use it, bit by bit the same."""
    model = Stack()
    peak, wanted = plain(model)
    limit = int(share * peak)
    backend = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    for _ in range(4):
        assert_step_is_right(model, limit, wanted)
    report = backend.report().step
    assert report is not None and report.settled_at == 2
    assert report.budget_bytes == limit and report.measured_peak_bytes <= limit
    assert report.predicted_peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.01)
    assert sum(row.calls for row in report.rows) == 4
    assert report.lower_bound_seconds <= report.extra_seconds


class Statistics:
    """Statistics of a device with one peak, as an accelerator's allocator keeps them."""

    def __init__(self) -> None:
        self.counted = meter_of(torch.device("cpu"))
        self.most = self.counted.watch()
        self.resets = 0

    def reset(self) -> None:
        self.most.reset()
        self.resets += 1

    def meter_of(self, _: torch.device) -> Meter:
        return AcceleratorMeter(lambda: (self.counted.allocated(), self.most.peak()), self.reset)


def test_peak_of_an_accelerator_is_reset_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks that the device had before are not the step's; a step that was seen leaves it alone."""
    model, device = Stack(), Statistics()
    peak, wanted = plain(model)
    limit = int(0.5 * peak)
    monkeypatch.setattr(measure, "meter_of", device.meter_of)
    backend = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    reports = []
    for _ in range(4):
        torch.empty(8 * peak, dtype=torch.uint8)
        resets = device.resets
        assert_step_is_right(model, limit, wanted)
        reports.append(backend.report().step)
    assert 0 < resets == device.resets
    assert reports[-1] is not None and reports[-1].settled_at == 2
    assert 0.7 * limit < reports[-1].predicted_peak_bytes <= limit
    seen = [None if r is None else (r.is_bound, r.measured_peak_bytes <= limit) for r in reports]
    assert seen[1:] == [(False, True), (True, False), (True, False)]
    assert "measured peak at most" in str(reports[-1])


@pytest.mark.parametrize("budget", [0.7, "1.2MiB"])
def test_one_graph_is_planned_once(budget: str | float) -> None:
    """A model that is one graph keeps the plan of its first step, a bound one too."""
    backend = fxckpt.Backend(budget=budget, inner="aot_eager")
    model = nn.Sequential(*(Block() for _ in range(6)))
    forward = torch.compile(lambda x: model(x).square().mean(), backend=backend)
    for _ in range(3):
        clear(model)
        measured_peak = fxckpt.measure_peak(lambda: forward(X).backward())
        (plan,) = backend.plans
        assert measured_peak <= plan.peak_bytes <= (plan.budget_bytes or 0)
    report = backend.report().step
    assert report is not None and report.extra_seconds > 0


def test_a_budget_that_never_binds_recomputes_nothing() -> None:
    model, backend = compiled("1GiB")
    for _ in range(3):
        measured(model)
    report = backend.report().step
    assert report is not None and report.extra_seconds == 0


def test_small_tail_after_a_graph_break_trains() -> None:
    """A tail whose floor is above its share runs at its floor."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            y = self.blocks(x)
            torch._dynamo.graph_break()
            return y.pow(2).mean()

    model = Broken()
    peak, wanted = plain(model)
    backend = fxckpt.Backend(budget=0.5, inner="aot_eager", scope="step")
    model.compile(backend=backend)
    for _ in range(3):
        assert measured(model) <= 0.55 * peak
    assert all(map(torch.equal, gradients(model), wanted))
    report = backend.report().step
    assert report is not None and report.measured_peak_bytes <= report.budget_bytes


def test_step_that_cannot_fit_raises() -> None:
    """The first step is measured; the next one says what the least is, in bytes and as a share."""
    peak, _ = plain(Stack())
    model, _ = compiled(int(0.25 * peak))
    with pytest.warns(UserWarning, match="step 1 had a peak"):
        measured(model)
    with pytest.raises(fxckpt.BudgetInfeasible, match=r"this step of 4 calls") as raised:
        measured(model)
    assert 0.25 * peak < raised.value.floor_bytes < 0.4 * peak


def test_graph_that_cannot_fit_raises_when_compiled() -> None:
    model, _ = compiled("1KiB")
    with pytest.raises(fxckpt.BudgetInfeasible, match="This is graph 1 of the step"):
        measured(model)


def test_a_new_budget_takes_effect_at_once() -> None:
    model = Stack()
    peak, wanted = plain(model)
    backend = fxckpt.compile_blocks(model.blocks, int(0.8 * peak), inner="aot_eager")
    for share in (0.8, 0.8, 0.45, 0.7):
        backend.set_budget(int(share * peak))
        assert_step_is_right(model, int(share * peak), wanted)
    assert copy.deepcopy(backend) is backend  # As a copy of a model that holds it has one budget.
    with pytest.raises(fxckpt.InvalidOption, match="set_budget"):
        fxckpt.Backend().set_budget(0.5)


def test_budget_changed_within_a_step() -> None:
    """Calls in flight stay as they are; the step after it is within the new budget."""
    model = Stack()
    peak, wanted = plain(model)
    backend = fxckpt.compile_blocks(model.blocks, int(0.8 * peak), inner="aot_eager")
    for _ in range(2):
        measured(model)
    clear(model)
    torch.manual_seed(3)
    x = X
    for i, block in enumerate(model.blocks):
        if i == 3:
            backend.set_budget(int(0.45 * peak))
        x = block(x)
    nn.functional.cross_entropy(model.head(x), torch.zeros(512, dtype=torch.long)).backward()
    assert all(map(torch.equal, gradients(model), wanted))
    measured(model)
    assert_step_is_right(model, int(0.45 * peak), wanted)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_micro_batches_in_flight(order: tuple[int, ...]) -> None:
    """Each backward belongs to its own forward, whatever the order; in flight, all count."""
    model = nn.Sequential(*(Block(dropout=0.0) for _ in range(2)))
    batches = [torch.randn(256, 32) for _ in range(4)]

    def step(forward: Callable[[Tensor], Tensor]) -> None:
        losses = [forward(x).square().mean() for x in batches]
        for i in order:
            losses[i].backward()

    clear(model)
    step(model)
    wanted = gradients(model)
    clear(model)
    limit = int(0.5 * fxckpt.measure_peak(lambda: step(model)))
    backend = fxckpt.Backend(limit, inner="aot_eager", scope="step", in_flight=4)
    forward = torch.compile(model, backend=backend)
    for _ in range(3):
        clear(model)
        assert fxckpt.measure_peak(lambda: step(forward)) <= limit
        assert all(map(torch.equal, gradients(model), wanted))


def test_odd_steps_leave_nothing_behind() -> None:
    """After a dropped forward, two backwards, an error or an evaluation, the next step is right."""
    model = Stack()
    peak, wanted = plain(model)
    limit = int(0.55 * peak)
    backend = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    for _ in range(2):
        assert_step_is_right(model, limit, wanted)
    with torch.no_grad():
        model(X)
    assert_step_is_right(model, limit, wanted)
    model(X)
    assert_step_is_right(model, limit, wanted)
    with pytest.raises(ZeroDivisionError):
        model.blocks[1](model.blocks[0](X)) / (1 // 0)
    assert_step_is_right(model, limit, wanted)
    with allocation_limit(400_000), pytest.raises(RuntimeError, match="can't allocate memory"):
        model(X)
    backend.set_budget(limit)
    before = len(backend.plans)
    assert_step_is_right(model, limit, wanted)
    assert len(backend.plans) == before
    loss = model(X)
    with pytest.warns(UserWarning, match="over the budget"):
        loss.backward(retain_graph=True)
        loss.backward()
    del loss
    assert_step_is_right(model, limit, wanted)
    assert backend.step is not None and not backend.step._flights


def test_steps_of_two_kinds_in_turn() -> None:
    """The first calls of one leave room for the other, as either may come next."""
    limit = int(0.6 * plain(Stack())[0])
    model, _ = compiled(limit)
    for _ in range(3):
        measured(model)
    held = model(X)  # In flight through the next step, whose calls begin like those of any.
    with pytest.warns(UserWarning, match="over the budget"):
        measured(model)
        del held
        measured(model)
    for _ in range(3):
        for _ in range(2):
            model.blocks[1](model.blocks[0](X)).sum().backward()
        assert measured(model) <= limit


def test_strict_raises_over_the_budget() -> None:
    """A model compiled as a whole is not known to have two forwards in flight."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    measured_alone = fxckpt.measure_peak(lambda: model(X).sum().backward())
    backend = fxckpt.Backend(measured_alone, inner="aot_eager", scope="step", strict=True)
    forward = torch.compile(model, backend=backend)
    clear(model)
    with pytest.raises(fxckpt.BudgetExceeded, match="in_flight"):
        (forward(X).sum() + forward(X).sum()).backward()
    clear(model)
    (forward(X).sum() + forward(X).sum()).backward()
    report = backend.report().step
    assert report is not None and report.measured_peak_bytes <= report.budget_bytes


def test_accumulated_gradients_count_until_the_optimizer() -> None:
    model, backend = compiled(0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = step_of(model)
    first, second = [], []
    for _ in range(3):
        clear(model)
        step()
        report = backend.report().step
        assert report is not None
        first.append(report.outside_bytes)
        step()
        report = backend.report().step
        assert report is not None
        second.append(report.outside_bytes)
        optimizer.step()
    held = sum(p.nbytes for p in model.parameters())
    assert second[-1] == pytest.approx(first[-1] + held, rel=0.1)


def test_what_micro_batches_leave_counts_without_optimizer() -> None:
    """Gradients outside of the graphs, and outputs that the loop holds, are the step's as well."""

    class Words(nn.Module):
        """Blocks that are compiled, between layers that are not."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.words, self.head = nn.Embedding(2000, 32), nn.Linear(32, 150)

        def forward(self, x: Tensor) -> Tensor:
            x = self.words(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model, words = Words(), torch.randint(0, 2000, (512,))

    def window() -> None:
        clear(model)
        for _ in range(2):
            logits = model(words)
            logits.square().mean().backward()

    clear(model)
    limit = int(0.7 * fxckpt.measure_peak(window))
    backend = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    peaks = []
    for _ in range(4):
        clear(model)
        peaks.append(fxckpt.measure_peak(window))
    assert 0.9 * limit < peaks[-1] <= limit
    report = backend.report().step
    assert report is not None and report.measured_peak_bytes <= limit


def test_blocks_that_a_loop_calls_begin_cautiously() -> None:
    """No module's forward surrounds the first graph, and other blocks follow all the same."""
    blocks = nn.ModuleList(Block(dropout=0.0) for _ in range(6))

    def step() -> None:
        x = X
        for block in blocks:
            x = block(x)
        x.square().mean().backward()

    step()
    clear(blocks)
    limit = int(0.5 * fxckpt.measure_peak(step))
    fxckpt.compile_blocks(blocks, limit, inner="aot_eager")
    for _ in range(3):
        clear(blocks)
        assert fxckpt.measure_peak(step) <= limit


def test_a_whole_budget_fits_kept_gradients() -> None:
    """What a tiny step takes beyond its plan is also what the uncheckpointed one takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    backend = fxckpt.Backend(1.0, inner="aot_eager")
    forward, x = torch.compile(model, backend=backend), torch.randn(2, 4)
    for _ in range(4):
        forward(x).sum().backward()
    report = backend.report().step
    assert report is not None and report.steps == 4
    assert backend._graphs[0].excess[1] > 0


def test_graph_scope_gives_each_graph_the_budget() -> None:
    model, backend = compiled(0.9, scope="graph")
    measured(model)
    assert backend.step is None
    assert all(plan.peak_bytes <= (plan.budget_bytes or 0) for plan in backend.plans)


def test_equal_options_by_name_share_a_step() -> None:
    model = Stack()
    peak, wanted = plain(model)
    limit = int(0.6 * peak)
    for block in model.blocks:
        block.compile(
            backend="fxckpt", options={"budget": limit, "inner": "aot_eager", "scope": "step"}
        )
    for _ in range(3):
        assert_step_is_right(model, limit, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "epoch"},
        {"scope": "step", "in_flight": 0},
        {"scope": "step", "in_flight": True},
        {"scope": "graph", "in_flight": 2},
        {"scope": "graph", "strict": True},
    ],
)
def test_bad_options_say_what_to_use(options: dict[str, object]) -> None:
    with pytest.raises(fxckpt.InvalidOption, match=r"Use|Give"):
        fxckpt.Backend(0.5, **options)


def test_report_prints_one_table() -> None:
    model, backend = compiled(0.6)
    for _ in range(2):
        measured(model)
    text = str(backend.report())
    assert "settled at step 2" in text and "predicted peak" in text


def test_a_compiled_optimizer_is_not_kept() -> None:
    """Dynamo compiles its steps as without a backend that listens to them, and holds no state."""
    backend = fxckpt.Backend(0.9, inner="aot_eager")
    model = nn.Linear(32, 32)
    optimizer: torch.optim.Optimizer | None = torch.optim.Adadelta(model.parameters())
    step = torch.compile(lambda: optimizer and optimizer.step(), backend="eager")
    model(X).sum().backward()
    step()
    assert optimizer is not None and backend.plans == ()
    state = weakref.ref(optimizer.state[model.weight]["square_avg"])
    optimizer = None
    assert state() is None


def test_a_backward_does_not_hold_its_incoming_gradients() -> None:
    """The peak of a step that is one graph is the planned one, gradients of outputs included."""

    def make(scope: str) -> int:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(dropout=0.0) for _ in range(2)))
        backend = fxckpt.Backend("64MiB", inner="aot_eager", scope=scope)
        forward = torch.compile(model, backend=backend)
        forward(X).sin().sum().backward()
        clear(model)
        return fxckpt.measure_peak(lambda: forward(X).sin().sum().backward())

    assert make("step") == make("graph")


def test_a_flop_counter_teaches_nothing() -> None:
    """What a dispatch mode holds is not the step's; levels stay as they were."""
    from torch.utils.flop_counter import FlopCounterMode

    model, backend = compiled(0.7)
    for _ in range(2):
        measured(model)
    before = backend.report().step
    clear(model)
    with FlopCounterMode(display=False):
        step_of(model)()
    measured(model)
    after = backend.report().step
    assert before is not None and after is not None and before.rows == after.rows


class Expanded(nn.Module):
    """Code that allocates before the first compiled block, and holds it through the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack()

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.stack([x, x, x, x]).exp()
        return self.blocks(wide.mean(0) * wide.amax(0))


def test_code_before_the_first_graph_counts() -> None:
    """From the second step on, what the outermost module allocates first is the step's."""
    model, limit = Expanded(), 2_000_000
    x = X.clone().requires_grad_()
    backend = fxckpt.compile_blocks(model.blocks.blocks, limit, inner="aot_eager")
    peaks = []
    for _ in range(4):
        clear(model)
        x.grad = None
        peaks.append(fxckpt.measure_peak(step_of(model, x)))
    report = backend.report().step
    assert report is not None
    assert abs(report.measured_peak_bytes - peaks[-1]) <= 4096
    assert max(peaks[2:]) <= limit
    assert pickle.loads(pickle.dumps(model)) is not model


def test_budget_set_in_a_compiled_block() -> None:
    """A hook of a compiled block may set it: Dynamo does not trace the planner."""
    model, backend = compiled(0.9)

    def lower(module: nn.Module, args: object) -> None:
        backend.set_budget(0.8)

    measured(model)
    handle = model.blocks[1].register_forward_pre_hook(lower)
    measured(model)
    handle.remove()
    measured(model)
    report = backend.report().step
    assert report is not None and report.measured_peak_bytes <= report.budget_bytes
