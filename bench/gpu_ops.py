"""What a GPU's prices and bytes rest on: ops by the profiler, memory of libraries, eager regions.

    python bench/gpu_ops.py [libraries] [link] [ops] [regions]

``libraries``: memory that they take at a first call and keep; first, or alone, as it is of a fresh
process. ``link``: copies to and from memory of the host. ``ops``: device time of a step by op,
beside what the roofline says. ``regions``: peak and time of eager regions beside torch's.
``FXCKPT_TEST_DEVICE=cpu`` runs the same code at tiny sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

# Kineto logs each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_device import NoDevice, chosen_device
from gpu_models import MODELS, Block, Language, Stack

import fxckpt
from fxckpt.costs.roofline import device_roofline
from fxckpt.memory_meter import meter_of

PROFILED = ("gpt2", "llama")
STEPS, ROWS = 5, 32


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


class Recorded:
    """The roofline of a device, which keeps what it says of each node."""

    name = "recorded roofline"

    def __init__(self, device: str) -> None:
        self._roofline = device_roofline(torch.device(device))
        self.said: dict[torch.fx.Node, float] = {}

    def flops(self, node: torch.fx.Node) -> int:
        """Return the FLOPs of one run."""
        return self._roofline.flops(node)

    def seconds(self, node: torch.fx.Node) -> float:
        """Return the seconds of one run."""
        self.said[node] = self._roofline.seconds(node)
        return self.said[node]


def ops(device: str) -> Iterator[str]:
    """Yield a table for each model: microseconds of its ops, planned and measured."""
    for name in PROFILED:
        torch._dynamo.reset()
        made, cost = MODELS[name](torch.bfloat16, device, is_tiny=device == "cpu"), Recorded(device)
        backend = fxckpt.Backend(None, inner="aot_eager", cost=cost)
        step = torch.compile(made.model, backend=backend)

        def run(step: Any = step, made: Any = made) -> None:
            made.model.zero_grad(set_to_none=True)
            step(*made.inputs).backward()

        seconds = fastest(run, device)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * (device == "cuda"))]
        with profile(activities=activities) as prof:
            run()
            synchronize(device)
        kind = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
        events = [e for e in prof.key_averages() if e.key.startswith("aten::")]
        measured = {e.key: (getattr(e, kind), e.count) for e in events if getattr(e, kind) > 0}
        planned, counts = Counter[str](), Counter[str]()
        for node, took in cost.said.items():
            key = str(getattr(node.target, "overloadpacket", node.target)).replace(".", "::")
            planned[key] += 1e6 * took  # type: ignore[assignment]
            counts[key] += 1
        most = {k: max(planned[k], measured.get(k, (0, 0))[0]) for k in {*planned, *measured}}
        rows = [
            (
                key,
                f"{planned[key]:.0f}",
                counts[key],
                *(f"{n:.0f}" for n in measured.get(key, (0, 0))),
            )
            for key in sorted(most, key=most.__getitem__, reverse=True)[:ROWS]
        ]
        yield (
            f"{name}: a step {1e3 * seconds:.1f} ms, its kernels "
            f"{sum(n for n, _ in measured.values()) / 1e3:.1f} ms, planned "
            f"{sum(planned.values()) / 1e3:.1f} ms\n"
            + tabulate(rows, ("op", "planned us", "runs", "measured us", "runs"))
        )


def fastest(run: Callable[[], None], device: str) -> float:
    """Return the least seconds of some steps, after two that warm up."""
    took = []
    for _ in range(2 + STEPS):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        took.append(time.perf_counter() - begin)
    return min(took[2:])


def libraries(device: str) -> Iterator[str]:
    """Yield a table of bytes that first calls take and keep."""
    meter = meter_of(device)
    x = torch.randn(64, 64, device=device)
    leaf = x.clone().requires_grad_()
    q = torch.randn(2, 8, 256, 64, device=device, dtype=torch.bfloat16)
    image, kernel = torch.randn(2, 8, 16, 16, device=device), torch.randn(8, 8, 3, 3, device=device)
    calls: dict[str, Callable[[], object]] = {
        "matmul": lambda: x @ x,
        "matmul again": lambda: x @ x,
        "linear with a bias": lambda: F.linear(x, x, x[0]),
        "backward of a matmul": lambda: torch.autograd.grad((leaf @ x).sum(), leaf),
        "backward of a matmul again": lambda: torch.autograd.grad((leaf @ x).sum(), leaf),
        "attention": lambda: F.scaled_dot_product_attention(q, q, q),
        "convolution": lambda: F.conv2d(image, kernel),
    }
    rows = []
    for name, call in calls.items():
        synchronize(device)
        before = meter.allocated()
        call()
        synchronize(device)
        rows.append((name, f"{(meter.allocated() - before) / 2**20:.2f}"))
    yield tabulate(rows, ("first call", "MiB kept"))


def link(device: str) -> Iterator[str]:
    """Yield a table of copies each way, and of how soon they return to the caller."""
    count = 2**28 if device == "cuda" else 2**20
    here = torch.ones(count, dtype=torch.uint8, device=device)
    rows = []
    for kind in ("page-locked", "pageable"):
        pin = kind == "page-locked" and device == "cuda"
        there = torch.ones(count, dtype=torch.uint8, pin_memory=pin)
        for way, target, source in (("to the host", there, here), ("from it", here, there)):
            returned = []

            def run(target: Any = target, source: Any = source, returned: Any = returned) -> None:
                begin = time.perf_counter()
                target.copy_(source, non_blocking=True)
                returned.append(time.perf_counter() - begin)

            rate = count / fastest(run, device) / 1e9
            rows.append((kind, way, f"{rate:.1f}", f"{1e3 * min(returned[2:]):.2f}"))
    yield tabulate(rows, ("memory", "way", "GB/s", "returned after ms"))


def regions(device: str) -> Iterator[str]:
    """Yield a table of eager regions, one for each block."""
    layers, width, heads, words, batch, length = (
        (2, 64, 4, 97, 2, 32) if device == "cpu" else (8, 1024, 16, 32000, 8, 1024)
    )
    with torch.device(device):
        stack = Stack([Block(width, heads, 0.1, True) for _ in range(layers)])
        model = Language(words, length, width, stack, nn.LayerNorm(width)).to(torch.bfloat16)
        tokens = torch.randint(0, words, (batch, length))
    policy = fxckpt.policies.save_matmuls
    ways: dict[str, Callable[[nn.Module, Any], Any]] = {
        "none": lambda block, x: block(x),
        "torch": lambda block, x: checkpoint(block, x, use_reentrant=False),
        "fxckpt": fxckpt.checkpoint,
        "fxckpt, matmuls saved": lambda block, x: fxckpt.checkpoint(block, x, policy=policy),
    }
    plain, rows = [*stack.blocks], []
    for name, way in ways.items():
        stack.blocks = nn.ModuleList(Region(block, way) for block in plain)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(tokens).backward()

        seconds = fastest(run, device)
        model.zero_grad(set_to_none=True)
        rows.append((name, f"{fxckpt.measure_peak(run) / 1e6:.1f}", f"{1e3 * seconds:.2f}"))
    yield tabulate(rows, ("regions", "peak MB", "step ms"))


class Region(nn.Module):
    """A block that a function calls."""

    def __init__(self, block: nn.Module, way: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.block, self._way = block, way

    def forward(self, x: Any) -> Any:
        return self._way(self.block, x)


PARTS: dict[str, Callable[[str], Iterator[str]]] = {
    "libraries": libraries,
    "link": link,
    "ops": ops,
    "regions": regions,
}


def main(arguments: list[str] | None = None) -> int:
    """Print the parts that are asked for, all by default; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args(arguments).parts or [*PARTS]
    if wrong := [part for part in parts if part not in PARTS]:
        parser.error(f"there is no part {wrong[0]!r}. They are {', '.join(PARTS)}.")
    try:
        device = chosen_device()
    except NoDevice as error:
        print(f"bench/gpu_ops.py: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    for part in parts:
        for table in PARTS[part](device):
            print(f"{table}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
