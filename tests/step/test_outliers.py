"""Steps that are unlike the others: outputs that are kept, odd temporaries, calls that vary."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxckpt
from tests.step.stack import Stack, X, clear, gradients, measured, plain


class Odd(Stack):
    """A stack whose eager code may take much for a moment, before or between its blocks."""

    before = between = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + x.repeat(1, self.before)[:, :32] * 0
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.between and i == 1:
                x.detach().repeat(1, self.between).sum()
        return nn.functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.long))


def odd(share: float, depth: int = 4) -> tuple[Odd, int, fxckpt.Backend]:
    """Return a stack by blocks with its budget, a share of its peak without what is odd."""
    peak, _ = plain(Odd(depth))
    model, limit = Odd(depth), int(share * peak)
    return model, limit, fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")


def test_a_temporary_before_the_first_graph_counts() -> None:
    """It is told where it is over the budget, and a step that never fits for it is refused."""
    model, limit, backend = odd(0.7)
    model.before = 64
    with pytest.warns(UserWarning, match="code before the first graph"):
        peaks = [measured(model) for _ in range(2)]
    assert min(peaks) > limit
    report = backend.report().step
    assert report is not None and report.measured_peak_bytes == peaks[-1]
    with pytest.raises(fxckpt.BudgetInfeasible) as raised:
        measured(model)
    model, _, _ = odd(raised.value.floor_bytes / plain(Odd(4))[0])
    model.before = 64
    assert [measured(model) for _ in range(4)][-1] <= raised.value.floor_bytes


def test_one_odd_step_ends_no_training() -> None:
    """The steps after it run, within the budget, and in time as they did before."""
    model, limit, _ = odd(0.7)
    usual = [measured(model) for _ in range(3)][-1]
    model.between = 64
    with pytest.warns(UserWarning, match="over the budget"):
        assert measured(model) > limit
    model.between = 0
    peaks = [measured(model) for _ in range(10)]
    assert max(peaks) <= limit and peaks[-1] == usual


def test_a_kept_output_ends_no_steps() -> None:
    """A forward whose graph is only looked at is left to what is held outside, after a while."""
    model, limit, backend = odd(0.6)
    usual = [measured(model) for _ in range(3)][-1]
    kept = model(X)
    for _ in range(80):
        clear(model)
        model(X).backward()
    assert backend.step is not None
    steps = backend.step.steps
    assert measured(model) == usual <= limit
    assert backend.step.steps == steps + 1
    del kept
    assert measured(model) == usual


def test_an_optimizer_ends_a_step_with_kept_outputs() -> None:
    """Its parameters have changed, so that no backward of them is to come."""
    model, _, backend = odd(1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        model(X).backward()
        optimizer.step()

    for _ in range(3):
        step()
    kept = model(X)
    assert backend.step is not None
    before = backend.step.steps
    for _ in range(4):
        step()
    assert backend.step.steps == before + 4
    del kept


class Shuffled(Stack):
    """A stack that leaves blocks out at random."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.6:
                x = block(x)
        return nn.functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.long))


def test_steps_of_many_lengths_leave_room() -> None:
    """Once all lengths were seen, steps of any of them are within the budget."""
    peak, _ = plain(Stack(6))
    torch.manual_seed(0)
    model, limit = Shuffled(6), int(0.5 * peak)
    torch.manual_seed(0)
    eager = Shuffled(6)
    fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(60):
            measured(model)
    for seed in range(40):
        random.seed(seed)
        assert measured(model) <= limit
        random.seed(seed)
        measured(eager)
        assert all(map(torch.equal, gradients(model), gradients(eager)))


class RunAgain(torch.autograd.Function):
    """Runs a block without gradients, and again with them in its backward, as if reversible."""

    @staticmethod
    def forward(ctx, x, block, *parameters):  # type: ignore[no-untyped-def]
        ctx.block, ctx.count = block, len(parameters)
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, incoming):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        out.backward(incoming)
        return x.grad, None, *[None] * ctx.count


BATCH = torch.randn(2048, 32)


class Nested(Stack):
    """A stack whose blocks run without gradients, and again in the backward of a function."""

    is_torchs = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            if self.is_torchs:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = RunAgain.apply(x, block, *block.parameters())
        return nn.functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize("is_torchs", [True, False])
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_blocks_run_again_in_a_backward(is_torchs: bool, has_optimizer: bool) -> None:
    """They are one step with the forward before, whose bytes count from the second step on."""

    def made() -> Nested:
        torch.manual_seed(0)
        model = Nested(6)
        model.head = nn.Linear(32, 20)
        model.is_torchs = is_torchs
        for block in model.blocks:
            block.dropout.p = 0.0
        return model

    eager = made()
    peak, wanted = plain(eager, BATCH)
    model, limit = made(), int(0.9 * peak)
    backend = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(5):
        took = measured(model, BATCH)
        assert number < 2 or took <= limit
        assert all(map(torch.equal, gradients(model), wanted))
        if has_optimizer:
            optimizer.step()
    report = backend.report().step
    assert report is not None and sum(row.calls for row in report.rows) == 6
    assert 0.8 * peak < report.measured_peak_bytes <= limit


class Halting(Stack):
    """A stack that may end after its first blocks."""

    depth = 4

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x.square().mean()


def test_a_longer_step_is_over_once() -> None:
    """From the second one on, the calls with which both kinds begin leave room for it."""
    eager = Halting(8)
    eager.depth = 8
    peak, _ = plain(eager)
    model, limit = Halting(8), int(0.5 * peak)
    fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    over = []
    with pytest.warns(UserWarning, match="over the budget"):
        for number in range(1, 21):
            model.depth = 8 if number % 5 == 0 else 4
            if measured(model) > limit:
                over.append(number)
    assert over == [5]


def test_an_optimizer_of_others_ends_no_step() -> None:
    """A critic steps between a generator's forward and its backward, all in one step."""

    def made() -> tuple[Halting, Halting]:
        torch.manual_seed(0)
        makes, judges = Halting(6), Halting(4)
        for block in (*makes.blocks, *judges.blocks):
            block.dropout.p = 0.0
        return makes, judges

    def step(makes: Halting, judges: Halting, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        found = X
        for block in makes.blocks:
            found = block(found)
        judges(found.detach()).backward()
        optimizer.step()
        judges(found).backward()

    makes, judges = made()
    optimizer = torch.optim.SGD(judges.parameters(), 0.1)
    peaks = []
    for _ in range(3):
        clear(makes)
        peaks.append(fxckpt.measure_peak(lambda: step(makes, judges, optimizer)))
    wanted, limit = gradients(makes), int(0.7 * max(peaks))
    makes, judges = made()
    blocks = [*makes.blocks, *judges.blocks]
    backend = fxckpt.compile_blocks(blocks, limit, inner="aot_eager")
    optimizer = torch.optim.SGD(judges.parameters(), 0.1)
    for number in range(5):
        clear(makes)
        peak = fxckpt.measure_peak(lambda: step(makes, judges, optimizer))
        report = backend.report().step
        assert report is not None
        assert number < 2 or report.measured_peak_bytes <= limit
        assert number < 2 or peak <= limit
        if number == 2:
            assert all(map(torch.equal, gradients(makes), wanted))
    assert report.measured_peak_bytes > 0.8 * limit
