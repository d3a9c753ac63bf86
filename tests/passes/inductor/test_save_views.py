"""Save views: which of the aliases of a value the forward saves."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn import functional as F

from fxckpt.inductor.planner import InductorPlanner, is_extern_kernel
from fxckpt.passes.graphs import Joint
from fxckpt.passes.inductor.save_views import VIEW_OF
from fxckpt.planner.planner import Planner
from tests.joints import inductor_joint
from tests.passes.graphs import text_of


def halves(function: object, *inputs: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    joint, count = inductor_joint(function, *inputs)  # type: ignore[arg-type]
    return InductorPlanner(Planner(cost="flops")).partition(Joint(joint, count))[:2]


def saved_views(half: fx.GraphModule) -> list[fx.Node]:
    return [node for node in half.graph.find_nodes(op="placeholder") if VIEW_OF in node.meta]


def weights() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 64, requires_grad=True), torch.randn(64, 16, requires_grad=True)


def test_view_of_extern_kernels_is_saved() -> None:
    """A value that only products read is saved as their rows."""
    forward, backward = halves(
        lambda x, w, v: (x.exp() @ w).tanh().square().sum(), torch.randn(4, 8, 32), *weights()
    )
    rows = [node.meta["val"].shape for node in saved_views(backward)]
    assert torch.Size([32, 32]) in rows
    assert all(is_extern_kernel(user) for node in saved_views(backward) for user in node.users)
    assert {node.name for node in saved_views(backward)} <= {
        str(o) for o in forward.graph.output_node().args[0]
    }


def test_base_with_fused_readers_is_saved() -> None:
    """A value that fused kernels read too is saved as it is."""
    _, backward = halves(
        lambda x, w, v: (x.exp() @ w @ v).sum(),
        torch.randn(4, 8, 32, requires_grad=True),
        *weights(),
    )
    assert "exp" in {node.name for node in backward.graph.find_nodes(op="placeholder")}


def test_gradients_equal_eager() -> None:
    """Saving views does not change gradients."""

    def step(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (F.gelu(F.gelu(x.exp() @ w) @ v)).square().mean()

    def run(compiled: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        inputs = (torch.randn(4, 8, 32, requires_grad=True), *weights())
        (torch.compile(step, backend="fxckpt") if compiled else step)(*inputs).backward()
        return [t.grad for t in inputs]

    for got, expected in zip(run(compiled=True), run(compiled=False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_graph_of_a_saved_view() -> None:
    """The backward reads the rows that the forward's product read."""
    joint, count = inductor_joint(
        lambda x, w: (x.exp() @ w).sum(), torch.randn(4, 8, 32), weights()[0]
    )
    forward, backward, _ = InductorPlanner(Planner(cost="flops")).partition(Joint(joint, count))
    assert_expected_inline(
        text_of(forward.graph),
        """\
primals_1: input
primals_2: input
exp = exp(primals_1)
view = view(exp, [32, 32])
mm = mm(view, primals_2)
view_1 = view(mm, [4, 8, 64])
sum_1 = sum(view_1)
permute = permute(view, [1, 0])
return [sum_1, permute]""",
    )
    assert_expected_inline(
        text_of(backward.graph),
        """\
permute: input
tangents_1: input
expand = expand(tangents_1, [4, 8, 64])
view_2 = view(expand, [32, 64])
mm_1 = mm(permute, view_2)
return [None, mm_1]""",
    )
