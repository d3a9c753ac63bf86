"""FSDP2, blocks compiled one by one. torchrun --nproc-per-node 2 docs/distributed/fsdp.py"""

import torch
from network import Network, batch, begin
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import fxckpt


def losses(budget: float | None) -> tuple[list[float], fxckpt.Backend | None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, backend = Network(), None
    if budget is not None:
        backend = fxckpt.compile_blocks(model.blocks, budget, inner="aot_eager", group="world")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for i in range(5):
        tokens = batch(2 * i + rank)
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen, backend


rank = begin()
wanted, _ = losses(None)
got, backend = losses(0.7)
assert got == wanted, "the losses differ"
assert backend is not None
step = backend.report().step
assert step is not None and step.measured_peak_bytes <= step.budget_bytes, "over the budget"
print(f"rank {rank}: equal losses, {step.measured_peak_bytes} of {step.budget_bytes} bytes")
torch.distributed.destroy_process_group()
