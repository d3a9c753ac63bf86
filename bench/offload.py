"""Plans that may send values away, beside plans that recompute alone, by the rate of the link.

Nothing runs: layers of Llama 3 8B in bfloat16 for an H100, with links of other machines. Their
parameters are frozen and there is no head, so that the peak is activations. Extra time and the
lower bound are of the plans' own cost model; peaks are simulated.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers as hf
from real_sizes import llama_8b_config
from tabulate import tabulate
from torch import Tensor, nn

import fxckpt

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    options = parser.parse_args()
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
