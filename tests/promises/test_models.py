"""Real models at every budget: equal gradients, a peak within the budget, the planned work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxckpt
from tests.models.zoo import ENTRIES, Entry

FEW = (None, 0.7, "floor")
OTHERS = ("gpt2-sdpa",)
"""Models in the sweep alone: llama has the same attention, and gpt2 all the rest."""
BUDGETS = (None, 0.9, 0.7, 0.5, "floor")


class Trial:
    """A model and its inputs; every step starts from the same weights, buffers and RNG state."""

    def __init__(self, entry: Entry) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = entry.make()
        self.model.train()
        self.start = copy.deepcopy(self.model.state_dict())

    def step(self, forward: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Run a forward and a backward; return all that must be equal."""
        self.model.load_state_dict(self.start)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = forward(*self.inputs)
        loss.backward()
        seen = {"loss": loss.detach(), "generator": torch.get_rng_state()}
        seen |= {
            f"grad {n}": p.grad.clone()
            for n, p in self.model.named_parameters()
            if p.grad is not None
        }
        return seen | {f"buffer {n}": b.clone() for n, b in self.model.named_buffers()}

    def peak(self, forward: Callable[..., Tensor]) -> int:
        self.model.zero_grad(set_to_none=True)
        return fxckpt.measure_peak(lambda: forward(*self.inputs).backward())

    def flops(self, forward: Callable[..., Tensor]) -> int:
        """Count the FLOPs of a backward that is compiled already."""
        self.model.zero_grad(set_to_none=True)
        loss = forward(*self.inputs)
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with FlopCounterMode(display=False, custom_mapping={attention: attention_flops}) as counter:
            loss.backward()
        return counter.get_total_flops()


def attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    """Return the FLOPs of the two products of attention, unknown to torch's counter."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * width * 2


def compiled(model: nn.Module, budget: object) -> tuple[nn.Module, fxckpt.Backend]:
    torch._dynamo.reset()
    backend = fxckpt.Backend(budget=budget, inner="aot_eager")
    return torch.compile(model, backend=backend), backend


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names that differ in any bit."""
    return [
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or not torch.equal(a[name], b[name])
    ]


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.name not in OTHERS], ids=lambda e: e.name
)
def test_same_step_within_budgets(entry: Entry) -> None:
    """Gradients, peak, buffers and work are those of the plan."""
    check(entry, FEW)


@pytest.mark.sweep
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_same_step_at_more_budgets(entry: Entry) -> None:
    """The same at budgets in between."""
    check(entry, BUDGETS)


def check(entry: Entry, budgets: Sequence[object]) -> None:
    """Compare steps within budgets with the uncheckpointed one."""
    trial = Trial(entry)
    uncheckpointed = torch.compile(trial.model, backend="aot_eager_default_partitioner")
    expected = trial.step(uncheckpointed)
    flops = trial.flops(uncheckpointed)
    floor = None
    for budget in budgets:
        asked = floor if budget == "floor" else budget
        forward, backend = compiled(trial.model, asked)
        try:
            got = trial.step(forward)
        except fxckpt.BudgetInfeasible as error:
            assert error.floor_bytes > error.budget_bytes
            floor = error.floor_bytes
            continue
        (plan,) = backend.plans
        floor = floor or plan.floor_bytes
        assert same(expected, got) == [], f"budget {budget}"
        assert trial.flops(forward) - flops == plan.recompute_flops
        measured = trial.peak(forward)
        assert plan.peak_bytes <= plan.baseline_peak_bytes
        if plan.budget_bytes is not None:
            assert measured <= plan.budget_bytes
        assert abs(measured - plan.peak_bytes) <= 0.01 * plan.peak_bytes
    assert plan.schedule, "the tightest budget recomputes nothing"
