"""Draw as traced: operands of random ops that are run twice keep their traced layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fxckpt
from fxckpt.passes.inductor.draw_as_traced import draw_as_traced
from fxckpt.policies import recompute_all
from fxckpt.torch_private import run_and_save_rng_state, run_with_rng_state
from fxckpt.torch_private.inductor.layouts import FORCE_STRIDE_ORDER


def test_operand_of_a_repeated_draw_is_forced() -> None:
    """The operand is forced in the first run and in the second; the state is not."""

    def function(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        dropout = torch.ops.aten.native_dropout.default
        first = run_and_save_rng_state(dropout, x.exp(), 0.5, True)[1]
        return first[0], run_with_rng_state(state, dropout, x.exp(), 0.5, True)[0]

    gm = make_fx(function, tracing_mode="fake")(torch.randn(4, 6), torch.get_rng_state())
    draw_as_traced(gm.graph)
    gm.graph.lint()
    calls = [n for n in gm.graph.nodes if n.target in (run_and_save_rng_state, run_with_rng_state)]
    assert [str(n.args[-3]) for n in calls] == [
        "inductor_force_stride_order_default",
        "inductor_force_stride_order_default_1",
    ]
    forced = gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)
    assert [n.args[1] for n in forced] == [[6, 1], [6, 1]]


class Images(nn.Module):
    """Convolutions, for which Inductor lays images out channels last, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).tanh()).sin()
        return x.square().mean()


def test_recomputed_dropout_of_images_draws_as_eager() -> None:
    """With ``fallback_random`` the loss and the gradients are those of eager mode's masks."""
    torch.manual_seed(0)
    model, x = Images(), torch.randn(4, 4, 8, 8)
    backend = fxckpt.Backend(policy=recompute_all, options={"fallback_random": True}, scope="graph")
    found = []
    for step in (model, torch.compile(model, backend=backend)):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = step(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert "native_dropout" in backend.plans[0].recomputed
    torch.testing.assert_close(found[1], found[0])
