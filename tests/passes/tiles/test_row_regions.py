"""Row regions: heads with their losses and MLPs, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxckpt.passes.tiles.gradient_ahead import run_ahead
from fxckpt.passes.tiles.row_regions import RowRegion, row_regions
from fxckpt.passes.tiles.unroll import unroll
from tests.joints import normalize, plain_joint

ROWS, WIDTH, CLASSES, INNER = 24, 8, 53, 40
TANGENT = 0.7


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that need a gradient, the same for a shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


IGNORED = 5
TARGET = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(0))
TARGET[::4] = IGNORED


def shifted(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    logits = x.view(4, -1, WIDTH) @ w
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target.view(4, -1)[:, 1:].flatten())


def with_z_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    logits = x @ w
    return F.cross_entropy(logits, target) + 1e-3 * torch.logsumexp(logits, -1).pow(2).mean()


def capped(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(30 * torch.tanh(x @ w / 30), target, reduction="sum")


def of_log_probabilities(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    scores = torch.log_softmax((x @ w).float(), -1)
    chosen = scores.gather(1, target[:, None]).squeeze(1)
    ratio = torch.exp(chosen - chosen.detach())
    return -torch.min(ratio * 0.5, ratio.clamp(0.8, 1.2) * 0.5).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda x, w, t: F.cross_entropy(x @ w, t),
    "sum": lambda x, w, t: F.cross_entropy(x @ w, t, reduction="sum"),
    "of each row": lambda x, w, t: (F.cross_entropy(x @ w, t, reduction="none") / 7).sum(),
    "ignored targets": lambda x, w, t: F.cross_entropy(x @ w, t, ignore_index=IGNORED),
    "label smoothing": lambda x, w, t: F.cross_entropy(x @ w, t, label_smoothing=0.1),
    "in float32": lambda x, w, t: F.cross_entropy((x @ w).float(), t),
    "shifted": shifted,
    "z-loss": with_z_loss,
    "soft capping": capped,
    "log-probabilities": of_log_probabilities,
}


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return ((F.silu(x @ gate) * (x @ up)) @ down).pow(2).sum()


def gelu(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return (F.gelu(F.linear(x, up, bias)) @ down).pow(2).sum()


def fused_swiglu(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ both).chunk(2, -1)
    return ((F.silu(gate) * up) @ down).pow(2).sum()


def of_three_dims(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.gelu(x.view(2, 12, WIDTH) @ up) @ down).pow(2).sum()


MLPS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "SwiGLU": (
        swiglu,
        (values(ROWS, WIDTH), values(WIDTH, INNER), values(WIDTH, INNER), values(INNER, WIDTH)),
    ),
    "GELU": (
        gelu,
        (values(ROWS, WIDTH), values(INNER, WIDTH), values(INNER), values(INNER, WIDTH)),
    ),
    "fused SwiGLU": (
        fused_swiglu,
        (values(ROWS, WIDTH), values(WIDTH, 2 * INNER), values(INNER, WIDTH)),
    ),
    "batch and length": (
        of_three_dims,
        (values(ROWS, WIDTH), values(WIDTH, INNER), values(INNER, WIDTH)),
    ),
}


def joint_of(function: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    """The normalized joint graph of a function."""
    module, _ = plain_joint(function, *given)
    normalize(module)
    return module


def divided(module: fx.GraphModule, count: int) -> RowRegion:
    """The one region of a graph, with its rows numbered so that they can be divided."""
    (ways,) = row_regions(module.graph)
    return next(way for way in ways if way.divides(count))


def outputs(module: fx.GraphModule, given: tuple[Tensor, ...]) -> list[Tensor]:
    """What a joint graph computes: the loss, and the gradient of each input that has one."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    flat = fx.GraphModule(module, graph)
    detached = [t.detach() for t in given]
    found = flat(*detached, torch.tensor(TANGENT, dtype=given[0].dtype))
    return [t for t in found if t is not None]


def exact(function: Callable[..., Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
    """The same in float64, by autograd."""
    doubled = [t.detach().double() if t.requires_grad else t for t in given]
    leaves = [d.requires_grad_() for d, t in zip(doubled, given, strict=True) if t.requires_grad]
    loss = function(*doubled)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.tensor(TANGENT).double())]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Compare with a tolerance that is a share of the greatest value."""
    assert len(found) == len(expected)
    for value, reference in zip(found, expected, strict=True):
        most = float(reference.abs().max())
        torch.testing.assert_close(
            value.double(), reference.to(torch.float64), rtol=0, atol=tolerance * most
        )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_heads_with_their_losses(name: str, ahead: bool) -> None:
    """In 3 tiles, loss and gradients are those in float64, with the gradient ahead too."""
    function = LOSSES[name]
    given = values(ROWS, WIDTH), values(WIDTH, CLASSES), TARGET
    module = joint_of(function, *given)
    if ahead:
        assert run_ahead(module.graph, divided(module, 3))
    region = divided(module, 3)
    assert bool(region.backward) != ahead
    unroll(module.graph, [region], 3)
    module.graph.lint()
    widest = max(n.meta["val"].numel() for n in module.graph.nodes if _is_tensor(n))
    assert widest <= ROWS * CLASSES // 2
    assert_near(outputs(module, given), exact(function, given), 2e-6)


def test_tiles_of_positions_where_batches_are_few() -> None:
    """More tiles than batches divide the positions, also where the last one has no target."""
    given = values(ROWS, WIDTH), values(WIDTH, CLASSES), TARGET
    module = joint_of(shifted, *given)
    region = divided(module, 5)
    assert region.length == ROWS // 4 and not region.divides(6)
    unroll(module.graph, [region], 5)
    assert_near(outputs(module, given), exact(shifted, given), 2e-6)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("name", MLPS)
def test_mlps(name: str, count: int) -> None:
    """Forward and backward are tiled alike, by a number that divides the rows or not."""
    function, given = MLPS[name]
    module = joint_of(function, *given)
    region = divided(module, count)
    assert region.forward and region.backward
    unroll(module.graph, [region], count)
    module.graph.lint()
    assert_near(outputs(module, given), exact(function, given), 2e-6)


def test_small_types_are_added_up_in_float32() -> None:
    """Many tiles in bfloat16 are no farther from float64 than the whole."""
    given = (
        values(512, WIDTH, dtype=torch.bfloat16),
        values(INNER, WIDTH, dtype=torch.bfloat16),
        values(INNER, dtype=torch.bfloat16),
        values(INNER, WIDTH, dtype=torch.bfloat16),
    )
    expected = exact(gelu, given)

    def error(module: fx.GraphModule) -> Tensor:
        found = outputs(module, given)
        return torch.stack(
            [(f - e).norm() / e.norm() for f, e in zip(found, expected, strict=True)]
        )

    whole = error(joint_of(gelu, *given))
    module = joint_of(gelu, *given)
    unroll(module.graph, [divided(module, 64)], 64)
    assert (error(module) <= 1.5 * whole + 1e-3).all()


NO_REGIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "wide values are an output": lambda x, w: (x @ w).exp(),
    "attention": lambda x, w: ((q := x @ w) @ q.t()).softmax(-1).sum(),
    "dropout": lambda x, w: F.dropout((x @ w).exp(), 0.5).sum(),
    "rows are mixed": lambda x, w: (x @ w).cumsum(0).exp().sum(),
    "narrow": lambda x, w: (x @ w[:, :WIDTH]).exp().sum(),
    "sorted": lambda x, w: ((x @ w).sort(1)[0] ** 2).sum(),
    "normalized over rows": lambda x, w: ((y := (x @ w).exp()) / y.sum(0)).pow(2).sum(),
}


@pytest.mark.parametrize("name", NO_REGIONS)
def test_what_is_no_region(name: str) -> None:
    """A wide value that an op across rows, a random one or the user reads is left whole."""
    module = joint_of(NO_REGIONS[name], values(ROWS, WIDTH), values(WIDTH, INNER))
    assert row_regions(module.graph) == ()


def test_gradient_stays_where_it_is_not_linear() -> None:
    """A backward that reads the gradient of the loss twice, or of many values, cannot go ahead."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return (gradient * gradient).expand(ROWS, INNER)

    module = joint_of(
        lambda x, w: Squared.apply((x @ w).tanh()), values(ROWS, WIDTH), values(WIDTH, INNER)
    )
    before = [n.name for n in module.graph.nodes]
    assert not run_ahead(module.graph, divided(module, 2))
    assert [n.name for n in module.graph.nodes] == before
    several = joint_of(
        lambda x, w: (x @ w).tanh().sum(1), values(ROWS, WIDTH), values(WIDTH, INNER)
    )
    assert not run_ahead(several.graph, divided(several, 2))
