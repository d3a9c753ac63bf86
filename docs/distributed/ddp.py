"""DDP: the model is one graph on each rank. torchrun --nproc-per-node 2 docs/distributed/ddp.py"""

import torch
from network import Network, batch, begin
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fxckpt


def losses(backend: fxckpt.Backend | str) -> list[float]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = DistributedDataParallel(Network())
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for i in range(4):
        tokens = batch(2 * i + rank)
        loss = cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


rank = begin()
backend = fxckpt.Backend(0.7, inner="aot_eager", group="world")
assert losses(backend) == losses("aot_eager_default_partitioner"), "the losses differ"
step = backend.report().step
assert step is not None and step.measured_peak_bytes <= step.budget_bytes, "over the budget"
print(f"rank {rank}: equal losses, {step.measured_peak_bytes} of {step.budget_bytes} bytes")
torch.distributed.destroy_process_group()
