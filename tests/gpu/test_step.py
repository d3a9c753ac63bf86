"""One budget over a step of many graphs on a GPU: its peak, by the device's allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import Language, LlamaBlock, Stack  # tests/conftest.py leads to bench/

import fxckpt
from tests.steps import differing, outcome

pytestmark = pytest.mark.gpu

LAYERS, WIDTH, VOCABULARY = 6, 256, 512


def language(device: str) -> tuple[Language, torch.Tensor]:
    """Return a Llama whose blocks take most of the memory, and tokens."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    batch, length = (16, 512) if device == "cuda" else (4, 256)
    with torch.device(device):
        stack = Stack([LlamaBlock(WIDTH, 4, 4, 4 * WIDTH) for _ in range(LAYERS)])
        model = Language(VOCABULARY, length, WIDTH, stack, torch.nn.RMSNorm(WIDTH))
        return model, torch.randint(0, VOCABULARY, (batch, length))


def step_peak(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    """Return the peak of a step by the device's own statistics, or by the meter of the CPU."""
    model.zero_grad(set_to_none=True)
    return fxckpt.measure_peak(lambda: model(tokens).backward())


@pytest.mark.filterwarnings("ignore:step 1 had a peak")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_budget_holds_over_blocks(device: str, inner: str) -> None:
    """Each step but the first is predicted, and every step is within the budget."""
    model, tokens = language(device)
    step_peak(model, tokens)
    uncheckpointed = step_peak(model, tokens)
    for share in (0.8, 0.55):
        model, tokens = language(device)
        budget = int(share * uncheckpointed)
        backend = fxckpt.compile_blocks(model.stack.blocks, budget, inner=inner, cost="flops")
        peaks = [step_peak(model, tokens) for _ in range(4)]
        step = backend.report().step
        assert step is not None and step.measured_peak_bytes == peaks[-1]
        assert max(peaks[1:]) <= budget
        assert peaks[-1] == pytest.approx(step.predicted_peak_bytes, rel=0.01)
        # Blocks save less than eager ones, so that the first budget may have room for all.
        assert peaks[-1] > 0.6 * budget


@pytest.mark.usefixtures("deterministic")
def test_gradients_are_equal(device: str) -> None:
    """Blocks at levels of their own have the gradients of the model as it is."""
    model, tokens = language(device)
    expected = outcome(model, model, (tokens,))
    model, tokens = language(device)
    budget = int(0.6 * step_peak(model, tokens))
    model.zero_grad(set_to_none=True)
    fxckpt.compile_blocks(model.stack.blocks, budget, inner="aot_eager", cost="flops")
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        assert differing(expected, outcome(model, model, (tokens,))) == []


def test_trainer_keeps_the_budget(device: str, tmp_path: Path) -> None:
    """transformers' Trainer with the callback: the losses of before, and less memory."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from fxckpt.integrations.trainer import FxckptCallback

    def train(callback: Any) -> list[float]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        config = transformers.LlamaConfig(
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            use_cache=False,
        )
        tokens = torch.randint(0, 256, (16, 256)).tolist()
        trainer = transformers.Trainer(
            model=transformers.LlamaForCausalLM(config),
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=4,
                max_steps=4,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=device == "cpu",
                bf16=device == "cuda",
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[callback] if callback else [],
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = train(None)
    callback = FxckptCallback("60%", inner="aot_eager")
    assert train(callback) == pytest.approx(expected, rel=1e-2)
    step = callback.report().step
    assert step is not None and 0 < step.measured_peak_bytes <= step.budget_bytes
