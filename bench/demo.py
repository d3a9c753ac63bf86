"""Train a GPT-2 inside byte budgets, side by side with torch's own ways: ``make demo``.

The model is ``transformers``' GPT-2 (12 layers, d 384, dropout 0.1, random weights), the text is CPython's own ``pydoc_data.topics``
(the language reference behind ``help()``), read as bytes. Every row starts from the same weights, batches and generator state.
Writes ``bench/out/demo.svg`` and ``.png``, and ends with the plan of the tightest budget.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# The profiler's start and stop lines would break the progress bar.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import pydoc_data.topics

import torch
import torch._functorch.config
import transformers
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import fxckpt

MIB = 2**20
SEED = 1


@dataclass(frozen=True)
class Size:
    """How large the run is."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    steps: int


class LanguageModel(nn.Module):
    """GPT-2 over bytes that returns its next-byte loss, so that one graph holds the whole forward and backward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            n_layer=size.layers,
            n_embd=size.width,
            n_head=size.heads,
            vocab_size=256,
            n_positions=size.length,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
            attn_implementation="eager",
        )
        self.gpt2 = transformers.GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.gpt2(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class First:
    """What the first step produced."""

    loss: Tensor
    gradients: dict[str, Tensor]
    generator: Tensor

    def difference(self, other: First) -> float:
        """Return 0.0 if loss, gradients and generator agree in every bit, else the gradients' relative error (NaN if only the others differ)."""
        if (
            torch.equal(self.loss, other.loss)
            and torch.equal(self.generator, other.generator)
            and all(torch.equal(g, other.gradients[n]) for n, g in self.gradients.items())
        ):
            return 0.0
        error = sum(float((g - other.gradients[n]).double().square().sum()) for n, g in self.gradients.items())
        size = sum(float(g.double().square().sum()) for g in self.gradients.values())
        return (error / size) ** 0.5 or float("nan")


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    name: str
    measured_bytes: int
    predicted_bytes: int | None
    step_seconds: float
    """Median of the steps after the first."""
    first: First
    final_loss: float
    plan: fxckpt.Plan | None = None


@dataclass(frozen=True)
class Way:
    """A way to train: ``prepare`` turns the model into the callable that is trained, and says where its plans will be."""

    name: str
    prepare: Callable[[LanguageModel], tuple[Callable[[Tensor], Tensor], fxckpt.Backend | None]]
    memory_budget: float = 1.0
    """torch's own ``activation_memory_budget``; 1.0 is off."""


def read_batches(size: Size) -> list[Tensor]:
    """Return one batch of byte windows a step, the same for every row."""
    topics = pydoc_data.topics.topics
    text = torch.frombuffer(bytearray("\n".join(topics[k] for k in sorted(topics)).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(text) - size.length, (size.steps, size.batch), generator=generator)
    return [torch.stack([text[s : s + size.length] for s in row]) for row in starts.tolist()]


def eager(model: LanguageModel) -> tuple[Callable[[Tensor], Tensor], None]:
    return model, None


def per_block(model: LanguageModel) -> tuple[Callable[[Tensor], Tensor], None]:
    model.gpt2.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, None


def aot_eager(model: LanguageModel) -> tuple[Callable[[Tensor], Tensor], None]:
    return torch.compile(model, backend="aot_eager", fullgraph=True), None


def uncheckpointed_graph(model: LanguageModel) -> tuple[Callable[[Tensor], Tensor], None]:
    return torch.compile(model, backend="aot_eager_default_partitioner", fullgraph=True), None


def within(budget_bytes: int) -> Callable[[LanguageModel], tuple[Callable[[Tensor], Tensor], fxckpt.Backend]]:
    def prepare(model: LanguageModel) -> tuple[Callable[[Tensor], Tensor], fxckpt.Backend]:
        backend = fxckpt.Backend(budget=budget_bytes, inner="aot_eager")
        return torch.compile(model, backend=backend, fullgraph=True), backend

    return prepare


@contextlib.contextmanager
def memory_budget(fraction: float) -> Iterator[None]:
    with torch._functorch.config.patch(activation_memory_budget=fraction):
        yield


def train(way: Way, start: LanguageModel, batches: Sequence[Tensor], bar: tqdm[None]) -> Result:
    """Train a copy of ``start``: the first step gives gradients (and compiles), all but the first are timed, one more is measured."""
    torch._dynamo.reset()
    model = copy.deepcopy(start).train()
    forward, backend = way.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bar.set_description(f"{way.name}: first step")
    first: First | None = None
    seconds = []
    torch.manual_seed(SEED)
    with memory_budget(way.memory_budget):
        for ids in batches:
            optimizer.zero_grad(set_to_none=True)
            began = time.perf_counter()
            loss = forward(ids)
            loss.backward()
            seconds.append(time.perf_counter() - began)
            if first is None:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
                first = First(loss.detach(), gradients, torch.get_rng_state())
            optimizer.step()
            bar.set_description(way.name)
            bar.update()
        assert first is not None
        final_loss = float(loss.detach())
        del loss
        optimizer.zero_grad(set_to_none=True)
        bar.set_description(f"{way.name}: measuring")
        measured = fxckpt.measure_peak(lambda: forward(batches[0]).backward())
        bar.update()
    plan = backend.plans[0] if backend is not None else None
    return Result(
        name=way.name,
        measured_bytes=measured,
        predicted_bytes=plan.peak_bytes if plan is not None else None,
        step_seconds=statistics.median(seconds[1:]),
        first=first,
        final_loss=final_loss,
        plan=plan,
    )


def equality(result: Result, references: Sequence[Result]) -> str:
    """Say whether the first step's loss and gradients are those of an uncheckpointed run."""
    errors = [reference.first.difference(result.first) for reference in references]
    if 0.0 in errors:
        return "yes, every bit"
    error = min(errors)
    # float32 kernels that add in another order differ near 1e-6; a wrong dropout mask differs near 1.
    return f"{'rounding' if error < 1e-4 else 'NO'}, off by {error:.1g}"


def table(results: Sequence[Result], references: Sequence[Result]) -> str:
    """Return all rows as text."""
    rows = [
        (
            r.name,
            f"{r.measured_bytes / MIB:.1f}",
            "" if r.predicted_bytes is None else f"{r.predicted_bytes / MIB:.1f}",
            f"{r.step_seconds:.2f}",
            f"{r.final_loss:.6f}",
            equality(r, references),
        )
        for r in results
    ]
    headers = ("way", "measured peak MiB", "predicted MiB", "step s", f"loss after {STEPS_TEXT}", "loss and gradients equal")
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 4, "left"))
