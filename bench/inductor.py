"""fxckpt with its default inner compiler, Inductor, beside plain ``torch.compile`` in the same run.

The ways for each model ("stock" is plain ``torch.compile`` with its default partitioner): stock;
stock with ``activation_memory_budget``; stock with every block in ``torch.utils.checkpoint``;
fxckpt without a budget, at shares of stock's peak, and at the peak of the per-block checkpoint.
All are compiled first, then timed in turn, step by step, in a new order each time. Peaks are the
CPU allocator's (on a GPU, the caching allocator's), of one forward and backward.

    python bench/inductor.py                      # every model, a table each
    python bench/inductor.py gpt2 --steps 9
    python bench/inductor.py --bars --steps 41    # few ways, timed to within 1 or 2 %
    python bench/inductor.py --compile            # compile times, each in a fresh process
    python bench/inductor.py --compile --first    # with empty caches: the first on a machine
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import fxckpt

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent))
from bench.models import NextTokenLoss  # noqa: E402

MIB = 2**20
ModelAndInputs = tuple[nn.Module, tuple[Tensor, ...]]


class MeanSquare(nn.Module):
    """The mean square of a model's last hidden state, as its loss."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.model(**{self.name: x}).last_hidden_state.square().mean()


class Double(nn.Module):
    """Two convolutions, each with a normalization and an activation."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        layers = [
            m
            for n in (before, after)
            for m in (nn.Conv2d(n, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """A U-Net of three levels with concatenated skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.middle = Double(4 * width, 4 * width)
        self.up = nn.ModuleList(
            Double(a + b, b)
            for a, b in zip([4 * width, 4 * width, 2 * width], reversed(widths), strict=True)
        )
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.out(x).square().mean()


def gpt2(dropout: float = 0.0) -> ModelAndInputs:
    """Return GPT-2 of 6 layers, width 256, full vocabulary: its head exceeds all of its blocks."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = hf.GPT2Config(
        n_layer=6, n_embd=256, n_head=4, n_positions=256, attn_implementation="eager", **rates
    )
    return NextTokenLoss(hf.GPT2LMHeadModel(config)), (
        torch.randint(0, config.vocab_size, (8, 256)),
    )


def bert() -> ModelAndInputs:
    """Return BERT of 6 layers with dropout."""
    sizes = {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "max_position_embeddings": 256,
    }
    model = hf.BertModel(
        hf.BertConfig(**sizes, attn_implementation="sdpa"), add_pooling_layer=False
    )
    return MeanSquare(model, "input_ids"), (torch.randint(0, 30522, (8, 256)),)


def llama() -> ModelAndInputs:
    """Return Llama of 6 layers with grouped queries and a small vocabulary."""
    sizes = {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 4096,
    }
    config = hf.LlamaConfig(**sizes, max_position_embeddings=512, attn_implementation="sdpa")
    return NextTokenLoss(hf.LlamaForCausalLM(config)), (torch.randint(0, 4096, (4, 512)),)


def vit() -> ModelAndInputs:
    """Return ViT of 6 layers with dropout."""
    sizes = {
        "num_hidden_layers": 6,
        "hidden_size": 192,
        "num_attention_heads": 3,
        "intermediate_size": 768,
        "image_size": 128,
        "patch_size": 8,
    }
    config = hf.ViTConfig(**sizes, hidden_dropout_prob=0.1, attn_implementation="eager")
    return MeanSquare(hf.ViTModel(config, add_pooling_layer=False), "pixel_values"), (
        torch.randn(8, 3, 128, 128),
    )


def convnext() -> ModelAndInputs:
    """Return ConvNeXt of three stages."""
    config = hf.ConvNextConfig(
        hidden_sizes=[48, 96, 192], depths=[2, 2, 4], num_stages=3, image_size=128
    )
    return MeanSquare(hf.ConvNextModel(config), "pixel_values"), (torch.randn(8, 3, 128, 128),)


def unet() -> ModelAndInputs:
    """Return a U-Net of three levels."""
    return UNet(24), (torch.randn(4, 3, 128, 128),)


MODELS: dict[str, Callable[[], ModelAndInputs]] = {
    "gpt2": gpt2,
    "gpt2-dropout": lambda: gpt2(0.1),
    "bert": bert,
    "llama": llama,
    "vit": vit,
    "convnext": convnext,
    "unet": unet,
}
BLOCKS = ("GPT2Block", "BertLayer", "LlamaDecoderLayer", "ViTLayer", "ConvNextLayer", "Double")
"""Classes of the models' blocks, which users wrap in a checkpoint."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(name: str, *, by_block: bool = False) -> ModelAndInputs:
    """Return a model in training mode and its inputs, both from seed 0.

    ``by_block`` wraps every block in ``torch.utils.checkpoint``.
    """
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.to(DEVICE).train()
    for block in model.modules() if by_block else ():
        if type(block).__name__ in BLOCKS:
            block.forward = _wrapped(block.forward)  # type: ignore[method-assign]
    return model, tuple(x.to(DEVICE) for x in inputs)


def _wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


@dataclass
class Row:
    """The measurements of one way to compile the step."""

    name: str
    budget_bytes: int | None = None
    peak_bytes: int = 0
    predicted_bytes: int | None = None
    seconds: float = 0.0
    compile_seconds: float = 0.0
    failed: str = ""
    floor_bytes: int | None = None


class Contender:
    """A compiled step with its measurements."""

    def __init__(
        self,
        row: Row,
        model: nn.Module,
        inputs: tuple[Tensor, ...],
        backend: Any,
        around: AbstractContextManager[Any],
    ) -> None:
        self.row, self.model, self.inputs, self.backend = row, model, inputs, backend
        start = time.perf_counter()
        with around:
            # Without isolation, a way would run the code compiled for another of equal structure.
            self.compiled = torch.compile(model, backend=backend, isolate_recompiles=True)
            self.step()
        row.compile_seconds = time.perf_counter() - start
        row.peak_bytes = fxckpt.measure_peak(self.run)
        model.zero_grad(set_to_none=True)
        self.times: list[float] = []
        if isinstance(backend, fxckpt.Backend) and len(backend.plans) == 1:
            (plan,) = backend.plans
            row.predicted_bytes = plan.compiled_peak_bytes or plan.peak_bytes

    def run(self) -> None:
        self.compiled(*self.inputs).backward()

    def step(self) -> None:
        self.run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.model.zero_grad(set_to_none=True)

    def timed(self) -> None:
        start = time.perf_counter()
        self.step()
        self.times.append(time.perf_counter() - start)


def torch_budget(share: float) -> AbstractContextManager[Any]:
    """Return a context that sets torch's ``activation_memory_budget``."""
    return torch._functorch.config.patch(activation_memory_budget=share)  # type: ignore[no-any-return]


def contenders(
    name: str, tick: Callable[[str], object], *, with_least: bool, only_bars: bool
) -> tuple[list[Contender], list[Row]]:
    """Compile every way, and return those that run and the rows of those that fail."""
    found: list[Contender] = []
    failed: list[Row] = []

    def add(
        row: Row,
        backend: Any = "inductor",
        around: AbstractContextManager[Any] | None = None,
        *,
        by_block: bool = False,
    ) -> Row:
        tick(row.name)
        try:
            found.append(
                Contender(row, *make(name, by_block=by_block), backend, around or nullcontext())
            )
        except fxckpt.BudgetInfeasible as error:
            row.failed, row.floor_bytes = (
                f"least is {error.floor_bytes / MIB:.0f} MiB",
                error.floor_bytes,
            )
            failed.append(row)
        return row

    torch._dynamo.reset()
    stock = add(Row("stock"))
    for share in () if only_bars else (0.5, 0.1, 0.0):
        add(Row(f"stock, activation_memory_budget={share:g}"), around=torch_budget(share))
    by_block = add(Row("stock, checkpoint by block"), by_block=True)
    add(Row("fxckpt"), fxckpt.Backend())
    for share in () if only_bars else (0.9, 0.7, 0.5):
        budget = int(share * stock.peak_bytes)
        add(Row(f"fxckpt at {share:.0%} of stock", budget), fxckpt.Backend(budget=budget))
    add(
        Row("fxckpt at checkpoint's peak", by_block.peak_bytes),
        fxckpt.Backend(budget=by_block.peak_bytes),
    )
    if with_least:
        least = add(Row("fxckpt, least", 1), fxckpt.Backend(budget=1))
        failed.remove(least)
        add(Row("fxckpt, least", least.floor_bytes), fxckpt.Backend(budget=least.floor_bytes))
    # The difference between two runs of the same code is the noise of the other times.
    add(Row("stock, again"))
    return found, failed


def bench(name: str, steps: int, *, with_least: bool, only_bars: bool) -> list[Row]:
    """Compile every way, time them in turn, and return their rows."""
    progress = tqdm(unit="way", leave=False)

    def tick(way: str) -> None:
        progress.set_description(f"{name}: {way}")
        progress.update()

    found, failed = contenders(name, tick, with_least=with_least, only_bars=only_bars)
    order = random.Random(0)
    for _ in tqdm(range(steps), desc=f"{name}: steps", leave=False):
        # The allocator's state depends on the previous way, so the order changes.
        for contender in order.sample(found, len(found)):
            contender.timed()
    progress.close()
    for contender in found:
        contender.row.seconds = statistics.median(contender.times)
    return [*(c.row for c in found), *failed]


def table(name: str, rows: list[Row]) -> str:
    """Return the rows as a table, relative to stock."""
    stock = rows[0]
    lines = [
        (
            row.name,
            "" if row.budget_bytes is None else f"{row.budget_bytes / MIB:.1f}",
            row.failed or f"{row.peak_bytes / MIB:.1f}",
            "" if row.predicted_bytes is None else f"{row.peak_bytes / row.predicted_bytes:.3f}",
            "" if row.failed else f"{row.peak_bytes / stock.peak_bytes:.2f}",
            "" if row.failed else f"{row.seconds / stock.seconds:.3f}",
        )
        for row in rows
    ]
    headers = (
        name,
        "budget, MiB",
        "peak, MiB",
        "of the prediction",
        "peak of stock",
        "time of stock",
    )
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


COMPILE = """
import sys, time
sys.path.insert(0, {root!r})
import torch, fxckpt
from bench.inductor import make
model, inputs = make({name!r})
backend = {backend}
start = time.perf_counter()
torch.compile(model, backend=backend)(*inputs).backward()
print(time.perf_counter() - start)
"""


SEED = "import torch; torch.compile(torch.sin)(torch.ones(99))"
"""Code that makes Inductor detect the processor's features, once per cache folder."""


def compile_seconds(name: str, backend: str, seed: str | None) -> float:
    """Return the seconds of a first step in a fresh process.

    Its caches are a copy of the folder ``seed``, or empty.
    """
    code = COMPILE.format(root=str(ROOT.parent), name=name, backend=backend)
    with tempfile.TemporaryDirectory() as folder:
        if seed is not None:
            shutil.copytree(seed, folder, dirs_exist_ok=True)
        done = in_process(code, folder)
    return float(done.split()[-1])


def in_process(code: str, folder: str) -> str:
    """Return the output of code run in a fresh process with its caches in ``folder``."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def compile_table(names: list[str], repeats: int, budget: float, *, is_first: bool) -> str:
    """Return a table of compile times relative to stock, measured in turn."""
    ways = {
        "stock": "'inductor'",
        "fxckpt": "fxckpt.Backend()",
        f"fxckpt at {budget:g}": f"fxckpt.Backend(budget={budget})",
    }
    lines = []
    with tempfile.TemporaryDirectory() as seed:
        in_process(SEED, seed)
        for name in names:
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(repeats):
                for way, backend in ways.items():
                    times[way].append(compile_seconds(name, backend, None if is_first else seed))
            stock, *others = (statistics.median(t) for t in times.values())
            lines.append((name, f"{stock:.1f} s", *(f"{other / stock:.3f}" for other in others)))
    return tabulate(lines, ("model", *ways), tablefmt="github", disable_numparse=True)


def main() -> None:
    """Run the benchmark and append its raw rows to a file in ``bench/out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="which; all by default")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each")
    parser.add_argument(
        "--least",
        action="store_true",
        help="look for the least peak too, which takes several lowerings",
    )
    parser.add_argument(
        "--bars",
        action="store_true",
        help="only stock, per-block checkpoint, fxckpt without a budget and at checkpoint's peak, "
        "stock again",
    )
    parser.add_argument("--compile", action="store_true", help="time compiles instead of steps")
    parser.add_argument(
        "--first",
        action="store_true",
        help="with --compile: the first compile on a machine, with empty caches",
    )
    parser.add_argument("--repeats", type=int, default=3, help="with --compile: processes of each")
    parser.add_argument(
        "--budget", type=float, default=0.9, help="with --compile: the budget, a share"
    )
    arguments = parser.parse_args()
    names = arguments.models or list(MODELS)
    if arguments.compile:
        print(compile_table(names, arguments.repeats, arguments.budget, is_first=arguments.first))
        return
    for name in names:
        rows = bench(name, arguments.steps, with_least=arguments.least, only_bars=arguments.bars)
        print(table(name, rows), end="\n\n", flush=True)
        (ROOT / "out").mkdir(exist_ok=True)
        with (ROOT / "out" / f"inductor-{DEVICE}.jsonl").open("a") as out:
            print(
                json.dumps(
                    {
                        "model": name,
                        "torch": torch.__version__,
                        "rows": [asdict(row) for row in rows],
                    }
                ),
                file=out,
            )


if __name__ == "__main__":
    main()
