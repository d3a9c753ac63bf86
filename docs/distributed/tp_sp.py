"""Tensor and sequence parallel. torchrun --nproc-per-node 2 docs/distributed/tp_sp.py"""

import torch
from network import Network, batch, begin, end, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fxckpt


def losses(backend: fxckpt.Backend | str) -> list[float]:
    """Return the losses of some steps of the same model."""
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
    return train(compiled, optimizer, [batch(i) for i in range(4)])


rank = begin()
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
backend = fxckpt.Backend(0.7, inner="aot_eager", group="world")
assert losses(backend) == losses("aot_eager_default_partitioner"), "the losses differ"
end(rank, backend)
