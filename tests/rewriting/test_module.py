"""Rewritten modules as modules: shared state, attributes and hooks, and torch's tools."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import fxckpt
from fxckpt import policies
from tests.rewriting.sources import GPT, either, stack
from tests.steps import differing, outcome


@either
def test_state_is_shared_with_source(
    of: Callable[[nn.Module], nn.Module],
) -> None:
    """Parameters, buffers and state_dict keys are the source's own."""
    source = of(stack())
    made = fxckpt.rewrite(source)
    assert isinstance(made, fx.GraphModule)
    assert list(made.state_dict()) == list(source.state_dict())
    assert all(a is b for a, b in zip(made.parameters(), source.parameters(), strict=True))
    assert all(a is b for a, b in zip(made.buffers(), source.buffers(), strict=True))
    made.graph.lint()


@either
def test_state_changes_take_effect(of: Callable[[nn.Module], nn.Module]) -> None:
    """Optimizer steps, loading, modes and dtypes act on it as on a plain module."""
    x = torch.randn(4, 8)
    plain, made = stack(), fxckpt.rewrite(of(stack()), policies.recompute_all)

    def agree() -> None:
        torch.manual_seed(1)
        expected = plain(x)
        torch.manual_seed(1)
        assert torch.equal(made(x), expected)

    agree()
    for model in (plain, made):
        torch.optim.SGD(model.parameters(), 0.1).zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    agree()
    for change in (
        lambda m: m.load_state_dict({k: v + 1 for k, v in stack().state_dict().items()}),
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: m.requires_grad_(False),
        lambda m: m.requires_grad_(True),
    ):
        change(plain), change(made)
        agree()
    x = x.double()
    plain.double(), made.double()
    agree()
    assert {name: b.tolist() for name, b in made.named_buffers()} == {
        name: b.tolist() for name, b in plain.named_buffers()
    }


def test_print_readable_names_saved_and_recomputed() -> None:
    """print_readable names the saved values and the recomputed nodes."""
    made = fxckpt.rewrite(fx.symbolic_trace(GPT(1)), policies.save_matmuls)
    assert "saved" not in made.print_readable(print_output=False)
    made(torch.randint(0, 50, (4, 24)))
    text = made.print_readable(print_output=False)
    assert "# saved for the backward: " + ", ".join(made.plan.saved) in text
    assert all(
        f"{name}_recompute" in text for name in made.plan.recomputed if name.startswith("gelu")
    )
    assert made.forward_graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.addmm.default
    )
    saved = {node.name for node in made.backward_graph.graph.find_nodes(op="placeholder")}
    assert set(made.plan.saved) <= saved


@either
def test_torch_compile_traces_through(of: Callable[[nn.Module], nn.Module]) -> None:
    """torch.compile captures it in one graph with eager's outcome."""
    x = torch.randn(4, 8)
    expected = outcome(model := stack(), model, (x,))
    made = fxckpt.rewrite(of(stack()), policies.recompute_all)
    assert (
        differing(
            expected, outcome(made, torch.compile(made, backend="aot_eager", fullgraph=True), (x,))
        )
        == []
    )


def test_fx_interprets_and_traces_it() -> None:
    """fx.Interpreter and symbolic_trace run it as any graph module."""
    x = torch.randn(4, 8)
    made = fxckpt.rewrite(fx.symbolic_trace(stack().eval()), policies.recompute_all)
    assert torch.equal(fx.Interpreter(made).run(x), made(x))
    assert torch.equal(fx.symbolic_trace(made)(x), made(x))


class Own(nn.Module):
    """A module with a state, a mode and a ``state_dict`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).sin() * self.scale if self.training else self.lin(x)

    def train(self, mode: bool = True) -> Own:
        self.scale += mode
        return super().train(mode)

    def get_extra_state(self) -> float:
        return self.scale

    def set_extra_state(self, state: float) -> None:
        self.scale = state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs) | {"more": self.scale}

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


def test_attributes_and_methods_come_from_source() -> None:
    """Attributes and methods are the source's, whichever of the two is used."""
    model, x = Own(), torch.randn(2, 4)
    made = fxckpt.rewrite(model, policies.recompute_all)
    assert isinstance(made, Own)
    made.scale = 5.0
    assert model.scale == 5.0
    assert torch.equal(made(x), model(x))
    assert torch.equal(made.twice(x), model.twice(x))
    made.training = False
    assert torch.equal(made(x), model.lin(x))
    assert made.train().scale == model.scale == 6.0
    made.extra = nn.Parameter(torch.ones(1))
    assert dict(model.named_parameters())["extra"] is made.extra
    del made.extra
    assert not hasattr(model, "extra")
    model.forward = lambda x: model.lin(x) * 100
    assert torch.equal(made(x), model.lin(x) * 100)


def test_own_state_dict_methods_are_kept() -> None:
    """The source's own state_dict, extra state and hooks are used."""
    made, seen = fxckpt.rewrite(Own()), []
    made.register_load_state_dict_pre_hook(lambda module, state, *_: seen.append(state.pop("more")))
    made.register_state_dict_post_hook(lambda module, state, *_: state.update(hooked=True))
    made.scale = 7.0
    state = made.state_dict()
    assert (state["more"], state["hooked"]) == (7.0, True)
    made.scale = 1.0
    made.load_state_dict(state, strict=False)
    assert (made.source.scale, seen) == (7.0, [7.0])


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.spectral_norm,
        lambda m: prune.custom_from_mask(m, "weight", torch.eye(8)),
        lambda m: m.register_full_backward_hook(
            lambda module, grads, _: tuple(2 * g for g in grads)
        ),
        lambda m: m.register_forward_hook(lambda module, args, out: 2 * out),
    ],
    ids=["spectral_norm", "prune", "full backward hook", "forward hook"],
)
@either
def test_own_hooks_take_effect(
    of: Callable[[nn.Module], nn.Module], change: Callable[[nn.Module], object]
) -> None:
    """Hooks registered on the rewritten module act as on a plain module."""
    plain, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    made = fxckpt.rewrite(of(copy.deepcopy(plain)), policies.recompute_all)
    for module in (plain, made):
        torch.manual_seed(0)
        change(module)
    for _ in range(2):
        results = [m(x).square().sum() for m in (plain, made)]
        (expected,), (got,) = (torch.autograd.grad(r, x) for r in results)
        assert torch.equal(*results)
        assert torch.equal(expected, got)


def test_instance_forward_follows_plan() -> None:
    """A forward set on the instance does not bypass the plan."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    model.forward = lambda x: F.linear(x, model.weight).sin()  # type: ignore[method-assign]
    made = fxckpt.rewrite(model, policies.recompute_all)
    made.forward(x).sum().backward()
    assert "mm" in made.plan.recomputed


@either
def test_torch_export_and_module_compile_work(of: Callable[[nn.Module], nn.Module]) -> None:
    """torch.export, Module.compile and delete_all_unused_submodules work on it."""
    made, x = fxckpt.rewrite(of(stack().eval()), policies.recompute_all), torch.randn(4, 8)
    expected = made(x)
    made.delete_all_unused_submodules()
    assert torch.equal(torch.export.export(made, (x,)).module()(x), expected)
    made.compile(backend="aot_eager")
    assert torch.equal(made(x), expected)
