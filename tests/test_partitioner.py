"""Partitioner: the planner as a partition_fn, and as Inductor's custom partitioner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._inductor.config as inductor_config
from functorch.compile import aot_function, aot_module, aot_module_simplified, make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

import fxckpt
from fxckpt.policies import save_matmuls


class Net(nn.Module):
    """Layers with a dropout, so that a recompute of random ops without their state shows."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(nn.functional.gelu(layer(x)), 0.2)
        return x.square().mean()


def run(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Return the graph as a compiled function."""
    return make_boxed_func(gm.forward)


def gradients(step: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the loss and the gradients of one step from a fixed seed."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = step(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether two lists of tensors are bitwise equal."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


FACES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "aot_module": lambda model, p: aot_module(model, fw_compiler=run, partition_fn=p),
    "aot_autograd": lambda model, p: torch.compile(
        model, backend=aot_autograd(fw_compiler=run, partition_fn=p)
    ),
    "aot_module_simplified": lambda model, p: torch.compile(
        model,
        backend=lambda gm, inputs: aot_module_simplified(
            gm, inputs, fw_compiler=run, partition_fn=p
        ),
    ),
}


@pytest.mark.parametrize("budget", [None, 0.8])
@pytest.mark.parametrize("face", FACES)
def test_partition_fn_keeps_gradients_and_budget(face: str, budget: float | None) -> None:
    """Every entry of functorch that takes a partition_fn gets a plan and the same gradients."""
    model, x = Net(), torch.randn(512, 64)
    expected = gradients(model, model, x)
    partitioner = fxckpt.Partitioner(budget=budget)
    assert equal(gradients(FACES[face](model, partitioner), model, x), expected)
    (plan,) = partitioner.plans
    assert plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes
    assert str(partitioner.report()).startswith("peak ")


def test_partition_fn_plans_as_the_backend() -> None:
    """The two make one plan of one joint graph: there is one mechanism."""
    model, x = Net(), torch.randn(512, 64)
    backend, partitioner = fxckpt.Backend(budget=0.8, inner="aot_eager"), fxckpt.Partitioner(0.8)
    partitioner.expect_ops()  # The backend knows that its halves are run op by op.
    gradients(torch.compile(model, backend=backend), model, x)
    torch._dynamo.reset()
    gradients(FACES["aot_autograd"](model, partitioner), model, x)
    assert [p.digest for p in partitioner.plans] == [p.digest for p in backend.plans]


def test_inductor_takes_it_from_its_configuration() -> None:
    """One line plans whatever Inductor compiles, within the budget."""
    model, x = Net(), torch.randn(512, 64)
    partitioner = fxckpt.Partitioner(budget=0.8)
    with inductor_config.patch(custom_partitioner_fn=None):
        expected = gradients(torch.compile(model), model, x)
    torch._dynamo.reset()
    # A graph that another process compiled with these options comes from torch's cache, unplanned.
    with inductor_config.patch(custom_partitioner_fn=partitioner), fresh_cache():
        found = gradients(torch.compile(model), model, x)
    assert all(map(torch.allclose, found, expected))
    (plan,) = partitioner.plans
    assert plan.compiled_peak_bytes is not None and plan.budget_bytes is not None
    assert plan.compiled_peak_bytes <= plan.budget_bytes


def test_a_rank_alone_is_not_refused() -> None:
    """An error on the one rank that compiles some sizes would leave the others waiting."""
    model, x = Net(), torch.randn(512, 64)
    partitioner = fxckpt.Partitioner(budget="1KiB")
    expected = gradients(model, model, x)
    with pytest.raises(fxckpt.BudgetInfeasible):
        gradients(FACES["aot_autograd"](model, partitioner), model, x)
    torch._dynamo.reset()
    partitioner.join(cast(Any, "a group"))
    with pytest.warns(UserWarning, match="This rank alone compiles"):
        found = gradients(FACES["aot_autograd"](model, partitioner), model, x)
    assert equal(found, expected)
    (plan,) = partitioner.plans
    assert plan.peak_bytes == plan.floor_bytes


def test_report_says_what_a_backend_does_more() -> None:
    """Budgets over many graphs, Inductor's order, and graphs that torch's caches held."""
    model, x = Net(), torch.randn(512, 64)
    partitioner = fxckpt.Partitioner(budget=0.8)
    assert "torch's caches" in str(partitioner.report())
    for _ in range(2):
        torch._dynamo.reset()
        gradients(FACES["aot_autograd"](model, partitioner), model, x)
    told = str(partitioner.report())
    assert told.startswith("  plan    graph") and "for each graph alone" in told
    assert "scope='step'" not in told and "Inductor orders" not in told
    with inductor_config.patch(custom_partitioner_fn=partitioner), fresh_cache():
        torch._dynamo.reset()
        torch.compile(model)(x)
    assert "Inductor orders the ops" in str(partitioner.report())


def test_infeasible_budget_raises_from_every_face() -> None:
    """The error is fxckpt's own, whoever called the partitioner."""
    model, x = Net(), torch.randn(512, 64)
    for face in FACES.values():
        with pytest.raises(fxckpt.BudgetInfeasible, match="at least"):
            gradients(face(model, fxckpt.Partitioner(budget=1)), model, x)
    with (
        inductor_config.patch(custom_partitioner_fn=fxckpt.Partitioner(budget=1)),
        pytest.raises(fxckpt.BudgetInfeasible),
    ):
        torch.compile(model)(x)


def test_uuid_tells_options_apart() -> None:
    """Caches are keyed by the options, and left out where a function is among them."""
    keys = [fxckpt.Partitioner(**options).uuid() for options in ({}, {"budget": 0.5})]
    keys.append(fxckpt.Partitioner(policy=save_matmuls).uuid())
    assert len(set(keys)) == 3 and None not in keys
    assert fxckpt.Partitioner(budget=0.5).uuid() == keys[1]
    assert fxckpt.Partitioner(policy=lambda ctx, op, *args, **kwargs: True).uuid() is None
    assert fxckpt.Partitioner(policy=save_matmuls | (lambda *a, **k: None)).uuid() is None
    assert fxckpt.Partitioner(budget="auto").uuid() is None


def test_uuid_knows_registered_ops() -> None:
    """Code that recomputes an op must not be found where nothing allows it."""

    @torch.library.custom_op("uuid::triple", mutates_args=())
    def triple(x: Tensor) -> Tensor:
        return 3 * x

    before = fxckpt.Partitioner().uuid()
    fxckpt.register_op(triple, recompute=True, flops=lambda x: x.numel())
    with_flops = fxckpt.Partitioner().uuid()
    assert with_flops == fxckpt.Partitioner().uuid() and None not in (before, with_flops)
    factor = 2
    fxckpt.register_op(triple, recompute=True, flops=lambda x: factor * x.numel())
    assert fxckpt.Partitioner().uuid() is None, "a closure counts what its code does not tell"
    fxckpt.register_op(triple, recompute=True, flops=1)
    assert len({before, with_flops, fxckpt.Partitioner().uuid()}) == 3


def test_cache_knows_what_the_policy_names() -> None:
    """One graph of modules with other names is another one for a policy of names."""
    x, saved = torch.randn(256, 32), []
    with fresh_cache():
        for names in (("one", "two"), ("two", "one"), ("one", "two")):
            torch._dynamo.reset()
            layers = [
                (f"linear{i}", nn.Linear(32, 32)) if i % 2 == 0 else (names[i // 2], nn.GELU())
                for i in range(5)
            ]
            partitioner = fxckpt.Partitioner(policy=fxckpt.policies.recompute("one"))
            with inductor_config.patch(custom_partitioner_fn=partitioner):
                torch.compile(nn.Sequential(OrderedDict(layers)))(x).sum().backward()
            saved.append([plan.saved for plan in partitioner.plans])
    assert saved[0] and saved[1] and saved[0] != saved[1]
    assert not saved[2], "the code of the first one is found again"


def test_second_process_hits_torchs_caches(tmp_path: Path) -> None:
    """Equal options hit AOTAutograd's cache in another process; another budget misses."""
    code = (
        "import sys, torch, fxckpt, torch._inductor.config as config\n"
        "from torch._dynamo.utils import counters\n"
        "for budget in sys.argv[1:]:\n"
        "    torch._dynamo.reset(), counters.clear(), torch.manual_seed(0)\n"
        "    config.custom_partitioner_fn = fxckpt.Partitioner(budget=float(budget))\n"
        "    layers = [m for _ in range(2) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]\n"
        "    model = torch.nn.Sequential(*layers)\n"
        "    torch.compile(model)(torch.randn(512, 64)).sum().backward()\n"
        "    found = counters['aot_autograd']\n"
        "    print(found['autograd_cache_hit'], found['autograd_cache_miss'])\n"
    )

    def counts(*budgets: str) -> list[str]:
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        }
        command = [sys.executable, "-c", code, *budgets]
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    assert counts("0.9") == ["0 1"]
    assert counts("0.9", "0.8") == ["1 0", "0 1"]


def printing(x: Tensor, weight: Tensor, held: Tensor) -> Any:
    torch.ops.aten._print("between")
    return (x @ weight).sin(), held


def writing(x: Tensor, weight: Tensor, held: Tensor) -> Any:
    held.mul_(2).add_((x @ weight).detach())
    return ((x @ weight) * held).sin()


def writing_with_gradient(x: Tensor, weight: Tensor, held: Tensor) -> Any:
    held.add_(x @ weight)
    return held.sin()


def selecting(x: Tensor, weight: Tensor, held: Tensor) -> Any:
    rows = (x.sum(1) > 0).nonzero().flatten()
    torch._check(rows.shape[0] <= 64)
    return (x @ weight).sin()[rows].exp()


def without_gradient(x: Tensor, weight: Tensor, held: Tensor) -> Any:
    held.add_(1)
    return (x @ weight).argmax(1), None


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function",
    [printing, writing, writing_with_gradient, selecting, without_gradient],
    ids=lambda f: f.__name__,
)
def test_effects_writes_and_sizes_are_taken(
    function: Callable[..., Any], dynamic: bool | None
) -> None:
    """What AOTAutograd hands over beside the graph: tokens, written inputs, sizes, no tangents."""

    def outcome(step: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        x, held = torch.randn(8, 8), torch.ones(8, 8)
        weight = torch.randn(8, 8, requires_grad=True)
        result, *_ = leaves = torch.utils._pytree.tree_leaves(step(x, weight, held))
        if result.requires_grad:
            result.square().sum().backward()
        found = (*leaves, held, weight.grad)
        return [t.detach() for t in found if t is not None]

    for budget in (None, "1GiB"):
        torch._dynamo.reset()
        partitioner = fxckpt.Partitioner(budget)
        backend = aot_autograd(fw_compiler=run, partition_fn=partitioner)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
            assert equal(outcome(compiled), outcome(function))
        assert len(partitioner.plans) == (function is not without_gradient)


@pytest.mark.parametrize("budget", [None, "min", 1.0])
def test_joint_graph_without_tangents(budget: Any) -> None:
    """Gradients of a loss that is inside the graph need none: both halves give those of eager."""

    def step(primals_1: Tensor, primals_2: Tensor) -> list[Tensor]:
        loss = ((primals_1 @ primals_2).sin() @ primals_2).sin().square().sum()
        return [loss, *torch.autograd.grad(loss, (primals_1, primals_2))]

    given = torch.randn(8, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    joint = make_fx(step, tracing_mode="fake")(*given)
    assert not any("tangents" in str(node.target) for node in joint.graph.nodes)
    partitioner = fxckpt.Partitioner(budget=budget)
    forward, backward = partitioner(joint, given, num_fwd_outputs=1)
    loss, *saved = forward(*given)
    assert equal([loss, *backward(*saved)], step(*given))
    (plan,) = partitioner.plans
    assert str(partitioner.report()) and bool(plan.recomputed) == (budget == "min")


def test_wrong_arguments_are_named() -> None:
    """Options are checked when the partitioner is made."""
    with pytest.raises(fxckpt.InvalidOption, match="verify"):
        fxckpt.Partitioner(verify="twice")
    with pytest.raises(fxckpt.InvalidBudget):
        fxckpt.Partitioner(budget="lots")


def test_outputs_that_alias_inputs_and_unused_outputs() -> None:
    """What AOTAutograd hands over beside the graph is taken: aliases, mutation, no tangents."""

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).sin()
        return y, x.view(-1), y.detach(), torch.ones(3)

    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    compiled = aot_function(step, fw_compiler=run, partition_fn=fxckpt.Partitioner(budget=1.0))
    found, expected = compiled(x, w), step(x, w)
    assert all(map(torch.equal, found, expected))
    assert found[1].data_ptr() == x.data_ptr()
    (gradient,) = torch.autograd.grad(found[0].sum(), w)
    assert torch.equal(gradient, torch.autograd.grad(expected[0].sum(), w)[0])


def test_ops_are_priced_on_a_named_device() -> None:
    """A plan made here has the times of a device elsewhere, with its name in the caches' key."""
    x, model = torch.randn(64, 64), Net(2)
    rates: dict[str, float] = {}
    for name in ("H100", "A100"):
        torch._dynamo.reset()
        partitioner = fxckpt.Partitioner(policy=fxckpt.policies.recompute_all, device=name)
        compiler = aot_autograd(fw_compiler=run, partition_fn=partitioner)
        torch.compile(model, backend=compiler)(x).sum().backward()
        (plan,) = partitioner.plans
        rates[name] = plan.extra_seconds
        assert f"device='{name}'" in repr(partitioner)
    assert rates["H100"] < rates["A100"]
    keys = {fxckpt.Partitioner(device=name).uuid() for name in ("H100", "A100", None)}
    assert len(keys) == 3
    with pytest.raises(fxckpt.InvalidOption, match="device='H1000' is not a device"):
        fxckpt.Partitioner(device="H1000")
