"""Tensor and sequence parallel. torchrun --nproc-per-node 2 docs/distributed/tp_sp.py"""

import torch
from network import Network, batch, begin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

import fxckpt


def losses(backend: fxckpt.Backend | str) -> list[float]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Network()
    split = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    gathered = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    parallelize_module(model, mesh, {"words": split, "norm": SequenceParallel()})
    parallelize_module(model, mesh, {"norm": gathered})
    for block in model.blocks:
        columns = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
        rows = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "down")}
        norms = {name: SequenceParallel() for name in ("norm1", "norm2")}
        parallelize_module(block, mesh, columns | rows | norms)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    seen = []
    for i in range(4):
        tokens = batch(i)
        loss = cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


rank = begin()
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
backend = fxckpt.Backend(0.7, inner="aot_eager", group="world")
assert losses(backend) == losses("aot_eager_default_partitioner"), "the losses differ"
step = backend.report().step
assert step is not None and step.measured_peak_bytes <= step.budget_bytes, "over the budget"
print(f"rank {rank}: equal losses, {step.measured_peak_bytes} of {step.budget_bytes} bytes")
torch.distributed.destroy_process_group()
