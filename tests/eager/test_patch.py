"""``torch.utils.checkpoint`` replaced by fxckpt: by assignment and by ``patch_torch``."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
import transformers as hf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fxckpt
from tests.steps import outcome

NAMES = ("checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts")
TORCHS = [getattr(torchs, name) for name in NAMES]
HOLDER = types.SimpleNamespace(checkpoint=torchs.checkpoint)
"""A reference that no module global holds, so that no patch reaches it."""
weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> torchs.CheckpointPolicy:
    is_product = op is torch.ops.aten.mm.default
    policy = torchs.CheckpointPolicy
    return policy.MUST_SAVE if is_product else policy.PREFER_RECOMPUTE


def region(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout((x @ w).sin() @ w, 0.3).exp()


def step(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Return the loss and the gradients of one step from a seed."""
    torch.manual_seed(0)
    x, w = torch.ones(4, 8, requires_grad=True), weight.clone().requires_grad_()
    loss = function(x, w).sum()
    loss.backward()
    assert x.grad is not None and w.grad is not None
    return loss.detach(), x.grad, w.grad


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, found, expected))


def by_assignment() -> Iterator[None]:
    for name in NAMES:
        setattr(torchs, name, getattr(fxckpt, name))
    yield
    for name, function in zip(NAMES, TORCHS, strict=True):
        setattr(torchs, name, function)


def by_patch() -> Iterator[None]:
    with fxckpt.patch_torch():
        yield


@pytest.fixture(params=[by_assignment, by_patch])
def replaced(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from request.param()


def selective() -> Any:
    return functools.partial(torchs.create_selective_checkpoint_contexts, save_products)


@pytest.mark.usefixtures("replaced")
def test_eager_region_with_selective_policy() -> None:
    """A region keeps what the policy selects and its backward runs fxckpt's replay."""
    calls = []

    def counted(x: Tensor, w: Tensor) -> Tensor:
        calls.append(1)
        return region(x, w)

    def run(x: Tensor, w: Tensor) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            torchs.checkpoint(
                counted, x, w, use_reentrant=False, context_fn=selective()
            ).sum().backward()
        # Two products forward and four backward, none of them again: 2 * 4 * 8 * 8 FLOPs each.
        assert counter.get_total_flops() == 6 * 512
        x.grad = w.grad = None
        torch.manual_seed(0)
        return torchs.checkpoint(region, x, w, use_reentrant=False, context_fn=selective())

    assert same(step(run), step(region))
    assert len(calls) == 1


COMPILED: dict[str, Callable[..., Tensor]] = {
    "torch's name": lambda *args, **options: torchs.checkpoint(*args, **options),
    "fxckpt's name": lambda *args, **options: fxckpt.checkpoint(*args, **options),
    "torch's function": lambda *args, **options: HOLDER.checkpoint(*args, **options),
}


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("is_selective", [False, True])
def test_compiled_region_follows_its_policy(how: str, is_selective: bool) -> None:
    """Dynamo captures one graph, and the plan recomputes what the region's policy leaves."""
    options = {"context_fn": selective()} if is_selective else {}

    def function(x: Tensor, w: Tensor) -> Tensor:
        return COMPILED[how](region, x, w, use_reentrant=False, **options)

    backend = fxckpt.Backend(inner="aot_eager")
    torch._dynamo.reset()
    assert same(step(torch.compile(function, backend=backend, fullgraph=True)), step(region))
    products = [name for name in backend.plans[0].recomputed if name.startswith("mm")]
    assert bool(products) is not is_selective


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_region_under_torchs_backends(backend: str) -> None:
    """Torch's own backends run a compiled region by torch's own implementation."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        quiet = lambda x, w: (x @ w).sin() @ w  # noqa: E731  without random ops
        return torchs.checkpoint(quiet, x, w, use_reentrant=False, context_fn=selective())

    torch._dynamo.reset()
    found = step(torch.compile(function, backend=backend, fullgraph=True))
    assert same(found, step(lambda x, w: (x @ w).sin() @ w))


def test_sequential_is_replaced() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with fxckpt.patch_torch(), fxckpt.record_regions() as regions:
        torchs.checkpoint_sequential(layers, 2, torch.ones(2, 8), use_reentrant=False)
    assert len(regions) == 1


def test_wrappers_of_torch_distributed() -> None:
    """``apply_activation_checkpointing`` wraps modules in regions of fxckpt, also compiled."""

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))

    x = torch.ones(2, 8)
    plain = make()
    expected = outcome(plain, plain, [x])
    with fxckpt.patch_torch():
        model = make()
        wrappers.apply_activation_checkpointing(
            model, check_fn=lambda part: isinstance(part, nn.Linear)
        )
        with fxckpt.record_regions() as regions:
            found = outcome(model, model, [x])
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        model.zero_grad()
        again = outcome(model, compiled, [x])
        assert pickle.dumps(model)
    assert len(regions) == 2
    assert [value.shape for value in found.values()] == [v.shape for v in expected.values()]
    for values in (found, again):
        assert all(map(torch.equal, values.values(), expected.values()))


def test_transformers_enabled_while_patched() -> None:
    """``gradient_checkpointing_enable`` makes every block a region of fxckpt."""
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).train()
    with fxckpt.patch_torch() as patch, fxckpt.record_regions() as regions:
        assert "transformers.modeling_utils.checkpoint" in patch.places
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    assert len(regions) == 2


def test_undo_restores_every_name() -> None:
    """Names replaced, modules imported meanwhile and names assigned since are all told apart."""
    late = types.ModuleType("late_module")
    patch = fxckpt.patch_torch()
    late.ckpt = torchs.checkpoint  # type: ignore[attr-defined]  as an import would
    mine = object()
    torchs.checkpoint_sequential = mine  # type: ignore[assignment]
    sys.modules["late_module"] = late
    try:
        patch.undo()
        patch.undo()
        assert late.ckpt is TORCHS[0]
        assert wrappers.torch_utils_checkpoint is torchs.checkpoint is TORCHS[0]
        assert torchs.create_selective_checkpoint_contexts is TORCHS[2]
        assert torchs.checkpoint_sequential is mine
    finally:
        del sys.modules["late_module"]
        torchs.checkpoint_sequential = TORCHS[1]


def test_entering_twice_is_refused() -> None:
    with fxckpt.patch_torch():
        with pytest.raises(fxckpt.InvalidOption, match="patched already"):
            fxckpt.patch_torch()
        assert torchs.checkpoint is not TORCHS[0]
    assert torchs.checkpoint is TORCHS[0]


def test_error_inside_the_block_undoes_it() -> None:
    with pytest.raises(ZeroDivisionError), fxckpt.patch_torch():
        raise ZeroDivisionError
    assert torchs.checkpoint is TORCHS[0]


def test_threads_patch_one_at_a_time() -> None:
    """Of many threads that patch at once, one succeeds and the others get the error."""
    patches, errors = [], []
    start = threading.Barrier(8)

    def enter() -> None:
        start.wait()
        try:
            patches.append(fxckpt.patch_torch())
        except fxckpt.InvalidOption as error:
            errors.append(error)

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(patches), len(errors)) == (1, 7)
    patches[0].undo()
    assert [getattr(torchs, name) for name in NAMES] == TORCHS
