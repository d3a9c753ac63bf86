"""Inductor inside, on graphs that are no stack of blocks: peaks as predicted, within the budget, and never above stock's."""

from __future__ import annotations

import copy
import re
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxckpt
from fxckpt.inductor.memory import calibrate, lower_backward
from fxckpt.inductor.planner import InductorPlanner
from fxckpt.passes.analysis.byte_counts import RNG_STATE_BYTES
from fxckpt.passes.analysis.joint import no_workspace
from fxckpt.passes.inductor.execution_order import ORDER
from fxckpt.passes.inductor.fusion_model import FusionModel
from fxckpt.planner.pipeline import EMIT_INDUCTOR
from fxckpt.planner.planner import Planner
from fxckpt.torch_private.inductor.default_partitioner import fuses
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.layouts import changes_layout, wants_channels_last
from fxckpt.torch_private.inductor.lowered import live_bytes
from fxckpt.torch_private.inductor.lowering import FREES_EARLY, Lowerings, free_early
from fxckpt.torch_private.inductor.options import _begin_to_look_for_instructions
from tests.joints import inductor_joint
from tests.steps import peak_of


class Images(nn.Module):
    """Convolutions of several kinds, normalized, with a residual and an activation in place: its forward peaks above its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = (
            nn.Conv2d(8, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1, groups=4, padding_mode="reflect"),
        )
        self.depthwise, self.up = (
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.ConvTranspose2d(16, 8, 2, stride=2),
        )
        self.norm, self.other, self.instance = (
            nn.BatchNorm2d(16),
            nn.BatchNorm2d(16),
            nn.InstanceNorm2d(8, affine=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        x = F.silu(self.other(self.grouped(x))) + x
        return F.gelu(self.instance(self.up(self.depthwise(x)))).square().mean()


def images() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Images(), torch.randn(8, 8, 24, 24)


def test_without_a_budget_convolutions_take_no_more_than_stock() -> None:
    backend = fxckpt.Backend(cost="flops")
    measured = peak_of(backend, images)
    assert measured <= peak_of("inductor", images)
    assert not backend.plans[0].keeps_order


class Biased(nn.Module):
    """Attention under one mask, by a bias that all layers share: its gradient is a sum in every layer of the backward, each under the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.back = (
            nn.ModuleList(nn.Linear(128, n) for _ in range(3)) for n in (384, 128)
        )
        self.bias = nn.Parameter(torch.zeros(4, 128))

    def forward(self, x: Tensor) -> Tensor:
        for project, back in zip(self.project, self.back, strict=True):
            query, key, value = (
                project(F.layer_norm(x, (128,))).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
            )
            scores = query @ key.mT + self.bias[:, None]
            x = x + back((scores.tril().softmax(-1) @ value).transpose(1, 2).flatten(2))
        return x.square().mean()


def test_without_a_budget_a_mask_does_not_hold_values_till_the_last_layer_that_reads_it() -> None:
    """Were the mask saved, the gradients of the bias would be summed in one loop at the end, as they read the same mask."""

    def make() -> tuple[nn.Module, Tensor]:
        return Biased(), torch.randn(2, 128, 128)

    assert peak_of(fxckpt.Backend(cost="flops"), make) <= peak_of("inductor", make)


def test_where_torchs_own_choice_is_taken_the_step_calls_what_torchs_does() -> None:
    """Stock hands over what it saves in another order, which is no work."""

    def called(backend: Any) -> list[list[str]]:
        torch._dynamo.reset()
        model, x = images()
        with config.patch(fx_graph_cache=False):
            _, codes = run_and_get_code(lambda: torch.compile(model, backend=backend)(x).backward())
        return [
            re.findall(
                r"^ +(?:\w+ = )?(?:cpp_fused|extern_kernels|torch\.ops|empty_strided|del ).*",
                code,
                re.MULTILINE,
            )
            for code in codes
        ]

    forward, backward = called(fxckpt.Backend(cost="flops"))
    assert [forward, backward] == called("inductor")
    assert len(forward) > 10 and len(backward) > 10


class Depthwise(nn.Module):
    """Convolutions of single channels of small images: channels last, their backward takes 16 MiB of workspace, as traced half of one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(64, 64, 1), nn.SiLU()) for _ in range(3))
        )
        self.head = nn.Sequential(
            nn.Conv2d(64, 672, 1), nn.Conv2d(672, 672, 5, padding=2, groups=672), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x)[:, :, ::21, ::21]).square().mean()


def test_torchs_own_choice_is_looked_at_in_the_layouts_it_runs_in() -> None:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Depthwise(), torch.randn(4, 64, 63, 63)

    stock = peak_of("inductor", make)
    backend = fxckpt.Backend(budget=stock + (1 << 10), cost="flops")
    assert peak_of(backend, make) <= stock
    assert not backend.plans[0].keeps_order


def test_the_least_peak_of_convolutions_can_be_had() -> None:
    model, x = images()
    joint, count = inductor_joint(model, x)

    def least(budget: int) -> int:
        with pytest.raises(fxckpt.BudgetInfeasible) as caught:
            InductorPlanner(Planner(budget=budget, cost="flops")).partition(
                joint, num_fwd_outputs=count
            )
        return caught.value.floor_bytes

    floor = least(1)
    assert least(floor - 1) == floor
    plan = InductorPlanner(Planner(budget=floor, cost="flops")).partition(
        joint, num_fwd_outputs=count
    )[2]
    assert plan.compiled_peak_bytes is not None and plan.compiled_peak_bytes <= floor


class Alignment(nn.Module):
    """A loss of sequences, on which the model of what Inductor stores is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 20))

    def forward(self, x: Tensor) -> Tensor:
        lengths, targets = torch.full((4,), 30), torch.ones(4, 5, dtype=torch.long)
        return F.ctc_loss(self.layers(x).log_softmax(-1), targets, lengths, torch.full((4,), 5))


def test_the_least_peak_is_no_more_than_what_stock_saves_takes() -> None:
    joint, count = inductor_joint(Alignment(), torch.randn(30, 4, 32))
    stock = InductorPlanner(Planner(cost="flops")).partition(joint, num_fwd_outputs=count)[2]
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        InductorPlanner(Planner(budget=1, cost="flops")).partition(joint, num_fwd_outputs=count)
    assert (
        stock.compiled_peak_bytes is not None
        and caught.value.floor_bytes <= stock.compiled_peak_bytes
    )


class Collects(nn.Module):
    """Layers whose masks and values are collected: what would make them again is taken into loops that read much."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        masks, kept = torch.zeros(4, *x.shape, dtype=torch.bool), torch.zeros(4, *x.shape)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            masks[i], kept[i] = x > 0, x.detach()
            x = x * masks[i].clone() + kept[i] * 0.1
            masks[i, ::2] = False
        return (x * masks.sum(0)).square().mean()


def test_no_plan_for_more_takes_less_than_the_least_peak_that_an_error_names() -> None:
    joint, count = inductor_joint(Collects(), torch.randn(1024, 64))
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        InductorPlanner(Planner(budget=1, cost="flops")).partition(joint, num_fwd_outputs=count)
    for share in (0.75, 0.85):
        plan = InductorPlanner(Planner(budget=share, cost="flops")).partition(
            joint, num_fwd_outputs=count
        )[2]
        assert (
            plan.compiled_peak_bytes is not None
            and plan.compiled_peak_bytes >= caught.value.floor_bytes
        )


class Regions(nn.Module):
    """Dropout in checkpoint regions, every other one selective: draws that loops write over."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(48), nn.Dropout(0.1)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        def block(layer: nn.Module, x: Tensor) -> Tensor:
            return x + self.drop(F.gelu(layer(self.norm(x))))

        for i, layer in enumerate(self.layers):
            selective = (
                {
                    "context_fn": partial(
                        create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
                    )
                }
                if i % 2 == 0
                else {}
            )
            x = checkpoint(block, layer, x, use_reentrant=False, **selective)
        return x.square().mean()


class Branches(nn.Module):
    """Layers of two branches, of which Inductor stores nothing inside; the second is taken, in which it lets go of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cond(
                x.abs().sum() < 0,
                lambda t, layer=layer: F.gelu(layer(t)),
                lambda t, layer=layer: (layer(t) * 0.5).sin(),
                (x,),
            )
        return (x * x.sigmoid()).sum()


class Rounds(nn.Module):
    """A loop over an input, which it may return as it is: what it returns is not let go of. A round holds what the one before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        _, turned = torch.while_loop(
            lambda i, t: i < 4,
            lambda i, t: (i + 1, (t.sin() @ t.sin().T @ t).cos()),
            (torch.tensor(0), x),
        )
        return self.layer(turned).square().mean()


class Constants(nn.Module):
    """Tensors made in the forward: constants of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh() * torch.tensor([1.0, 2.0]).repeat(24)
        return self.layer(h)[:, torch.tensor([1, 2, 5])].square().mean()


class Volumes(nn.Module):
    """Convolutions of signals and volumes, which Inductor does not lay out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.signal, self.longer = (
            nn.Conv1d(8, 16, 3, padding=1),
            nn.ConvTranspose1d(16, 8, 4, 2, 1),
        )
        self.volume = nn.Conv3d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.longer(F.silu(self.signal(x.view(8, 8, -1)))))
        return self.volume(h[:, None, :, :, None]).square().mean()


class Lookup(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(99, 32, sparse=True), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return (
            F.gelu(self.layer(F.gelu(self.layer(self.table((99 * x[:32]).long()))))).square().mean()
        )


class Half(nn.Module):
    """Products in half precision, which go through a library with workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.float().square().mean()


class Sorted(nn.Module):
    """Sorts something, without asking for the order: a call that returns twice as much beside what is taken of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * x.sin().sort(0).values).mean()


class Next(nn.Module):
    """A language model's loss on all but the last tokens; its embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = (1000 * x).long()
        h = self.table(tokens)
        for layer in self.layers:
            h = h + layer(h)
        logits = h @ self.table.weight.t()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Pooled(nn.Module):
    """The backward of the pooling takes its image for the sizes alone: no kernel reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(48, 64 * 48), nn.Linear(48 * 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        image = self.layer(x[:128]).tanh().unflatten(1, (48, 8, 8)).sin()
        return self.head(F.avg_pool2d(image, 2).flatten(1)).square().mean()


@pytest.mark.parametrize(
    ("model", "budget", "least_share"),
    [
        (Pooled, None, 0.97),
        (Regions, None, 0.97),
        (Regions, 0.85, 0.97),
        (Branches, None, 0.97),
        (Rounds, None, 1.0),
        (Constants, None, 0.97),
        (Volumes, None, 0.97),
        (Lookup, 0.8, 0.97),
        (Half, 0.9, 0.97),
        (Sorted, None, 0.97),
        (Next, 0.45, 0.97),
    ],
)
def test_what_is_measured_is_what_was_predicted(
    model: type[nn.Module], budget: float | None, least_share: float
) -> None:
    backend = fxckpt.Backend(budget=budget, cost="flops")
    measured = peak_of(backend, lambda: (model(), torch.rand(512, 48)))
    (plan,) = backend.plans
    assert plan.compiled_peak_bytes is not None
    assert least_share * plan.compiled_peak_bytes <= measured <= plan.compiled_peak_bytes


def test_a_judged_half_goes_through_inductors_passes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they count is counted once too."""
    passes, passed = compile_fx.post_grad_passes, list[int]()

    def counting(gm: fx.GraphModule, is_inference: bool) -> None:
        passed.append(len(gm.graph.nodes))
        passes(gm, is_inference)

    monkeypatch.setattr(compile_fx, "post_grad_passes", counting)
    counted = []
    for backend in ("inductor", fxckpt.Backend(cost="flops")):
        torch._dynamo.reset()
        counters.clear()
        with config.patch(fx_graph_cache=False):
            torch.compile(Constants(), backend=backend)(torch.rand(512, 48)).backward()
        counted.append((len(passed), dict(counters["inductor"])))
        passed.clear()
    assert counted[0][0] == counted[1][0] == 2
    assert counted[0][1]["pattern_matcher_count"] == counted[1][1]["pattern_matcher_count"] > 0


class Grouped(nn.Module):
    """Depthwise convolutions, as in ConvNeXt: their backward runs in another layout than the forward."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 48, 4, 4)
        self.layers = nn.ModuleList(
            nn.Conv2d(48, 48, 7, padding=3, groups=groups) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(48) for _ in range(2))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm, wide in zip(self.layers, self.norms, self.wide, strict=True):
            x = x + wide(norm(layer(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x.square().mean()


@pytest.mark.parametrize("groups", [1, 48])
def test_the_workspace_of_a_convolution_is_that_of_the_layouts_it_is_called_with(
    groups: int,
) -> None:
    backend = fxckpt.Backend(cost="flops")
    measured = peak_of(backend, lambda: (Grouped(groups), torch.randn(8, 3, 64, 64)))
    (plan,) = backend.plans
    assert plan.compiled_peak_bytes is not None
    assert 0.99 * plan.compiled_peak_bytes <= measured <= plan.compiled_peak_bytes


def test_without_a_budget_images_of_varying_sizes_take_no_more_than_stock() -> None:
    def made() -> tuple[nn.Module, Tensor]:
        images = torch.randn(8, 3, 64, 64)
        torch._dynamo.mark_dynamic(images, 0)
        return Grouped(48), images

    assert peak_of(fxckpt.Backend(cost="flops"), made) <= peak_of("inductor", made)


class Skips(nn.Module):
    """Two levels down and up: what goes around the lower one is joined with what comes out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = self.block(8, 16), self.block(16, 32), self.block(48, 16)

    @staticmethod
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        around = self.first(x)
        below = self.down(F.max_pool2d(around, 2))
        return (
            self.up(torch.cat([F.interpolate(below, scale_factor=2.0), around], 1)).square().mean()
        )


def skips() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Skips(), torch.randn(4, 8, 32, 32)


def test_memory_that_is_let_go_of_takes_no_more_than_what_is_kept_for_later_buffers() -> None:
    joint, count = inductor_joint(*skips())
    forward, backward, _ = InductorPlanner(Planner(budget=0.85, cost="flops")).partition(
        joint, num_fwd_outputs=count
    )
    kept = lower_backward(
        forward, backward, Lowerings(KeepExecutionOrder(ORDER)).lower, num_fwd_outputs=count
    )
    letting_go = kept.letting_go
    assert letting_go is not None
    assert letting_go.kernels == kept.kernels
    assert (live_bytes(letting_go) <= live_bytes(kept)).all() and (
        live_bytes(letting_go) < live_bytes(kept)
    ).any()


@pytest.mark.parametrize(("more_bytes", "lets_go"), [(64, False), (2**20, True)])
def test_a_backward_lets_go_of_memory_where_it_is_over_the_budget_otherwise(
    monkeypatch: pytest.MonkeyPatch, more_bytes: int, lets_go: bool
) -> None:
    lower = Lowerings.lower

    def lowered(self: Lowerings, half: fx.GraphModule, donated: Any, strides: Any) -> Any:
        found = lower(self, half, donated, strides)
        if donated is None or found.letting_go is None:
            return found
        # As if what is kept were that much.
        return replace(
            found, allocated=(*found.allocated, ("more", more_bytes, 0, len(found.kernels)))
        )

    monkeypatch.setattr(Lowerings, "lower", lowered)
    joint, count = inductor_joint(*skips())
    _, backward, plan = InductorPlanner(Planner(budget=0.85, cost="flops")).partition(
        joint, num_fwd_outputs=count
    )
    assert plan.keeps_order
    assert plan.lets_go == lets_go == any(FREES_EARLY in node.meta for node in backward.graph.nodes)
    assert plan.compiled_peak_bytes is not None and plan.budget_bytes is not None
    assert plan.compiled_peak_bytes <= plan.budget_bytes
    again, _ = inductor_joint(*skips())
    forward, backward, _ = InductorPlanner(Planner(known=(plan,), cost="flops")).partition(
        again, num_fwd_outputs=count
    )
    assert lets_go == any(FREES_EARLY in node.meta for node in backward.graph.nodes)
    assert not any(FREES_EARLY in node.meta for node in forward.graph.nodes)


def test_what_lets_go_is_compiled_without_keeping_memory_for_later_buffers() -> None:
    joint, count = inductor_joint(*skips())
    _, backward, _ = InductorPlanner(Planner(budget=0.85, cost="flops")).partition(
        joint, num_fwd_outputs=count
    )

    def reused(half: fx.GraphModule) -> int:
        with config.patch(fx_graph_cache=False):
            _, code = run_and_get_code(
                lambda: Lowerings(KeepExecutionOrder(ORDER)).compile_alone(half, True, {})
            )
        return sum("# reuse" in line for line in code[0].splitlines())

    keeping = reused(backward)
    free_early(backward)
    assert reused(backward) < keeping
    assert config.allow_buffer_reuse


@pytest.mark.parametrize("options", [{}, {"max_fusion_size": 1}])
def test_what_is_compiled_after_a_look_is_what_inductor_makes_without_one(
    options: dict[str, Any],
) -> None:
    joint, count = inductor_joint(Grouped(48), torch.randn(8, 3, 64, 64))
    _, backward, _ = InductorPlanner(Planner(budget=0.7, cost="flops")).partition(
        joint, num_fwd_outputs=count
    )
    # Images lie channels last, as in the forward, where Inductor would lay them out otherwise.
    assert wants_channels_last(backward) and not changes_layout(backward)

    def code(lowerings: Lowerings) -> str:
        with config.patch(fx_graph_cache=False, **options):
            _, (text,) = run_and_get_code(lambda: lowerings.compile_alone(backward, True, {}))
        return text

    looked_at = Lowerings(KeepExecutionOrder(ORDER))
    with config.patch(fx_graph_cache=False):
        looked_at.lower(backward, [], {})
    assert code(looked_at) == code(Lowerings(KeepExecutionOrder(ORDER)))


def test_what_was_lowered_in_inductor_s_own_order_is_not_compiled_in_place_of_what_is_held_to_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint, count = inductor_joint(*skips())
    planner = Planner(budget=0.85, cost="flops")
    _, backward, _ = InductorPlanner(planner).partition(joint, num_fwd_outputs=count)
    free = copy.deepcopy(backward)
    for node in free.graph.nodes:
        node.meta.pop(ORDER, None)
    lowered: list[GraphLowering] = []
    run = GraphLowering.run
    monkeypatch.setattr(
        GraphLowering, "run", lambda graph, *args: (lowered.append(graph), run(graph, *args))[1]
    )
    lowerings = Lowerings(KeepExecutionOrder(ORDER))
    with config.patch(fx_graph_cache=False):
        lowerings.lower(free, [], {})
        lowerings.lower(backward, [], {})
        lowerings.compile_alone(backward, True, {})
        assert len(lowered) == 2
        lowerings.lower(free, [], {})
        lowerings.compile_alone(backward, True, {})
    assert len(lowered) == 4


def test_a_convolution_that_runs_again_makes_no_copies_of_the_other_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = skips()

    def allocated(planner: Planner) -> tuple[int, fxckpt.Plan]:
        joint, count = inductor_joint(model, x)
        forward, backward, plan = InductorPlanner(planner).partition(joint, num_fwd_outputs=count)
        lower = Lowerings(None).lower
        lowered = lower_backward(
            forward,
            backward,
            lower,
            num_fwd_outputs=count,
            lowered_forward=lower(forward, None, {}),
        )
        return sum(nbytes for _, nbytes, _, _ in lowered.allocated), plan

    laid_out, plan = allocated(Planner(budget=0.85, cost="flops"))
    assert "convolution" in plan.recomputed
    without = tuple(step for step in EMIT_INDUCTOR if step.name != "to_channels_last")
    monkeypatch.setattr("fxckpt.inductor.planner.EMIT_INDUCTOR", without)
    copied, _ = allocated(Planner(known=(plan,), cost="flops"))
    image_bytes = 4 * 16 * 32 * 32 * 4
    assert laid_out + image_bytes <= copied


def test_gradients_of_images_that_were_laid_out_are_those_of_stock() -> None:
    def gradients(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model, x = skips()
        torch.compile(model, backend=backend)(x.requires_grad_()).backward()
        assert x.grad is not None
        assert x.grad.is_contiguous()
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    for ours, stock in zip(
        gradients(fxckpt.Backend(budget=0.85, cost="flops")), gradients("inductor"), strict=True
    ):
        torch.testing.assert_close(ours, stock)


class Memory(nn.Module):
    """An image that is read as it lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = F.gelu(self.first(x))
        rows = torch.as_strided(image, (len(x), 2048), (2048, 1))
        return self.second(image).flatten(1) * torch.tanh(rows * torch.linspace(0, 1, 2048))


def test_what_reads_memory_reads_it_as_it_was_laid_out_when_it_runs_again() -> None:
    def gradients(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Memory(), torch.randn(4, 3, 16, 16)
        step = model if backend is None else torch.compile(model, backend=backend)
        step(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for ours, eager in zip(
        gradients(fxckpt.Backend(policy=lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)),
        gradients(None),
        strict=True,
    ):
        torch.testing.assert_close(ours, eager)


def test_seeds_are_kept_whatever_a_policy_demands_and_however_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RNG_STATE_BYTES, "cpu", 4)

    def scaled(x: Tensor) -> Tensor:
        return 3 * F.dropout(x, 0.5)

    torch._dynamo.reset()
    backend = fxckpt.Backend(policy=lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
    x = torch.rand(64, 64).add(1).requires_grad_()
    y = torch.compile(scaled, backend=backend)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y / x).detach())
    assert any("seeds" in name for name in backend.plans[0].saved)


class Selected(nn.Module):
    """Layers on the rows that a mask lets pass, a loss on those that it lets pass again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = (
            nn.ModuleList(nn.Linear(32, 32) for _ in range(4)),
            nn.Linear(32, 50),
        )

    def forward(self, x: Tensor) -> Tensor:
        mask, target = x[:, 0] > -100, (x[:, 1] > 0).long()
        h = x[mask]
        for layer in self.layers:
            h = h + F.gelu(layer(h))
        return F.cross_entropy(self.head(h), target[mask])


class Scattered(nn.Module):
    """Values that a mask selects, and puts back: their number is a size that the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > -100)[:, :1]
        for layer in self.layers:
            x = x.masked_scatter(mask, F.gelu(layer(x)).masked_select(mask))
        return x.square().mean()


class Averaged(nn.Module):
    """Checkpoint regions in which two masks select: some of what is handed to the backward are sizes, which keep what they were found in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def block(layer: nn.Module, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
            return x.index_put((one,), F.gelu(layer(x[one]))) + x.masked_select(
                other[:, None]
            ).view(-1, 32).mean(0)

        one, other = x[:, 0] > -100, x[:, 1] > -100
        for layer in self.layers:
            x = checkpoint(block, layer, x, one, other, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("model", [Selected, Scattered, Averaged])
@pytest.mark.parametrize("budget", [None, 0.6, 0.45])
def test_what_a_mask_selects_is_planned_as_all_there_is(
    model: type[nn.Module], budget: float | None
) -> None:
    """Here the mask lets all pass. What it selects may run again, more than once in a backward; its size is bound by the first run."""

    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return model(), torch.randn(64, 32)

    backend = fxckpt.Backend(budget=budget, cost="flops")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        try:
            measured = peak_of(backend, make)
        except fxckpt.BudgetInfeasible as error:
            backend = fxckpt.Backend(budget=error.floor_bytes, cost="flops")
            measured = peak_of(backend, make)
        (plan,) = backend.plans
        assert measured == plan.compiled_peak_bytes
        (eager, x), (compiled, _) = make(), make()
        eager(x).backward()
        torch.compile(compiled, backend=backend)(x).backward()
    for one, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def next_tokens() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Next(), torch.rand(8, 64)


def test_the_gradient_of_sliced_logits_is_written_over_them() -> None:
    """Stock allocates it beside them."""
    backend = fxckpt.Backend(cost="flops")
    logits = 8 * 64 * 1000 * 4
    stock, ours = peak_of("inductor", next_tokens), peak_of(backend, next_tokens)
    assert stock - ours > 0.9 * logits
    assert backend.plans[0].compiled_peak_bytes == ours


def test_a_head_s_weight_gradient_does_not_wait_for_the_embedding_s() -> None:
    """The gradient of the logits would live throughout the backward, and the layers' saved values beside it."""
    joint, count = inductor_joint(*next_tokens())
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        InductorPlanner(Planner(budget=1, cost="flops")).partition(joint, num_fwd_outputs=count)
    logits, table = 8 * 64 * 1000 * 4, 1000 * 32 * 4
    assert caught.value.floor_bytes < 1.1 * (logits + table)


def test_what_kernels_write_over_is_learned_from_a_lowering() -> None:
    """An op that is the last to read as much as it writes is spared that much, and no other."""
    joint, count = inductor_joint(*next_tokens())
    forward, backward, plan = InductorPlanner(Planner(cost="flops")).partition(
        joint, num_fwd_outputs=count
    )
    kernels = FusionModel(fuses)(joint.graph, plan.saved)
    facts, _ = Planner(cost="flops").read(joint, count, bind_preferences=True, never_stored=kernels)
    lowered = lower_backward(forward, backward, Lowerings(None).lower, num_fwd_outputs=count)
    program, seen = facts.program, calibrate(facts, lowered, backward, no_workspace)
    pairs = zip(program.backward, seen.backward, strict=True)
    spared = {
        k: one.workspace_bytes - other.workspace_bytes for k, (one, other) in enumerate(pairs)
    }
    last = {s: k for k, op in enumerate(program.backward) for s in op.reads}
    assert 0 < sum(spared.values()) <= sum(nbytes for _, nbytes in lowered.written_over)
    for k, nbytes in spared.items():
        op = program.backward[k]
        dying = sum(
            program.storages[s].bytes
            for s in op.reads
            if last[s] == k and not program.storages[s].is_output
        )
        assert nbytes <= min(dying, sum(program.storages[s].bytes for s in op.writes))
    assert seen.ops == program.ops


def test_gradients_of_sliced_logits_are_those_of_stock() -> None:
    def gradients(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model, x = next_tokens()
        torch.compile(model, backend=backend)(x).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients("inductor")
    for budget in (None, 0.45):
        for one, other in zip(
            gradients(fxckpt.Backend(budget=budget, cost="flops")), expected, strict=True
        ):
            torch.testing.assert_close(one, other)


def test_a_budget_holds_for_the_largest_size_that_was_marked() -> None:
    def compiled(budget: int) -> tuple[Any, nn.Module, fxckpt.Backend]:
        torch._dynamo.reset()
        backend = fxckpt.Backend(budget=budget, cost="flops")
        layers = nn.Sequential(
            nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48)
        )
        run = torch.compile(lambda x: layers(x).square().sum(), backend=backend)
        x = torch.randn(200, 48)
        torch._dynamo.mark_dynamic(x, 0, min=128, max=512)
        run(x).backward()
        return run, layers, backend

    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        compiled(1)
    run, layers, backend = compiled(caught.value.floor_bytes)
    layers.zero_grad(set_to_none=True)
    largest = torch.randn(512, 48)
    measured = fxckpt.measure_peak(lambda: run(largest).backward())
    assert len(backend.plans) == 1
    assert measured <= caught.value.floor_bytes


def test_a_compile_that_writes_its_traces_is_planned_too(tmp_path: Any) -> None:
    with config.patch(
        {"trace.enabled": True, "trace.debug_dir": str(tmp_path), "fx_graph_cache": False}
    ):
        torch._dynamo.reset()
        torch.compile(Constants(), backend=fxckpt.Backend(budget=0.9, cost="flops"))(
            torch.rand(512, 48)
        ).backward()
    assert list(tmp_path.rglob("output_code.py"))


class Masked(nn.Module):
    """A head with a bias that is the embedding too, after layers without: what Inductor makes of both gradients has no place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Embedding(128, 64), nn.Parameter(torch.zeros(128))
        layers = (
            nn.Sequential(
                nn.LayerNorm(64),
                nn.Linear(64, 256, bias=False),
                nn.GELU(),
                nn.Linear(256, 64, bias=False),
            )
            for _ in range(4)
        )
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(F.linear(x, self.table.weight, self.bias), tokens.flip(0))


def test_the_order_that_is_kept_has_no_cycles() -> None:
    joint, count = inductor_joint(Masked(), torch.randint(0, 128, (32,)))
    stock = (
        InductorPlanner(Planner(cost="flops"))
        .partition(joint, num_fwd_outputs=count)[2]
        .compiled_peak_bytes
    )
    assert stock is not None
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        InductorPlanner(Planner(budget=1, cost="flops")).partition(joint, num_fwd_outputs=count)
    assert caught.value.floor_bytes <= stock


def test_a_concatenation_is_allocated_with_its_first_part() -> None:
    """Inductor lets products write their parts into it."""

    def parts(
        x: Tensor, narrow: Tensor, back: Tensor, wide: Tensor, down: Tensor, last: Tensor
    ) -> Tensor:
        return torch.cat([(x @ narrow) @ back, (x @ wide) @ down]) @ last

    shapes = (64, 32), (32, 16), (16, 48), (32, 400), (400, 48), (48, 8)
    lowered = Lowerings(None).lower(
        make_fx(parts, tracing_mode="fake")(*map(torch.randn, shapes)), None, {}
    )
    (first,) = (first for _, nbytes, first, _ in lowered.allocated if nbytes == 2 * 64 * 48 * 4)
    assert lowered.kernels[first] == ("mm_1",)


def test_a_loop_does_not_write_over_a_concatenation() -> None:
    """Its parts filled it, and no kernel made it as a whole."""

    def scaled(x: Tensor, narrow: Tensor, wide: Tensor, last: Tensor) -> Tensor:
        return (torch.cat([x @ narrow, x @ wide]) * 2) @ last

    inputs = [torch.randn(shape) for shape in ((64, 32), (32, 48), (32, 48), (48, 8))]
    lowered = Lowerings(None).lower(make_fx(scaled, tracing_mode="fake")(*inputs), None, {})
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(scaled), *inputs)
    assert len(lowered.allocated) == code.count(" = empty_strided_cpu(") == 3
    assert lowered.written_over == ()


class Noise(nn.Module):
    """Draws of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = F.gelu(h + 0.1 * torch.randn_like(h))
        return (
            self.last(F.dropout(h * torch.bernoulli(torch.full_like(h, 0.5)), 0.3)).square().mean()
        )


def test_a_generator_state_that_is_set_aside_counts() -> None:
    """What draws as eager does, and runs again, is replayed under the state of its first run."""

    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Noise(), torch.randn(64, 32)

    with config.patch(fallback_random=True):
        with pytest.raises(fxckpt.BudgetInfeasible) as caught:
            peak_of(fxckpt.Backend(budget=1, cost="flops"), make)
        least = caught.value.floor_bytes
        assert peak_of(fxckpt.Backend(budget=least, cost="flops"), make) <= least


def test_a_compiler_that_cannot_be_run_is_told_by_the_compile_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, told, others = list[int](), list[object](), set(threading.enumerate())

    def refused() -> None:
        asked.append(1)
        raise PermissionError

    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", refused)
    monkeypatch.setattr(threading, "excepthook", told.append)
    _begin_to_look_for_instructions({})
    for thread in set(threading.enumerate()) - others:
        thread.join()
    assert asked and not told
