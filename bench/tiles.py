"""Tiles of the head and of the MLPs, beside the untiled graph and a head chunked by hand.

Every row is a plan of a model on the meta device by the roofline of a device that is not here. The
models: GPT-2 (12 layers, dropout 0.1, tied head), by batch and length; in bfloat16 8 layers of
Llama 8B's width at 65,536 tokens, and a head of 248,320 tokens with its loss. With ``--measured``
torch's ``auto_chunker`` is beside them: on the same joint graphs, and on a small head that runs.

    python bench/tiles.py [--device H100] [--tf32] [--case 8x1024] [--measured]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from auto_chunker import RATIO, chunked, measured
from models import LlamaStyle, NextTokenLoss
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxckpt.costs.devices import device_named
from fxckpt.errors import BudgetInfeasible
from fxckpt.passes.graphs import Joint
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.pipeline import prepare
from fxckpt.planner.planned_device import planned_device
from fxckpt.planner.planner import Planner
from fxckpt.planner.tiles import tiled
from fxckpt.plans.types import Plan, Tiling

GPT2 = {"8x1024": (8, 1024), "4x256": (4, 256)}
"""Batch and length."""
BUDGETS = {
    "8x1024": (6000, 1850),
    "4x256": (900,),
    "llama-65536": (12_000, 10_000),
    "head-248320": (20_000, 6200, 4100, 4000),
}
"""Budgets of each case in MB."""
ALL_TILINGS = tuple(Tiling(count, 1, ahead) for count in (2, 4, 8, 16) for ahead in (False, True))


class ChunkedLoss(nn.Module):
    """The next-token loss of GPT-2 with the head in chunks by hand, each under a checkpoint."""

    def __init__(self, model: nn.Module, chunks: int) -> None:
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.model.transformer(input_ids=tokens, use_cache=False).last_hidden_state
        hidden, targets = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()

        def loss(rows: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.model.lm_head(rows), target, reduction="sum")

        parts = zip(hidden.chunk(self.chunks), targets.chunk(self.chunks), strict=True)
        losses = [checkpoint(loss, *part, use_reentrant=False) for part in parts]
        return sum(losses) / targets.numel()


class Head(nn.Module):
    """A head and its loss in float32."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(hidden).float(), targets)


def bfloat16_joint(case: str, device: str) -> Joint:
    """Return the joint graph of a case in bfloat16."""
    kind = torch.bfloat16
    with torch.device("meta"):
        if case == "llama-65536":
            model: nn.Module = LlamaStyle(8, 4096, 32, 14_336)
            given: tuple[Tensor, ...] = (torch.empty(1, 65_536, 4096, dtype=kind),)
        else:
            hidden = torch.empty(16_384, 2048, dtype=kind, requires_grad=True)
            model = Head(2048, 248_320)
            given = (hidden, torch.empty(16_384, dtype=torch.long))
    return capture_joint(model.to(kind), given, {}, planned_device(device, is_on_meta=True))


def prepared(joint: Joint) -> Joint:
    """Return a joint graph once it is prepared."""
    prepare(joint)
    return joint


def gpt2_joint(batch: int, length: int, device: str, chunks: int = 0, layers: int = 12) -> Joint:
    """Return the joint graph of GPT-2 with its loss."""
    config = hf.GPT2Config(
        n_layer=layers,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa" if length > 256 else "eager",
    )
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(config).train()
        given: dict[str, Any] = {"tokens": torch.empty(batch, length, dtype=torch.long)}
    wrapped = ChunkedLoss(model, chunks) if chunks else NextTokenLoss(model)
    return capture_joint(wrapped, (), given, planned_device(device, is_on_meta=True))


@dataclass(frozen=True)
class TiledRow:
    """One plan of one graph."""

    name: str
    budget: str
    peak_bytes: int
    seconds: float | None
    """Seconds of the step; None where no plan is within the budget."""
    floor_bytes: int
    planning: float
    """Seconds of planning."""


def planned(name: str, joint: Joint, megabytes: int, device: str, tile: Any = None) -> TiledRow:
    """Return the plan of a graph within a budget."""
    planner = Planner(
        megabytes * 10**6, measure_workspace=False, device=device_named(device), tile=tile
    )
    begin = time.perf_counter()
    try:
        _, _, plan = planner.plan_with_tiles(joint)
    except BudgetInfeasible as error:
        took = time.perf_counter() - begin
        return TiledRow(name, f"{megabytes} MB", error.floor_bytes, None, error.floor_bytes, took)
    took = time.perf_counter() - begin
    chosen = f" ({plan.tiling})" if plan.tiling and tile else ""
    seconds = seconds_of(plan)
    floor = plan.floor_bytes
    return TiledRow(name + chosen, f"{megabytes} MB", plan.peak_bytes, seconds, floor, took)


def seconds_of(plan: Plan) -> float:
    """Return the seconds of a planned step."""
    return plan.step_seconds + plan.recompute_seconds


def rows(case: str, device: str, layers: int = 12) -> Iterator[TiledRow]:
    """Yield the plans of one case."""
    tilings = list(ALL_TILINGS)
    by_hand: dict[int, Joint] = {}
    if case in GPT2:
        joint = prepared(gpt2_joint(*GPT2[case], device, layers=layers))
        by_hand = {n: prepared(gpt2_joint(*GPT2[case], device, n, layers)) for n in (8, 32)}
        tilings += [Tiling(8, 2), Tiling(8, 2, True)]
    else:
        joint = prepared(bfloat16_joint(case, device))
        tilings += [Tiling(32, 1, True)]
    variants = [(name, found[0]) for name in tilings if (found := tiled(joint, name)) is not None]
    yield planned("untiled", joint, 10**6, device)
    for megabytes in BUDGETS[case]:
        yield planned("untiled", joint, megabytes, device)
        for chunks, graph in by_hand.items():
            yield planned(f"by hand, {chunks} chunks", graph, megabytes, device)
        for tiling, graph in variants:
            yield planned(label_of(tiling), graph, megabytes, device)
        yield planned("auto", joint, megabytes, device, "auto")


def by_torch(case: str, device: str, layers: int) -> Iterator[TiledRow | str]:
    """Yield plans of the graph that torch's auto_chunker leaves, or what it says.

    The graph is priced op by op, as Inductor decomposes it.
    """
    for ratio in (8, RATIO):
        torch._dynamo.reset()
        is_gpt2 = case in GPT2
        joint = (
            gpt2_joint(*GPT2[case], device, 0, layers) if is_gpt2 else bfloat16_joint(case, device)
        )
        found = chunked(joint, ratio)
        if isinstance(found, str):
            yield f"auto_chunker, ratio {ratio}: {found}"
            continue
        joint = prepared(found)
        for megabytes in (10**6, *BUDGETS[case]):
            yield planned(f"auto_chunker, ratio {ratio}", joint, megabytes, device)


def label_of(tiling: Tiling) -> str:
    """Return what a reader calls a tiling."""
    what = "widest regions" if tiling.groups == 1 else "widest two kinds"
    return f"{what} in {tiling.count}{', gradient ahead' if tiling.is_ahead else ''}"


def show(found: list[TiledRow], device: str) -> str:
    """Return the plans as a table; extra time is beside the untiled step without a budget."""
    return tabulate(
        [
            (
                r.name,
                r.budget,
                f"{r.peak_bytes / 1e6:.0f}",
                "does not fit" if r.seconds is None else f"{1e3 * r.seconds:.2f}",
                f"{r.floor_bytes / 1e6:.0f}",
                f"{r.planning:.1f}",
            )
            for r in found
        ],
        ("plan", "budget", "peak MB", f"ms on {device}", "floor MB", "planner s"),
        disable_numparse=True,
        colalign=("left", "left", *["right"] * 4),
    )


def main() -> None:
    """Print one table for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--tf32", action="store_true", help="matmuls may take TF32")
    parser.add_argument("--case", action="append", choices=BUDGETS)
    parser.add_argument("--layers", type=int, default=12, help="layers of GPT-2")
    parser.add_argument("--measured", action="store_true", help="torch's auto_chunker beside it")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    for case in options.case or BUDGETS:
        torch._dynamo.reset()
        print(f"\n{case}, {options.device}")
        print(show(list(rows(case, options.device, options.layers)), options.device), flush=True)
        if options.measured:
            found = list(by_torch(case, options.device, options.layers))
            print(*(each for each in found if isinstance(each, str)), sep="\n")
            print(show([each for each in found if not isinstance(each, str)], options.device))
    if options.measured:
        print("\n2,048 rows, 8,192 tokens, width 128, on this machine")
        print(tabulate(measured(Head, "25MB"), ("plan", "predicted MB", "measured MB")), flush=True)


if __name__ == "__main__":
    main()
