"""Heads with their losses, their joint graphs, and what these compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxckpt.passes.tiles.row_regions import RowRegion, row_regions
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
    "z-loss before": lambda x, w, t: (
        (x @ w).logsumexp(1).square().mean() + F.cross_entropy(x @ w, t, label_smoothing=0.1)
    ),
    "soft capping": capped,
    "log-probabilities": of_log_probabilities,
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


def widest(module: fx.GraphModule) -> int:
    """The elements of the widest value."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    return max(value.numel() for value in values if isinstance(value, Tensor))
