"""Steps and optimizers in several threads, and optimizers that run steps of their own."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxckpt
from tests.step.stack import Stack, X, assert_step_is_right, clear, plain, step_of


class Interrupted:
    """An inner compiler, whose next half to run lets another thread do something first."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.calls = self.at = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.calls += 1
            if self.waiting and self.calls >= self.at:
                in_thread(self.waiting.pop())
            return gm(*args)

        return run

    def interrupt(self, call: int, action: Callable[[], object]) -> None:
        """Let another thread act before a half runs, the first one being ``call`` 1."""
        self.calls, self.at = 0, call
        self.waiting.append(action)


def in_thread(action: Callable[[], object]) -> None:
    """Run something in another thread, and raise its error here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_optimizer_of_another_thread_ends_no_step() -> None:
    """One that steps while the first forward runs leaves the step as it is."""
    model = Stack()
    peak, wanted = plain(model)
    limit = int(0.6 * peak)
    inner = Interrupted()
    backend = fxckpt.compile_blocks(model.blocks, limit, inner=inner)
    for _ in range(3):
        assert_step_is_right(model, limit, wanted)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    for call in (1, 2, 6):
        inner.interrupt(call, other.step)
        assert_step_is_right(model, limit, wanted)
        assert not inner.waiting
    report = backend.report().step
    assert report is not None and sum(row.calls for row in report.rows) == len(model.blocks)


def test_step_within_the_step_of_another_thread() -> None:
    """Two models of one backend may run at once: gradients and later steps are right."""
    one = Stack()
    for block in one.blocks:
        block.dropout.p = 0.0  # All threads draw from one generator.
    other = copy.deepcopy(one)
    _, wanted = plain(one)
    inner = Interrupted()
    fxckpt.compile_blocks([*one.blocks, *other.blocks], "1GiB", inner=inner)
    for model in (one, other, one, other):
        assert_gradients(model, wanted)
    for call in (1, 2, 6):
        inner.interrupt(call, lambda: assert_gradients(other, wanted))
        assert_gradients(one, wanted)
        assert not inner.waiting
    for model in (one, other, one, other):
        assert_gradients(model, wanted)


def assert_gradients(model: Stack, wanted: list[Tensor]) -> None:
    """Check the gradients of one step."""
    clear(model)
    step_of(model)()
    for parameter, expected in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, expected)


def test_history_of_an_optimizer_is_no_part() -> None:
    """What an optimizer keeps from closure to closure is not the step's."""
    model = Stack()
    peak, _ = plain(model)
    limit = int(0.8 * peak)
    backend = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=6, history_size=20)
    peaks = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).sum()
        loss.backward()
        if (report := backend.report().step) is not None:
            peaks.append(report.measured_peak_bytes)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert len(peaks) > 12 and max(peaks) <= limit
    assert len(set(peaks[4:])) == 1
