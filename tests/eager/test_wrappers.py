"""Regions over tensors that are made of other tensors: DTensors, and subclasses that flatten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fxckpt
from fxckpt.ops.traits import traits_of
from tests.eager.regions import ops_of_the_backward

WIDTH = 32
Region = Callable[..., Any]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which only this one runs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def by_torch(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


class Sequence(nn.Module):
    """Layers that gather their input, and scatter what they make of it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        weights = (distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(1)]) for _ in range(3))
        self.weights = nn.ParameterList(map(nn.Parameter, weights))
        self.mesh = mesh

    def layer(self, x: DTensor, weight: Tensor) -> Tensor:
        whole = x.redistribute(self.mesh, [Replicate()])
        hidden = torch.nn.functional.gelu(whole @ weight).sin().exp()
        return x + (hidden @ weight.mT).redistribute(self.mesh, [Shard(0)]).tanh()

    def forward(self, x: DTensor, region: Region) -> Tensor:
        for weight in self.weights:
            x = region(self.layer, x, weight)
        return x.to_local().square().mean()


def outcome(mesh: DeviceMesh, region: Region) -> tuple[list[Tensor], int, int]:
    """Return the gradients, the peak, and the number of collectives of a step."""
    model = Sequence(mesh)
    x = DTensor.from_local(torch.randn(256, WIDTH, generator=seeded()), mesh, [Shard(0)])

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x, region).backward()

    step()
    peak = fxckpt.measure_peak(step)
    with torch.profiler.profile() as seen:
        step()
    collectives = sum(event.name.startswith("c10d::") for event in seen.events())
    return [p.grad.to_local().clone() for p in model.parameters()], peak, collectives


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_dtensors_are_recomputed_as_torchs_are(mesh: DeviceMesh) -> None:
    """Gathers included, a region saves as little as torch's, with the same gradients."""
    _, whole, once = outcome(mesh, plainly)
    wanted, torchs, again = outcome(mesh, by_torch)
    got, peak, count = outcome(mesh, fxckpt.checkpoint)
    # Before torch 2.12 what the rank that does not run would send is whatever lies in memory.
    if torch.__version__ >= "2.12":
        assert all(map(torch.equal, wanted, got))
    assert peak <= 1.01 * torchs < 0.8 * whole
    assert once < count <= again


def test_a_policy_keeps_collectives(mesh: DeviceMesh) -> None:
    """In torch's form, ops on the local tensors are asked for, and what is kept runs once."""

    def keep(ctx: object, op: Any, *args: object, **kwargs: object) -> bool:
        return "c10d" in str(op)

    def region(function: Callable[..., Any], *args: Any) -> Any:
        contexts = fxckpt.create_selective_checkpoint_contexts
        return fxckpt.checkpoint(function, *args, context_fn=lambda: contexts(keep))

    _, _, once = outcome(mesh, plainly)
    _, _, count = outcome(mesh, region)
    assert count == once


def test_a_region_of_wrappers_has_no_plan(mesh: DeviceMesh) -> None:
    """A budget over such a region is an error that says what to do."""
    model = Sequence(mesh)
    x = DTensor.from_local(torch.randn(256, WIDTH), mesh, [Shard(0)])
    with pytest.raises(fxckpt.CaptureError, match=r"DTensor.*torch\.compile"):
        fxckpt.checkpoint(lambda t: model(t, plainly), x, budget=0.9)


def test_parts_of_a_subclass_are_recomputed() -> None:
    """A subclass of two tensors has gradients of both, and saves neither of a region's values."""
    results = []
    for region in (plainly, fxckpt.checkpoint):
        torch.manual_seed(0)
        a, b = torch.randn(64, 64), torch.randn(64, 64)
        x = TwoTensor(a, b).requires_grad_()
        y = region(lambda t: (t.sin().exp() * t.cos()).tanh(), x)
        y.sum().backward()
        results.append((x.grad.a, x.grad.b))
    assert all(map(torch.equal, *results))


def test_waits_are_writes() -> None:
    """What waits for a collective begins a new version of its result."""
    traits = traits_of(torch.ops._c10d_functional.wait_tensor.default)
    assert traits.is_arrival and traits.writes == (0,) and not traits.never_twice


def test_recomputed_collectives_are_waited_for(mesh: DeviceMesh) -> None:
    """Autograd saves what has not arrived yet; its recompute is no copy from before the wait."""
    x, weight = (torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2))

    def region(x: Tensor, weight: Tensor) -> Tensor:
        arriving = all_to_all_single_autograd(x, None, None, mesh.get_group())
        return (arriving @ weight).sin()

    ran = ops_of_the_backward(fxckpt.checkpoint(region, x, weight))
    assert ran["all_to_all_single"] == ran["wait_tensor"] == 2
    assert not ran["clone"]


def test_policies_plan_what_arrives(mesh: DeviceMesh) -> None:
    """A tensor that waits for a collective is planned as its values: a policy saves or drops it."""
    x, weight = (torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2))

    def region(x: Tensor, weight: Tensor) -> Tensor:
        arriving = all_to_all_single_autograd(x, None, None, mesh.get_group())
        return (arriving @ weight).sin()

    def again(ctx: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE

    for policy, runs in ((fxckpt.policies.save_collectives, 1), (again, 2)):
        ran = ops_of_the_backward(fxckpt.checkpoint(region, x, weight, policy=policy))
        assert ran["all_to_all_single"] == runs
    fxckpt.checkpoint(region, x, weight, budget="min").sum().backward()
