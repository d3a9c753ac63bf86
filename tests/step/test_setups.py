"""One budget of a step in set-ups that people train with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fxckpt
from fxckpt.torch_private import boxed, in_backward, tracing_lock
from tests.step.stack import Stack, X, assert_step_is_right, plain


class Regions(Stack):
    """Blocks of which every other one is in a checkpoint of the user's."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if i % 2 else block(x)
        return self.head(x).pow(2).mean()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_around_compiled_blocks(early_stop: bool, use_reentrant: bool) -> None:
    """A block that a checkpoint repeats has one level in both runs; the others use the budget."""
    model = Regions(6)
    model.use_reentrant = use_reentrant
    x = X.clone()
    with set_checkpoint_early_stop(early_stop):
        peak, wanted = plain(model, x)
        limit = int(0.75 * peak)
        backend = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
        for _ in range(4):
            assert_step_is_right(model, limit, wanted, x)
    report = backend.report().step
    assert report is not None and report.settled_at == 2 and report.steps == 4
    assert report.measured_peak_bytes > 0.8 * limit


def test_levels_compile_one_thread_at_a_time() -> None:
    """No other thread can trace while a level is compiled, also after Dynamo's own compile."""
    others = []

    def taken_elsewhere() -> bool:
        taken = tracing_lock().acquire(blocking=False)
        if taken:
            tracing_lock().release()
        return taken

    def inner(gm: fx.GraphModule, inputs: object) -> object:
        if in_backward():  # Its code is written later, and nothing is traced.
            return boxed(gm, ())
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(taken_elsewhere).result())
        return boxed(gm, ())

    model = Stack()
    peak, _ = plain(model)
    backend = fxckpt.compile_blocks(model.blocks, int(0.7 * peak), inner=inner)
    model(X).backward()
    first = len(others)
    model(X).backward()
    assert len(backend.plans) > 1 and len(others) > first and not any(others)


def fails(gradient: Tensor) -> None:
    raise ValueError("the user's")


@pytest.mark.parametrize("cut", ["forward", "backward", "no backward"])
def test_a_first_step_that_is_cut_short(cut: str) -> None:
    """A step that ends by an error, or has no backward, is not what later steps are planned by."""
    model = Stack(6)
    peak, wanted = plain(model)
    limit = int(0.5 * peak)
    backend = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    for _ in range(2):
        if cut == "no backward":
            model(X).item()
            continue
        handle = (
            model.head.register_forward_pre_hook(lambda module, args: fails(args[0]))
            if cut == "forward"
            else model.blocks[2].up.weight.register_hook(fails)
        )
        with pytest.raises(ValueError, match="the user's"):
            model(X).backward()
        handle.remove()
    for _ in range(4):
        assert_step_is_right(model, limit, wanted)
    report = backend.report().step
    assert report is not None and report.steps == 4 and report.settled_at == 2


def test_optimizers_that_step_inside_the_backward() -> None:
    """Each parameter is updated as soon as it has its gradient, which is freed."""
    model = Stack(6)
    peak, _ = plain(model)
    limit = int(0.7 * peak)
    backend = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager")
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 1e-3)

        def update(parameter: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(4):
        assert fxckpt.measure_peak(lambda: model(X).backward()) <= limit
    report = backend.report().step
    assert report is not None and report.settled_at == 2
    assert all(parameter.grad is None for parameter in model.parameters())


def test_graphs_split_at_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a graph that DDP splits at its buckets are run on fake tensors as none."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", world_size=1, rank=0)
    try:
        model = Stack(6)
        peak, wanted = plain(model)
        limit = int(0.75 * peak)
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.05)
        backend = fxckpt.Backend(limit, inner="aot_eager")
        compiled = torch.compile(parallel, backend=backend)
        for _ in range(3):
            assert_step_is_right(compiled, limit, wanted)
    finally:
        dist.destroy_process_group()
    report = backend.report().step
    assert report is not None and len(report.rows) > 1
    assert report.settled_at == 2 and report.steps == 3
