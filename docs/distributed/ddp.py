"""DDP: the model is one graph on each rank. torchrun --nproc-per-node 2 docs/distributed/ddp.py"""

import torch
from network import Network, batch, begin, end, train
from torch.nn.parallel import DistributedDataParallel

import fxckpt


def losses(backend: fxckpt.Backend | str) -> list[float]:
    """Return the losses of some steps of the same model."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = DistributedDataParallel(Network())
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return train(compiled, optimizer, [batch(2 * i + rank) for i in range(4)])


rank = begin()
backend = fxckpt.Backend(0.7, inner="aot_eager", group="world")
assert losses(backend) == losses("aot_eager_default_partitioner"), "the losses differ"
end(rank, backend)
