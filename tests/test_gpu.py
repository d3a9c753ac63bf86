"""The same promises on a GPU: equal gradients, and a peak inside the budget by the allocator's own statistics."""

from __future__ import annotations

import pytest
import torch

from tests.test_models import Trial, compiled, same
from tests.zoo import ENTRIES, Entry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.name in ("gpt2", "llama", "unet")], ids=lambda e: e.name)
def test_same_step_and_peak_inside_the_budget(entry: Entry) -> None:
    torch.use_deterministic_algorithms(True)
    trial = Trial(entry)
    trial.model.cuda()
    trial.inputs = tuple(t.cuda() for t in trial.inputs)
    expected = trial.step(torch.compile(trial.model, backend="aot_eager_default_partitioner"))
    for budget in (None, 0.9, 0.7):
        forward, backend = compiled(trial.model, budget)
        got = trial.step(forward)
        (plan,) = backend.plans
        assert same(expected, got) == [], f"budget {budget}"
        if plan.budget_bytes is not None:
            assert trial.peak(forward) <= plan.budget_bytes
