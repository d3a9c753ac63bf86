"""Llama as torchtitan parallelizes it, with fxckpt in place of its checkpoint mode.

torchrun --nproc-per-node 2 bench/titan.py

It needs torchtitan 0.3.0, with torch 2.15, and runs on a CPU. Each way calls torchtitan's own
``parallelize_llama``: tensor parallelism, checkpointing, compiled blocks, FSDP2, in this order.
"""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from distributed import Run, alike, local, measured
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.llama3.parallelize import parallelize_llama

import fxckpt

BATCH, LENGTH, WORDS = 4, 256, 2048
SHARE = 0.6
WAYS = {"FSDP2": 1, "tensor and sequence parallel": 2}
"""Ranks of each way that hold a part of one layer; the others hold parts of the batch."""


def made(tensor_parallel: int, backend: Any = None, checkpoint: Any = None) -> nn.Module:
    """Return torchtitan's debug model, parallel, with the same parameters each time."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    parallelism = ParallelismConfig(
        tensor_parallel_degree=tensor_parallel, spmd_backend="partial_dtensor"
    )
    training = TrainingConfig(
        seq_len=LENGTH, mixed_precision_param="float32", mixed_precision_reduce="float32"
    )
    config = llama3_configs["debugmodel"]("varlen")
    for layer in config.layers:  # Its other attentions have no backward on a CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.update_from_config(config=SimpleNamespace(training=training, parallelism=parallelism))
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = config.build()
    compiler = CompileConfig(
        enable=backend is not None, components=["model"], backend=backend or ""
    )
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=compiler,
        ac_config=checkpoint,
        dump_folder="",
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor.
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def run(tensor_parallel: int, **ways: Any) -> tuple[Run, int]:
    """Return what later steps of a model measure, and the peak of its first."""
    model = made(tensor_parallel, **ways)
    torch.manual_seed(dist.get_rank() if tensor_parallel == 1 else 0)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH))
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    losses: list[Tensor] = []

    def step() -> None:
        losses.clear()
        logits = model(tokens, positions)
        loss = nn.functional.cross_entropy(
            getattr(logits, "full_tensor", lambda: logits)().flatten(0, 1), tokens.flatten()
        )
        loss.backward()
        losses.append(local(loss.detach()))

    model.zero_grad(set_to_none=True)
    first = fxckpt.measure_peak(step)
    return measured(step, model, lambda: float(losses[0])), first


def worst(number: int) -> int:
    """Return the greatest of a number on all ranks."""
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def rows(name: str) -> list[list[Any]]:
    """Return a row for each way to run a step, of the worst rank."""
    base, _ = run(WAYS[name])
    limit = int(SHARE * worst(base.peak_bytes))
    plainly, _ = run(WAYS[name], backend="aot_eager")
    table = [[name, "eager", "", "", worst(base.peak_bytes), base.collectives, "equal"]]
    selective = SelectiveAC.Config()
    ways = {
        "full checkpoint, eager": (base, {"checkpoint": FullAC.Config()}),
        "selective checkpoint, aot_eager": (
            plainly,
            {"checkpoint": selective, "backend": "aot_eager"},
        ),
        "aot_eager": (base, {"backend": "aot_eager"}),
        f"fxckpt {SHARE}": (plainly, {"backend": fxckpt.Backend(limit, inner="aot_eager")}),
    }
    for label, (against, options) in ways.items():
        found, first = run(WAYS[name], **options)
        budget, begin = (limit, worst(first)) if "fxckpt" in label else ("", "")
        equal = alike(found, against)
        table.append(
            [name, label, budget, begin, worst(found.peak_bytes), found.collectives, equal]
        )
    return table


def main() -> None:
    """Print a table of all ways."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parallel_dims.device_type = "cpu"  # torchtitan takes a machine without a GPU for one with CUDA.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    table = [row for name in WAYS for row in rows(name)]
    for row in table:
        row[2:5] = [f"{n / 2**20:.2f}" if n else "" for n in row[2:5]]
    heads = ["way", "run", "budget MiB", "first step MiB", "step MiB", "collectives", "gradients"]
    if dist.get_rank() == 0:
        print(tabulate(table, heads, tablefmt="github"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
