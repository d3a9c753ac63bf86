"""Hand over: which of the names for one memory the forward saves."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxckpt.inductor.planner import InductorPlanner, is_extern_kernel
from fxckpt.passes.inductor.save_views import VIEW_OF
from fxckpt.planner.planner import Planner
from tests.joints import inductor_joint


def halves(function: object, *inputs: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    joint, count = inductor_joint(function, *inputs)  # type: ignore[arg-type]
    return InductorPlanner(Planner(cost="flops")).partition(joint, num_fwd_outputs=count)[:2]


def saved_views(half: fx.GraphModule) -> list[fx.Node]:
    return [node for node in half.graph.find_nodes(op="placeholder") if VIEW_OF in node.meta]


def weights() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 64, requires_grad=True), torch.randn(64, 16, requires_grad=True)


def test_what_matrix_products_alone_read_is_saved_as_their_rows() -> None:
    forward, backward = halves(
        lambda x, w, v: (x.exp() @ w).tanh().square().sum(), torch.randn(4, 8, 32), *weights()
    )
    rows = [node.meta["val"].shape for node in saved_views(backward)]
    assert torch.Size([32, 32]) in rows
    assert all(is_extern_kernel(user) for node in saved_views(backward) for user in node.users)
    assert {node.name for node in saved_views(backward)} <= {
        str(o) for o in forward.graph.output_node().args[0]
    }


def test_what_loops_read_too_is_saved_as_it_is() -> None:
    _, backward = halves(
        lambda x, w, v: (x.exp() @ w @ v).sum(),
        torch.randn(4, 8, 32, requires_grad=True),
        *weights(),
    )
    assert "exp" in {node.name for node in backward.graph.find_nodes(op="placeholder")}


def test_gradients_are_those_of_eager() -> None:
    def step(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (F.gelu(F.gelu(x.exp() @ w) @ v)).square().mean()

    def run(compiled: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        inputs = (torch.randn(4, 8, 32, requires_grad=True), *weights())
        (torch.compile(step, backend="fxckpt") if compiled else step)(*inputs).backward()
        return [t.grad for t in inputs]

    for got, expected in zip(run(compiled=True), run(compiled=False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
