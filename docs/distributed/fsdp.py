"""FSDP2, blocks compiled one by one. torchrun --nproc-per-node 2 docs/distributed/fsdp.py"""

import torch
from network import Network, batch, begin, end, train
from torch.distributed.fsdp import fully_shard

import fxckpt


def losses(budget: float | None) -> tuple[list[float], fxckpt.Backend | None]:
    """Return the losses of some steps of the same model, and the backend of its blocks."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, backend = Network(), None
    if budget is not None:
        backend = fxckpt.compile_blocks(model.blocks, budget, inner="aot_eager", group="world")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return train(model, optimizer, [batch(2 * i + rank) for i in range(5)]), backend


rank = begin()
wanted, _ = losses(None)
got, backend = losses(0.7)
assert got == wanted, "the losses differ"
assert backend is not None
end(rank, backend)
