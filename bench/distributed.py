"""Steps of two ranks: peak of each within the budget, gradients bitwise, collectives counted.

[SHARE=0.6] [COMPILED=1] python bench/distributed.py [NAME ...]

NAME is a glob of the ways below; SHARE is the budget as a share of the uncheckpointed peak, and
COMPILED leaves eager regions out. Every way runs in two processes of its own, joined by gloo on
127.0.0.1. The run that it is compared with is the same parallel step without fxckpt, in the same
processes.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed_models import (
    BATCH,
    LENGTH,
    WORDS,
    Experts,
    Llama,
    RingAttention,
    Stage,
    loss_of,
)
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fxckpt

RANKS, SECONDS = 2, 480
MICRO_BATCHES = 4
STEPS = 4

Outer = Callable[..., Any]


@dataclass(frozen=True)
class Way:
    """How one model is parallelized, and what a step of it is."""

    wrap: Callable[[Llama, DeviceMesh], nn.Module]
    """Parallelizes the model in place, or wraps it."""
    by_block: bool = False
    """Whether blocks are compiled one by one, in place of the whole."""
    batches: int = 1
    """Micro-batches of a step; gradients are reduced in the last one."""
    splits: bool = False
    """Whether Dynamo splits the graph at DDP's buckets."""
    same_data: bool = False
    """Whether all ranks have the same tokens."""
    loss_parallel: bool = False
    gathers: bool = False
    """Whether gathers of parameters are ops of the graph, which a budget may run again."""
    schedule: type[PipelineScheduleSingle | PipelineScheduleMulti] | None = None
    """Schedule of a pipeline, of which a rank has a stage, or two where a schedule takes more."""


def ddp(model: Llama, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Wrap a model in DDP with small buckets."""
    return DistributedDataParallel(model, bucket_cap_mb=1, **options)


def fsdp(model: Llama, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard the parameters of each block, and of what is left, by FSDP2."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tp(model: Llama, mesh: DeviceMesh, *, sequence: bool = False, vocab: bool = False) -> nn.Module:
    """Shard a model over its heads; with ``sequence``, activations between the blocks too."""
    replicated = Replicate()
    inner, outer = (Shard(1), Shard(1)) if sequence else (replicated, replicated)
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=replicated, output_layouts=inner),
        "head": ColwiseParallel(
            input_layouts=outer,
            output_layouts=Shard(-1) if vocab else replicated,
            use_local_output=not vocab,
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        plan = {
            "attention.wo": RowwiseParallel(output_layouts=inner),
            "mlp.w2": RowwiseParallel(output_layouts=inner),
        } | {
            name: ColwiseParallel()
            for name in ("attention.wq", "attention.wk", "attention.wv", "mlp.w1", "mlp.w3")
        }
        if sequence:
            gather = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(replicated,)
            )
            plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
            plan |= {"attention": gather, "mlp": gather}
        parallelize_module(block, mesh, plan)
    return model


def ring(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """Give each rank a slice of the sequences: attention goes round, gradients are reduced."""
    for block in model.blocks:
        block.attention = RingAttention()
    return DistributedDataParallel(model)


def experts(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """Replace each MLP by experts on both ranks."""
    for block in model.blocks:
        block.mlp = Experts()
    return model


def gathered(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """Shard the parameters; each is gathered where it is read, as in SimpleFSDP.

    (Zhang et al., SimpleFSDP, arXiv:2411.00284.)
    """
    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            shards = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(shards))
        properties = {name: property(functools.partial(whole, name=name)) for name in names}
        module.__class__ = type(type(module).__name__, (type(module),), properties)
    return model


def whole(module: nn.Module, name: str) -> Tensor:
    """Return a parameter of which each rank has a shard; gradients are summed."""
    parameter: Any = module._parameters[name]
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def staged(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """Leave a model whole: stages are cut from it."""
    return model


WAYS: dict[str, Way] = {
    "ddp": Way(ddp),
    "ddp-split": Way(ddp, splits=True),
    "ddp-static": Way(functools.partial(ddp, static_graph=True)),
    "ddp-views": Way(functools.partial(ddp, gradient_as_bucket_view=True)),
    "ddp-no-sync": Way(ddp, batches=2),
    "ddp-split-no-sync": Way(ddp, splits=True, batches=2),
    "fsdp-blocks": Way(fsdp, by_block=True),
    "fsdp-whole": Way(fsdp),
    "fsdp-whole-keep": Way(functools.partial(fsdp, reshard_after_forward=False)),
    "fsdp-blocks-keep": Way(functools.partial(fsdp, reshard_after_forward=False), by_block=True),
    "fsdp-blocks-bf16": Way(
        functools.partial(fsdp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        by_block=True,
    ),
    "fsdp-blocks-no-sync": Way(fsdp, by_block=True, batches=2),
    "gathers": Way(gathered, gathers=True),
    "tp": Way(tp, same_data=True),
    "tp-blocks": Way(tp, by_block=True, same_data=True),
    "tp-loss": Way(functools.partial(tp, vocab=True), same_data=True, loss_parallel=True),
    "sp": Way(functools.partial(tp, sequence=True), same_data=True),
    "sp-blocks": Way(functools.partial(tp, sequence=True), by_block=True, same_data=True),
    "sp-loss": Way(
        functools.partial(tp, sequence=True, vocab=True), same_data=True, loss_parallel=True
    ),
    "ring": Way(ring),
    "ring-blocks": Way(ring, by_block=True),
    "experts": Way(experts),
    "experts-blocks": Way(experts, by_block=True),
    "gpipe": Way(staged, batches=MICRO_BATCHES, schedule=ScheduleGPipe, same_data=True),
    "1f1b": Way(staged, batches=MICRO_BATCHES, schedule=Schedule1F1B, same_data=True),
    "interleaved": Way(
        staged, batches=MICRO_BATCHES, schedule=ScheduleInterleaved1F1B, same_data=True
    ),
}


@dataclass(frozen=True)
class Run:
    """Measures of one way to run a step, on one rank."""

    peak_bytes: int
    """Peak of the last step."""
    worst_bytes: int
    """Greatest peak of all steps but the first, which compiles."""
    collectives: int
    """Number of collectives in one step."""
    gradients: tuple[Tensor, ...]
    loss: float


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def made(way: Way, mesh: DeviceMesh) -> tuple[Llama, nn.Module]:
    """Return the same model each time, and the parallel module that is called."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = way.splits
    model = Llama()
    return model, way.wrap(model, mesh)


def run(way: Way, mesh: DeviceMesh, model: Llama, outer: nn.Module, call: Outer) -> Run:
    """Return what the steps of a model measure."""
    torch.manual_seed(1 if way.same_data else 1 + dist.get_rank())
    tokens = torch.randint(0, WORDS, (way.batches, BATCH, LENGTH))
    labels = torch.randint(0, WORDS, (way.batches, BATCH, LENGTH))
    losses: list[Tensor] = []

    def step() -> None:
        losses.clear()
        for i in range(way.batches):
            is_last = i == way.batches - 1
            if isinstance(outer, FSDPModule):
                outer.set_requires_gradient_sync(is_last)
            elif isinstance(outer, DistributedDataParallel):
                outer.require_backward_grad_sync = is_last
            logits = call(tokens[i])
            with loss_parallel() if way.loss_parallel else warnings.catch_warnings():
                loss = loss_of(logits, labels[i])
                loss.backward()
            losses.append(local(loss.detach()))

    return measured(step, model, lambda: float(sum(loss.detach() for loss in losses)))


def measured(step: Callable[[], None], model: nn.Module, loss: Callable[[], float]) -> Run:
    """Return what some steps of the model measure."""
    peaks = []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        peaks.append(fxckpt.measure_peak(step))
    model.zero_grad(set_to_none=True)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    counts = Counter(event.name for event in recorded.events() if event.name.startswith("c10d::"))
    gradients = tuple(local(p.grad).clone() for p in model.parameters())
    return Run(peaks[-1], max(peaks[1:]), sum(counts.values()), gradients, loss())


def run_stages(way: Way, mesh: DeviceMesh, model: Llama, backend: Any = None) -> Run:
    """Return what the steps of a pipeline measure on this rank."""
    assert way.schedule is not None
    rank, per_rank = dist.get_rank(), 2 if issubclass(way.schedule, PipelineScheduleMulti) else 1
    stages, made = RANKS * per_rank, nn.ModuleList()
    for number in range(rank, stages, RANKS):
        made.append(Stage(model, number, stages))
    parts = [
        PipelineStage(
            stage if backend is None else torch.compile(stage, backend=backend),
            rank + i * RANKS,
            stages,
            torch.device("cpu"),
        )
        for i, stage in enumerate(made)
    ]
    schedule = way.schedule(parts if per_rank > 1 else parts[0], way.batches, loss_fn=loss_of)
    if isinstance(backend, fxckpt.Backend):
        backend.follow(schedule)
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, WORDS, (2, way.batches * BATCH, LENGTH)).unbind(0)
    losses: list[Tensor] = []

    def step() -> None:
        losses.clear()
        given = (tokens,) if rank == 0 else ()
        last = {"target": labels, "losses": losses} if rank == RANKS - 1 else {}
        schedule.step(*given, **last)

    return measured(step, made, lambda: float(sum(loss.detach() for loss in losses)))


def plain(way: Way, mesh: DeviceMesh) -> Run:
    """Return the step without a checkpoint."""
    model, outer = made(way, mesh)
    if way.schedule is not None:
        return run_stages(way, mesh, model)
    return run(way, mesh, model, outer, outer)


def checkpointed(way: Way, mesh: DeviceMesh, checkpoint: Callable[..., Any]) -> Run:
    """Return the eager step with a region for each block."""
    model, outer = made(way, mesh)
    model.around = checkpoint
    if way.schedule is not None:
        return run_stages(way, mesh, model)
    return run(way, mesh, model, outer, outer)


def compiled(way: Way, mesh: DeviceMesh, backend: Any) -> Run:
    """Return the compiled step."""
    model, outer = made(way, mesh)
    if way.schedule is not None:
        return run_stages(way, mesh, model, backend)
    if not way.by_block:
        return run(way, mesh, model, outer, torch.compile(outer, backend=backend))
    for block in model.blocks:
        block.compile(backend=backend)
    return run(way, mesh, model, outer, outer)


def alike(one: Run, other: Run) -> str:
    """Return whether the gradients of two runs are equal bitwise, else how far they are apart."""
    pairs = list(zip(one.gradients, other.gradients, strict=True))
    if all(torch.equal(a, b) for a, b in pairs):
        return "equal"
    worst = max(float((a - b).abs().max() / b.abs().max().clamp(1e-9)) for a, b in pairs)
    return f"{worst:.0e}"


def rows(name: str, share: float, path: str) -> None:
    """Leave the rows of one way on this rank in a file."""
    way, mesh = WAYS[name], init_device_mesh("cpu", (RANKS,))
    base = plain(way, mesh)
    limit = int(share * base.peak_bytes)
    region = functools.partial(torch_checkpoint, use_reentrant=False)
    found: list[list[Any]] = []

    def row(
        label: str, make: Callable[[], Run], against: Run, budget: int | None = None
    ) -> Run | None:
        begin = time.perf_counter()
        try:
            got = make()
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # A schedule wraps what its stage raised.
                cause = cause.__cause__
            text = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0][:200]}"
            found.append([name, label, budget, None, None, None, text, ""])
            torch.save(found, path)
            return None
        found.append(
            [
                *(name, label, budget, got.worst_bytes, got.peak_bytes, got.collectives),
                alike(got, against),
                f"{time.perf_counter() - begin:.0f} s",
            ]
        )
        torch.save(found, path)
        return got

    found.append(
        [name, "eager", None, base.worst_bytes, base.peak_bytes, base.collectives, "equal", ""]
    )
    theirs = row("torch.utils.checkpoint", lambda: checkpointed(way, mesh, region), base)
    if not os.environ.get("COMPILED"):
        row("fxckpt.checkpoint", lambda: checkpointed(way, mesh, fxckpt.checkpoint), base)
    plainly = row(
        "aot_eager, saves all",
        lambda: compiled(way, mesh, "aot_eager_default_partitioner"),
        base,
    )
    limits = {f"fxckpt {share}": limit}
    if way.gathers and theirs is not None:
        limits["fxckpt, at torch's peak"] = theirs.peak_bytes
    for label, budget in limits.items():
        group = "world" if way.gathers else None
        backend = fxckpt.Backend(budget, inner="aot_eager", group=group)
        row(label, functools.partial(compiled, way, mesh, backend), plainly or base, budget)


def rank(number: int, names: tuple[str, ...], share: float, folder: str) -> None:
    """Run one way as a rank; leave its rows in ``folder``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=number,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    rows(*names, share, f"{folder}/{number}.pt")
    dist.destroy_process_group()


def main(patterns: list[str]) -> None:
    """Print a table of the ways whose names match."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    share = float(os.environ.get("SHARE", "0.6"))
    table: list[list[Any]] = []
    for name in WAYS:
        if patterns and not any(fnmatch(name, pattern) for pattern in patterns):
            continue
        with TemporaryDirectory() as folder:
            ranks = mp.spawn(rank, args=((name,), share, folder), nprocs=RANKS, join=False)
            deadline = time.monotonic() + SECONDS
            error = "hangs"
            try:
                while time.monotonic() < deadline:
                    if ranks.join(timeout=1):
                        error = ""
                        break
            except Exception as failed:
                error = str(failed).strip().splitlines()[-1]
            for process in ranks.processes:
                process.kill()
            if error:
                table.append([name, error])
                print(name, error, flush=True)
            each = [torch.load(Path(folder) / f"{i}.pt") for i in range(RANKS)]
        for first, *others in zip(*each, strict=False):
            for i in (2, 3, 4):
                if first[i] is not None and all(o[i] is not None for o in others):
                    first[i] = max(first[i], *(o[i] for o in others))
            if any(o[6] != first[6] for o in others):
                first[6] = " / ".join([first[6], *(o[6] for o in others)])
            for i in (2, 3, 4):
                first[i] = f"{first[i] / 2**20:.2f}" if first[i] else ""
            table.append(first)
            print("\t".join(map(str, first)), flush=True)
    print(
        tabulate(
            table,
            [
                "way",
                "run",
                "budget MiB",
                "worst MiB",
                "step MiB",
                "collectives",
                "gradients",
                "took",
            ],
            tablefmt="github",
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
