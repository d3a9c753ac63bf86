"""Training of two ranks, which plan as one."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxckpt
from fxckpt.costs.models import FlopCost
from tests.ranks import on_ranks

WIDTH = 64


class RankCost:
    """FLOPs, except that pointwise ops take time on the second rank."""

    name = "costs of a rank"

    def flops(self, node: Any) -> int:
        return FlopCost().flops(node)

    def seconds(self, node: Any) -> float:
        return FlopCost().seconds(node) + 1e-6 * dist.get_rank()


class Network(nn.Module):
    """Linear layers, each with two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x)).tanh()
        return x


def made() -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Network()


def batch(size: int) -> Tensor:
    torch.manual_seed(dist.get_rank())
    return torch.randn(size, WIDTH)


def gradients(module: nn.Module, sizes: list[int], **options: Any) -> list[Tensor]:
    """Return the gradients of the last step of DDP."""
    model = DistributedDataParallel(module)
    call = torch.compile(model, backend=fxckpt.Backend(**options)) if options else model
    for size in sizes:
        module.zero_grad()
        call(batch(size)).square().mean().backward()
    return [p.grad.clone() for p in module.parameters()]


def plan_as_one() -> dict[str, Any]:
    """Run steps whose sizes, costs and budgets differ between the ranks."""
    torch._dynamo.config.optimize_ddp = False
    rank, found = dist.get_rank(), {}
    for group in (None, "world"):
        model = DistributedDataParallel(made())
        backend = fxckpt.Backend(
            "520KB", cost=RankCost(), inner="aot_eager", group=group, scope="graph"
        )
        compiled = torch.compile(model, backend=backend)
        compiled(batch(256 + 64 * rank)).square().mean().backward()
        (plan,) = backend.plans
        found[f"plan {group}"] = plan.saved, str(plan.schedule), plan.peak_bytes
    sizes = [256, 256, 256, 256 - 64 * rank]
    options = {"budget": "520KB", "inner": "aot_eager", "group": dist.group.WORLD}
    wanted, got = gradients(made(), sizes), gradients(made(), sizes, **options)
    found["bitwise"] = all(map(torch.equal, wanted, got))
    of_one = dist.new_group([0])
    if rank == 1:
        with pytest.raises(fxckpt.InvalidOption, match="rank 1 is no member of the group"):
            torch.compile(made(), backend=fxckpt.Backend(group=of_one))(batch(8))
    # The second rank's batch is too large; the first one's is not.
    model, size = DistributedDataParallel(made()), 64 + 512 * rank
    backend = fxckpt.Backend("400KB", inner="aot_eager", group="world", scope="graph")
    compiled = torch.compile(model, backend=backend)
    try:
        compiled(batch(size)).square().mean().backward()
    except Exception as error:
        found["infeasible"] = f"{type(error).__name__}: {error}"
    return found


def run_more_alone() -> dict[str, bool]:
    """Train while one rank alone runs what the other does not; return what is equal bitwise."""
    torch._dynamo.config.optimize_ddp = False
    rank, steps, found = dist.get_rank(), 5, {}
    wanted = gradients(made(), [256] * steps)
    for scope in ("step", "graph"):
        module = made()
        if rank == 0:  # A backend that the other rank does not have.
            torch.compile(made(), backend=fxckpt.Backend(inner="aot_eager"))(batch(8)).sum()
        model = DistributedDataParallel(module)
        backend = fxckpt.Backend("520KB", inner="aot_eager", group="world", scope=scope)
        call = torch.compile(model, backend=backend)
        if rank == 1:
            with torch.no_grad():
                call(batch(256))
        for step in range(steps):
            module.zero_grad()
            if rank == 1 and step == 2:  # A forward that is dropped, and run again.
                call(batch(256))
            call(batch(256)).square().mean().backward()
        found[scope] = all(map(torch.equal, wanted, (p.grad for p in module.parameters())))
    return found


def test_what_one_rank_runs_alone() -> None:
    """A sanity check, another model, and a forward that is repeated leave no rank waiting."""
    for found in on_ranks(run_more_alone):
        assert found == {"step": True, "graph": True}


def test_ranks_plan_as_one() -> None:
    """Ranks of a group have one plan whatever differs, and raise together; others differ."""
    first, second = on_ranks(plan_as_one)
    assert first["plan world"] == second["plan world"]
    assert first["plan None"] != second["plan None"]
    assert first["bitwise"] and second["bitwise"]
    assert "rank 1: budget='400KB'" in first["infeasible"]
    assert first["infeasible"] == second["infeasible"]


def trained(folder: str, steps: int, *, compiles: bool) -> tuple[nn.Module, Any]:
    """Return a sharded model and its optimizer after some steps, which go on from ``folder``."""
    backend = fxckpt.Backend(0.9, inner="aot_eager")
    blocks = nn.Sequential(made(), made())
    for block in blocks:
        fully_shard(block)
        if compiles:
            block.compile(backend=backend)
    model: Any = fully_shard(blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    if folder:
        names, states = get_state_dict(model, optimizer)
        dcp.load({"model": names, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=names, optim_state_dict=states)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch(256)).square().mean().backward()
        optimizer.step()
    assert bool(backend.plans) == compiles
    return model, optimizer


def save_and_go_on(folder: str) -> dict[str, Any]:
    """Save a compiled model; go on from there with a plain one, and the other way around."""
    found = {}
    for saves in (True, False):
        model, optimizer = trained("", 2, compiles=saves)
        names, states = get_state_dict(model, optimizer)
        path = f"{folder}/{saves}"
        dcp.save({"model": names, "optimizer": states}, checkpoint_id=path)
        found[f"names {saves}"] = [*names, *states["state"]]
        later, _ = trained(path, 1, compiles=not saves)
        straight, _ = trained("", 3, compiles=False)
        pairs = zip(later.parameters(), straight.parameters(), strict=True)
        found[f"equal {saves}"] = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    return found


def test_checkpoints_of_shards_keep_their_names(tmp_path: Path) -> None:
    """What a compiled model saved loads into a plain one, and goes on bitwise; and back."""
    for found in on_ranks(save_and_go_on, str(tmp_path)):
        assert found["names True"] == found["names False"]
        assert found["equal True"] and found["equal False"]


def run_script(name: str) -> str:
    """Run a script of the documentation as a rank that has joined; it checks itself."""
    folder = Path(__file__).parent.parent / "docs" / "distributed"
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / name))
    return "done"


@pytest.mark.parametrize(
    "name",
    [
        "ddp.py",
        "pipeline.py",
        pytest.param("fsdp.py", marks=pytest.mark.sweep),
        pytest.param("tp_sp.py", marks=pytest.mark.sweep),
    ],
)
def test_scripts_run_on_two_ranks(name: str) -> None:
    """Losses are those without fxckpt, and peaks are within the budget."""
    assert on_ranks(run_script, name) == ["done", "done"]
