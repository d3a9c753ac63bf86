"""Plans that may send values away, beside plans that recompute alone, by the rate of the link.

Nothing runs: layers of Llama 3 8B in bfloat16 for an H100, with links of other machines. Their
parameters are frozen and there is no head, so that the peak is activations. Extra time and the
lower bound are of the plans' own cost model; peaks are simulated.

With ``--measured`` steps of a small Llama run on this CPU, one thread of ops beside the threads of
the copies: peaks and waits as planned and as measured, over throttled links and a disk, beside a
plan that sends everything, eager regions and ``torch.autograd.graph.save_on_cpu``. Steps of all
rows are interleaved.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers as hf
from real_sizes import llama_8b_config
from tabulate import tabulate
from torch import Tensor, nn

import fxckpt
from fxckpt import policies

SHARES = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1)
"""Budgets, as shares of the uncheckpointed peak."""
RATES = (None, 25e9, 50e9, 350e9)
"""Bytes per second each way; None is without offload."""


class Layers(nn.Module):
    """Layers of Llama 3 8B and the mean of what they return."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = llama_8b_config(layers, vocab=8)
        self.model = hf.LlamaModel(config).to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state.mean()


def row(rate: float | None, share: float, plan: fxckpt.Plan, seconds: float) -> tuple[str, ...]:
    """Return the figures of one plan."""
    bound = plan.lower_bound_seconds
    whole = plan.step_seconds + plan.extra_seconds
    return (
        "none" if rate is None else f"{rate / 1e9:.0f}",
        f"{share:.0%}",
        f"{plan.peak_bytes / 1e9:.2f}",
        f"{plan.away_bytes / 1e9:.2f}",
        f"{plan.recompute_seconds / plan.step_seconds:+.2%}",
        f"{plan.stall_seconds / plan.step_seconds:+.2%}",
        f"{plan.slowdown:+.2%}",
        f"{bound / plan.step_seconds:+.2%}",
        f"{whole / (plan.step_seconds + bound):.3f}",
        f"{seconds:.1f}",
    )


@dataclass(frozen=True)
class Case:
    """One way to run the step."""

    name: str
    tier: fxckpt.tiers.Tier | None = None
    budget: float | None = None
    policy: object = None
    way: str = "aot_eager"
    """Inner compiler, or eager mode: ``"regions"`` or torch's ``"save_on_cpu"``."""


@dataclass
class Running:
    """A way to run the step, ready to run, and what its steps took."""

    case: Case
    step: Callable[[], None]
    plan: fxckpt.Plan | None
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    """Seconds that each step waited for copies."""


class Stopwatch:
    """Sum of the seconds that copies were waited for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, tier: fxckpt.tiers.Tier) -> None:
        """Measure the waits for a tier's copies."""
        for way in ("send", "fetch"):
            setattr(tier, way, partial(self._begin, getattr(tier, way)))

    def _begin(self, begin: Callable[[Tensor, Tensor], Any], a: Tensor, b: Tensor) -> Any:
        return _Watched(begin(a, b), self)


@dataclass
class _Watched:
    copy: Any
    watch: Stopwatch

    def result(self) -> None:
        """Wait, and take the time."""
        begin = time.perf_counter()
        self.copy.result()
        self.watch.seconds += time.perf_counter() - begin


def measured(rounds: int, folder: str) -> None:
    """Print the table of steps that run."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # All rows compile one function.
    gb, tiers = 1e9, fxckpt.tiers
    cases = [
        Case("no budget", budget=1.0),
        Case("recompute alone, 40%", budget=0.4),
        *(
            Case(f"throttled {rate / gb:g} GB/s, {share:.0%}", tiers.Throttled("4GiB", rate), share)
            for rate in (0.5 * gb, 1 * gb, 2 * gb)
            for share in (0.7, 0.4)
        ),
        Case("disk, 40%", tiers.Disk(folder, "4GiB"), 0.4),
        Case("send everything, 1 GB/s", tiers.Throttled("4GiB", gb), policy=policies.offload("*")),
        Case("Inductor, no budget", budget=1.0, way="inductor"),
        Case("Inductor, 1 GB/s, 40%", tiers.Throttled("4GiB", gb), 0.4, way="inductor"),
        Case("regions", way="regions"),
        Case("regions, 1 GB/s", tiers.Throttled("4GiB", gb), way="regions"),
        Case("regions, matmuls saved", policy=policies.save_matmuls, way="regions"),
        Case(
            "regions, matmuls, 1 GB/s",
            tiers.Throttled("4GiB", gb),
            policy=policies.save_matmuls,
            way="regions",
        ),
        Case("torch's save_on_cpu", way="save_on_cpu"),
    ]
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=8,
    )
    model = hf.LlamaModel(config).requires_grad_(False)
    x = torch.randn(4, 512, 512, requires_grad=True)
    watch = Stopwatch()
    running = [ready(case, model, x, watch) for case in cases]
    for _ in range(rounds):
        for each in running:
            watch.seconds, begin = 0.0, time.perf_counter()
            each.step()
            each.seconds.append(time.perf_counter() - begin)
            each.waited.append(watch.seconds)
    fastest = statistics.median(running[0].seconds)
    rows = [row_of(each, x, fastest) for each in running]
    headers = (
        "step",
        "peak MB",
        "plan's",
        "away MB",
        "plan's",
        "waited s",
        "plan's",
        "step s",
        "time",
    )
    print(tabulate(rows, headers, disable_numparse=True, stralign="right"))


def ready(case: Case, model: nn.Module, x: Tensor, watch: Stopwatch) -> Running:
    """Return a way to run the step, compiled."""
    plan, is_eager = None, case.way in ("regions", "save_on_cpu")
    if case.way == "regions":
        model = copy.deepcopy(model).train()
        fxckpt.patch_transformers(model, policy=case.policy, offload=case.tier)
    forward = partial(_mean, model)
    if not is_eager:
        backend = fxckpt.Backend(
            case.budget,
            case.policy,
            inner=case.way,
            scope="graph",
            cost="measured",
            offload=case.tier,
        )
        forward = torch.compile(forward, backend=backend)

    def step() -> None:
        x.grad = None
        saves_on_cpu = case.way == "save_on_cpu"
        with torch.autograd.graph.save_on_cpu() if saves_on_cpu else nullcontext():
            loss = forward(x)
        loss.backward()

    step()
    if not is_eager:
        plan = backend.plans[-1]
    if case.tier is not None:
        watch.watch(case.tier)
    return Running(case, step, plan)


def _mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(inputs_embeds=x, use_cache=False).last_hidden_state.mean()


def row_of(each: Running, x: Tensor, fastest: float) -> tuple[str, ...]:
    """Return the figures of one way to run the step."""
    tier, plan = each.case.tier, each.plan
    if tier is not None:
        tier.restart_peak()
    x.grad = None  # What the step frees would count as room.
    peak = fxckpt.measure_peak(each.step)
    return (
        each.case.name,
        f"{peak / 1e6:.3f}",
        "" if plan is None else f"{(plan.compiled_peak_bytes or plan.peak_bytes) / 1e6:.3f}",
        "" if tier is None else f"{tier.peak_bytes / 1e6:.3f}",
        "" if tier is None or plan is None else f"{plan.away_bytes / 1e6:.3f}",
        f"{statistics.median(each.waited):.3f}",
        "" if plan is None else f"{plan.stall_seconds:.3f}",
        f"{statistics.median(each.seconds):.3f}",
        f"{statistics.median(each.seconds) / fastest:.3f}",
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", action="store_true", help="steps that run on this CPU")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each row of those")
    parser.add_argument("--folder", default=".", help="folder on the disk that is measured")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    options = parser.parse_args()
    if options.measured:
        measured(options.rounds, options.folder)
        return
    rows = []
    for rate in RATES:
        offload = None if rate is None else fxckpt.tiers.Host("1TiB", bytes_per_second=rate)
        for share in options.shares:
            with torch.device("meta"):
                model = Layers(options.layers)
                x = torch.empty(1, options.length, 4096, dtype=torch.bfloat16, requires_grad=True)
            begin = time.perf_counter()
            plan = fxckpt.plan(model, x, budget=share, device="H100", offload=offload)
            rows.append(row(rate, share, plan, time.perf_counter() - begin))
            print(*rows[-1], flush=True)
    headers = (
        "link GB/s",
        "budget",
        "peak GB",
        "away GB",
        "recompute",
        "stall",
        "extra time",
        "bound",
        "step / bound's",
        "planner s",
    )
    print(tabulate(rows, headers, disable_numparse=True, stralign="right"))


if __name__ == "__main__":
    main()
