"""Train a small GPT-2 within three byte budgets, side by side with torch's own options.

The text is the topic documentation that ships with CPython (``pydoc_data.topics``), read byte by
byte. Every row starts from the same weights and the same generator state. Peaks are the CPU
allocator's, of one forward and backward with dropout on. A step's time is divided by that of an
uncheckpointed step run right beside it, so that other load on the machine slows both.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import logging as hf_logging

import fxckpt

MIB = 2**20


class Language(nn.Module):
    """GPT-2 over bytes, with its next-token loss."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        config = GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=width // 64,
            n_positions=length,
            vocab_size=256,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass
class Result:
    """One row of the table."""

    name: str
    peak: int
    predicted: int | None
    times: float
    """Seconds of a step over those of the uncheckpointed model."""
    loss: float
    first: list[Tensor]
    last: list[Tensor]


def batches(length: int, batch: int, count: int) -> list[Tensor]:
    """Return ``count`` batches of bytes of the text."""
    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(
        0, len(data) - length, (count, batch), generator=torch.Generator().manual_seed(0)
    )
    return [torch.stack([data[s : s + length] for s in row]) for row in starts]


@contextmanager
def torch_budget(value: float) -> Iterator[None]:
    """Set ``activation_memory_budget`` for the compiles in this block."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=value):
        yield


def step(
    run: Callable[[Tensor], Tensor], model: nn.Module, ids: Tensor
) -> tuple[float, list[Tensor]]:
    """Return the seconds of a forward and backward, and copies of its loss and gradients."""
    start = time.perf_counter()
    loss = run(ids)
    loss.backward()
    seconds = time.perf_counter() - start
    return seconds, [
        loss.detach().clone(),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def train(
    name: str,
    model: Language,
    data: list[Tensor],
    prepare: Callable[[Language], Any],
    bar: tqdm[Any],
) -> Result:
    """Train a copy of ``model``, run through ``prepare(model)``, and return its measurements."""
    torch._dynamo.reset()
    plain, model = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    bar.set_description(f"{name}: compiling")
    run = prepare(model)
    backend = getattr(run, "fxckpt_backend", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first: list[Tensor] = []
    last: list[Tensor] = []
    ratios: list[float] = []

    def uncheckpointed(ids: Tensor) -> float:
        with torch.random.fork_rng(devices=[]):
            seconds, _ = step(plain, plain, ids)
        plain.zero_grad(set_to_none=True)
        return seconds

    torch.manual_seed(1)
    for number, ids in enumerate(data):
        # The second of the two finds warm memory, so they take turns. Neither runs while the other
        # holds gradients.
        before = uncheckpointed(ids) if number % 2 else None
        seconds, last = step(run, model, ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        reference = uncheckpointed(ids) if before is None else before
        if number:
            ratios.append(seconds / reference)
        else:
            first = last
        bar.set_description(f"{name}: loss {last[0].item():.3f}")
        bar.update()
    peak = fxckpt.measure_peak(lambda: run(data[0]).backward())
    predicted = backend.plans[0].peak_bytes if backend is not None else None
    return Result(name, peak, predicted, statistics.median(ratios), last[0].item(), first, last)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two lists of tensors agree in every bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def within_rounding(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two lists of tensors agree up to float32 rounding, each by its norm."""
    return len(a) == len(b) and all(
        float((x - y).norm()) <= 1e-5 * float(y.norm()) for x, y in zip(a, b, strict=True)
    )


def verdict(result: Result, reference: Result) -> str:
    """Return how the first and the last step compare with the uncheckpointed run, in words."""
    if equal(result.first, reference.first) and equal(result.last, reference.last):
        return "equal, bitwise"
    if within_rounding(result.first, reference.first):
        return "equal up to rounding"
    return "WRONG"


def eager(model: Language) -> Any:
    """Return the model unchanged."""
    return model


def per_block(model: Language) -> Any:
    """Wrap every block in torch.utils.checkpoint."""
    inner: Any = model.model  # transformers renamed the method
    enable = (
        getattr(inner, "activation_checkpointing_enable", None)
        or inner.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    return model


def torch_compiled(value: float) -> Callable[[Language], Any]:
    """Compile with the default partitioner at a budget, without Inductor's code generation."""

    def prepare(model: Language) -> Any:
        compiled = torch.compile(model, backend="aot_eager")

        def run(ids: Tensor) -> Tensor:
            with torch_budget(value) if value < 1 else nullcontext():
                loss: Tensor = compiled(ids)
                return loss

        return run

    return prepare


def with_fxckpt(budget: int) -> Callable[[Language], Any]:
    """Compile with fxckpt within a byte budget."""

    def prepare(model: Language) -> Any:
        backend = fxckpt.Backend(budget=budget, inner="aot_eager")
        compiled = torch.compile(model, backend=backend)
        compiled.fxckpt_backend = backend
        return compiled

    return prepare


def picture(results: list[Result], folder: Path) -> None:
    """Write a plot of peak against time as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    kinds = (
        ("fxckpt", "o", "fxckpt, budget"),
        ("torch budget", "x", "torch, activation_memory_budget"),
        ("", "s", "eager"),
    )
    seen: set[str] = set()
    for result in results:
        kind, marker, label = next(k for k in kinds if result.name.startswith(k[0]))
        color = {"o": "tab:blue", "x": "tab:red", "s": "0.3"}[marker]
        axes.scatter(
            result.peak / MIB,
            result.times,
            marker=marker,
            color=color,
            s=60,
            label=None if label in seen else label,
        )
        seen.add(label)
        axes.annotate(
            result.name.removeprefix(f"{kind or 'eager,'} ").removeprefix("torch.utils."),
            (result.peak / MIB, result.times),
            # A torch budget lies beside checkpoint per block: its label goes below.
            xytext=(0, -14 if marker == "x" else 7),
            textcoords="offset points",
            fontsize=8,
            ha="center",
        )
    axes.set_xlabel("measured peak of one forward and backward, MiB")
    axes.set_ylabel("time of one training step, over that of the model as it is")
    axes.set_title("GPT-2 on bytes: peak against time")
    axes.margins(x=0.12, y=0.12)
    axes.legend()
    axes.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("svg", "png"):
        figure.savefig(folder / f"demo.{kind}", dpi=120)
    plt.close(figure)


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of integers that are at least ``least``."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=whole(2),
        default=6,
        help="training steps; the first one compiles and is not timed",
    )
    parser.add_argument("--layers", type=whole(1), default=12)
    parser.add_argument(
        "--width", type=whole(64), default=384, help="a multiple of 64, the size of a head"
    )
    parser.add_argument("--length", type=whole(2), default=128, help="bytes of text in a sequence")
    parser.add_argument("--batch", type=whole(1), default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    options = parser.parse_args(arguments)
    if options.width % 64:
        parser.error(f"--width must be a multiple of 64, got {options.width}")
    return options


def runs(options: argparse.Namespace) -> tuple[list[Result], fxckpt.Plan]:
    """Train in every way; return the results and the plan for the tightest budget."""
    model = Language(options.layers, options.width, options.length)
    data = batches(options.length, options.batch, options.steps)
    with tqdm(total=8 * options.steps, file=sys.stderr, smoothing=0) as bar:
        results = [train("eager, uncheckpointed", model, data, eager, bar)]
        results.append(
            train("eager, torch.utils.checkpoint per block", model, data, per_block, bar)
        )
        for value in (0.5, 0.1, 0.0):
            results.append(
                train(f"torch budget {value:g}", model, data, torch_compiled(value), bar)
            )
        backends: list[fxckpt.Backend] = []
        for share in (0.7, 0.5, 0.3):
            budget = int(share * results[0].peak)

            def prepare(m: Language, budget: int = budget) -> Any:
                run = with_fxckpt(budget)(m)
                backends.append(run.fxckpt_backend)
                return run

            results.append(train(f"fxckpt {budget / MIB:.0f} MiB", model, data, prepare, bar))
        bar.set_description("done")
    return results, backends[-1].plans[0]


def table(results: Sequence[Result], steps: int) -> str:
    """Return the results as text."""
    rows = [
        (
            r.name,
            f"{r.peak / MIB:.1f}",
            "" if r.predicted is None else f"{r.predicted / MIB:.1f}",
            f"{r.times:.2f}",
            f"{r.loss:.5f}",
            verdict(r, results[0]),
        )
        for r in results
    ]
    head = (
        "run",
        "peak MiB",
        "predicted",
        "x eager",
        f"loss after {steps}",
        "loss and gradients",
    )
    return tabulate(
        rows, headers=head, disable_numparse=True, colalign=("left", *["right"] * 4, "left")
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and print its table."""
    options = options_of(arguments)
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
    hf_logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    results, tightest = runs(options)
    print(table(results, options.steps))
    print("\nThe plan for the tightest budget:\n")
    print(tightest.explain().top(25))
    picture(results, options.out)
    print(f"\nwrote {options.out / 'demo.svg'} and demo.png: peak against time")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except fxckpt.BudgetInfeasible as error:
        print(
            f"\nthe smallest of the three budgets cannot be met with these sizes: {error}",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
