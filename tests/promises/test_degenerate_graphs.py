"""Degenerate graphs: no ops, views only, odd outputs, by every entry point and inner compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fxckpt

x34 = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

GRAPHS: dict[str, Callable[[Tensor], Any]] = {
    "identity": lambda a: a,
    "views only": lambda a: list(a.unbind(0)),
    "one view": lambda a: a.t(),
    "one op": lambda a: a.sin(),
    "returned twice": lambda a: (lambda b: (b, b))(a.sin()),
    "input and op": lambda a: (a, a.sin()),
    "aliased outputs": lambda a: (lambda b: (b, b.view(-1), b.t()))(a.sin()),
    "integer output": lambda a: (a.sin(), (a > 0).sum(), a.argmax()),
    "complex output": lambda a: torch.complex(a, a.cos()),
    "detached output": lambda a: (a.sin(), a.cos().detach()),
    "constant output": lambda a: (a.sin(), torch.ones(2)),
    "unused op of several": lambda a: (a.sin(), a.topk(2)[0].detach())[0],
    "unused results": lambda a: (torch.var_mean(a), a.exp())[1],
    "unused results alone": lambda a: (torch.var_mean(a), a.sort())[:0],
    "unused gradient of several": lambda a: torch.var_mean(a)[0].detach() + a.topk(2)[1],
    "no differentiable output": lambda a: (a > 0, a.argmax(), a.detach().exp()),
    "integers alone": lambda a: (a > 0).sum(),
    "complex through": lambda a: torch.view_as_real(torch.complex(a, a).conj() * 2j),
    "complex view": lambda a: torch.complex(a, a.sin()).real,
    "no output": lambda a: (a.sin(), None)[1],
    "no inputs used": lambda a: torch.ones(2, 2) * 3,
    "input twice": lambda a: (a, a),
    "view of the input": lambda a: (a.t(), a.sin()),
    "output of views of views": lambda a: [v.t() for v in a.sin().unbind(0)[0].split(2)],
    "write to a view": lambda a: (lambda b: (b[0].mul_(2), b)[1])(a.sin()),
    "empty of both": lambda a: (a[:0] @ a[:0].t(), a[:, :0].sum(1)),
    "product with nothing": lambda a: a[:, :0] @ a[:, :0].t() + a.sum(),
    "argument of no size": lambda a: torch.cat([a[:0].flatten(), a.sin().flatten()]),
    "one element everywhere": lambda a: (a[:1, :1].sin() @ a[:1, :1].exp()).mean().sqrt(),
    "set and reset": lambda a: (torch.set_grad_enabled(True), a.cos())[1],
    "empty tensor": lambda a: a[:0].sin(),
    "empty and full": lambda a: (a[:0].sin(), a.sin()),
    "one element": lambda a: a[0, 0].sin(),
    "size one": lambda a: a[:1, :1].exp().sum(),
    "sum of nothing": lambda a: a[:0].sum() + a.sum() * 0,
    "in place": lambda a: a.clone().sin_().mul_(2),
    "expand": lambda a: a[:1].expand(5, 4).sin().sum(),
    "python scalar": lambda a: (a.sin(), 3),
    "none output": lambda a: (a.sin(), None),
    "dict output": lambda a: {"a": a.sin(), "b": [a.cos()]},
    "dropout of all": lambda a: torch.nn.functional.dropout(a, 1.0),
    "no dependence": lambda a: torch.zeros_like(a).sin() + a * 0,
}


def leaves(value: Any) -> list[Tensor]:
    """Return the tensors in nested outputs."""
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


def outcome(function: Callable[[Tensor], Any]) -> list[Tensor]:
    """Return the outputs of one step and the gradient of its input."""
    a = x34.clone().requires_grad_()
    torch.manual_seed(0)
    outputs = leaves(function(a))
    losses = [t.abs().sum() for t in outputs if t.requires_grad and t.numel()]
    if losses:
        torch.stack(losses).sum().backward()
    return [t.detach() for t in (*outputs, *([a.grad] if a.grad is not None else []))]


def boxed(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Return the graph as a compiled function."""
    return make_boxed_func(gm.forward)


def by_partition_fn(function: Callable[[Tensor], Any], budget: Any) -> Callable[[Tensor], Any]:
    """Return a function compiled by AOTAutograd alone."""
    partitioner = fxckpt.Partitioner(budget=budget)
    return aot_function(function, fw_compiler=boxed, partition_fn=partitioner)  # type: ignore[no-any-return]


def by_backend(inner: str) -> Callable[..., Any]:
    """Return what compiles a function by the backend."""
    return lambda function, budget: torch.compile(
        function, backend=fxckpt.Backend(budget=budget, inner=inner)
    )


def by_rewrite(function: Callable[[Tensor], Any], budget: Any) -> Callable[[Tensor], Any]:
    """Return a function as a module that follows a plan."""
    return fxckpt.rewrite(function, example_inputs=x34.clone().requires_grad_(), budget=budget)


def by_configuration(function: Callable[[Tensor], Any], budget: Any) -> Callable[[Tensor], Any]:
    """Return a function compiled by Inductor, whose configuration has the partitioner."""
    partitioner = fxckpt.Partitioner(budget=budget)
    return torch.compile(function, options={"custom_partitioner_fn": partitioner})


ENTRIES: dict[str, Callable[..., Any]] = {
    "aot_eager": by_backend("aot_eager"),
    "partition_fn": by_partition_fn,
    "rewrite": by_rewrite,
    "checkpoint": lambda function, budget: lambda a: fxckpt.checkpoint(function, a, budget=budget),
}
CASES = [(name, entry) for name in GRAPHS for entry in ENTRIES]
FEW = ("views only", "identity", "aliased outputs", "empty and full", "integer output")
FUSED = {"inductor": by_backend("inductor"), "configuration": by_configuration}
CASES += [(name, entry) for name in FEW for entry in FUSED]
SWEPT = [(name, entry) for name in GRAPHS if name not in FEW for entry in FUSED]
ENTRIES |= FUSED


def has_work(function: Callable[[Tensor], Any]) -> bool:
    """Return whether an output has a gradient and memory of its own."""
    a = x34.clone().requires_grad_()
    given = a.untyped_storage().data_ptr()
    return any(
        t.requires_grad and t.untyped_storage().data_ptr() != given for t in leaves(function(a))
    )


def check(function: Callable[[Tensor], Any], entry: str, *, between: bool = True) -> None:
    """Compare a step without a budget, at the floor and ``between`` with the step as it is."""
    compiled = ENTRIES[entry]
    expected = outcome(function)
    budgets: list[Any] = [None, *([1.0] if between else [])]
    try:
        torch._dynamo.reset()
        outcome(compiled(function, 1))
    except fxckpt.CaptureError as error:
        assert entry == "rewrite" and "nothing to plan" in str(error)
        assert not has_work(function)
        return
    except fxckpt.BudgetInfeasible as error:
        budgets += [error.floor_bytes, *([error.floor_bytes * 21 // 20] if between else [])]
    for budget in budgets:
        torch._dynamo.reset()
        found = outcome(compiled(function, budget))
        same = torch.allclose if entry in FUSED else torch.equal
        assert len(found) == len(expected), budget
        assert all(same(one, other) for one, other in zip(found, expected, strict=True)), budget


@pytest.mark.parametrize("name, entry", CASES)
def test_degenerate_graph_keeps_its_values(name: str, entry: str) -> None:
    """Values and gradients are those of the step as it is, without a budget and at the floor."""
    check(GRAPHS[name], entry, between=False)


@pytest.mark.sweep
@pytest.mark.parametrize("name, entry", CASES)
def test_degenerate_graph_between_the_extremes(name: str, entry: str) -> None:
    """The same at the uncheckpointed peak, and a little above the floor."""
    check(GRAPHS[name], entry)


@pytest.mark.sweep
@pytest.mark.parametrize("name, entry", SWEPT)
def test_degenerate_graph_under_inductor(name: str, entry: str) -> None:
    """The rest of the graphs under Inductor, whose compiles take seconds each."""
    check(GRAPHS[name], entry)


def floats(a: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply an op to a tensor of floats, and leave others as they are."""
    return op(a) if a.is_floating_point() else a


OPS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    lambda a: a * 2,
    lambda a: a.transpose(0, -1) if a.dim() else a,
    lambda a: a.reshape(-1),
    lambda a: a.reshape(-1)[:0],
    lambda a: a.reshape(-1)[:1],
    lambda a: a.unsqueeze(0).expand(2, *a.shape),
    lambda a: a.clone().mul_(3),
    lambda a: a.detach(),
    lambda a: torch.complex(a, a.cos()) if a.is_floating_point() else a.abs(),
    lambda a: floats(a, lambda a: a.reshape(-1).sort()[0]),
    lambda a: floats(a, lambda a: (a > 0).sum()),
    lambda a: floats(a, lambda a: torch.nn.functional.dropout(a, 0.5)),
    lambda a: floats(a, lambda a: torch.var_mean(a.reshape(-1))[1] if a.numel() > 1 else a),
    lambda a: a.reshape(-1).chunk(2)[-1] if a.numel() > 1 else a,
    lambda a: a.sum(),
    lambda a: torch.zeros_like(a),
    lambda a: a.reshape(-1, 1) @ a.reshape(1, -1),
)
"""Ops that fit any tensor, among them views, writes, odd types and ops of several results."""
STEP = st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 5))
PROGRAMS = st.tuples(
    st.lists(STEP, max_size=6), st.lists(st.integers(0, 6), min_size=1, max_size=4)
)


def program(steps: list[tuple[int, int]], returned: list[int]) -> Callable[[Tensor], Any]:
    """Return a function that applies ops to its input or earlier values, and returns some."""

    def function(a: Tensor) -> list[Tensor]:
        values = [a]
        for op, i in steps:
            values.append(OPS[op](values[i % len(values)]))
        return [values[-1 - i % len(values)] for i in returned]

    return function


@pytest.mark.sweep
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry not in FUSED])
def test_small_graphs_keep_their_values(entry: str) -> None:
    """Generated graphs of up to six ops, whose outputs repeat and alias values and the input."""

    @given(PROGRAMS)
    def generated(drawn: tuple[list[tuple[int, int]], list[int]]) -> None:
        check(program(*drawn), entry)

    generated()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_hooks_under_compiled_autograd(inner: str) -> None:
    """A tensor hook in the model leaves the backward to compiled autograd."""
    weight = torch.randn(8, 8)

    def step(x: Tensor) -> None:
        y = (x @ weight).sin()
        y.register_hook(lambda gradient: gradient * 2)
        y.sum().backward()

    grads = []
    for backend in (None, fxckpt.Backend(inner=inner)):
        x = torch.ones(4, 8, requires_grad=True)
        torch._dynamo.reset()
        with torch._dynamo.config.patch(compiled_autograd=backend is not None):
            (step if backend is None else torch.compile(step, backend=backend))(x)
        grads.append(x.grad)
    assert grads[0] is not None and grads[1] is not None
    assert torch.allclose(grads[0], grads[1])
