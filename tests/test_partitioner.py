"""Partitioner: the planner as a partition_fn, and as Inductor's custom partitioner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from functorch.compile import aot_function, aot_module, make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

import fxckpt
from fxckpt import repro
from fxckpt.cli import main
from fxckpt.plans.graph_json import from_json
from fxckpt.policies import save_matmuls
from fxckpt.torch_private.inductor.default_partitioner import copied


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
    assert str(partitioner.report()).startswith("graph 1 of 1")


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


def test_report_says_what_a_backend_does_more() -> None:
    """Budgets over many graphs, Inductor's order, and graphs that torch's caches held."""
    model, x = Net(), torch.randn(512, 64)
    partitioner = fxckpt.Partitioner(budget=0.8)
    assert "torch's caches" in str(partitioner.report())
    for _ in range(2):
        torch._dynamo.reset()
        gradients(FACES["aot_autograd"](model, partitioner), model, x)
    told = str(partitioner.report())
    assert told.startswith("graph 1 of 2") and "for each graph alone" in told
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


def break_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let planning raise an error of a kind that nobody expects."""

    def broken(*args: object, **kwargs: object) -> object:
        raise IndexError("index -2 is out of bounds")

    monkeypatch.setattr("fxckpt.planner.planner.prepare", broken)
    monkeypatch.setattr("fxckpt.inductor.planner.prepare", broken)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_defect_ends_no_run_without_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inner: str
) -> None:
    """The graph takes torch's own partition, and one warning names the repro file."""
    monkeypatch.setenv("FXCKPT_STRICT", "0")
    break_planning(monkeypatch)
    model, x = Net(2), torch.randn(64, 64)
    expected = gradients(model, model, x)
    backend = fxckpt.Backend(inner=inner)
    with pytest.warns(UserWarning, match="torch's own partition") as told:
        found = gradients(torch.compile(model, backend=backend), model, x)
    if inner == "aot_eager":
        assert equal(found, expected)
    assert len([w for w in told if "torch's own partition" in str(w.message)]) == 1
    (fallback,) = backend.partitioner.fallbacks
    assert fallback.repro in str(backend.report()) and fallback.peak_bytes > 0
    written = repro.load(Path(fallback.repro))
    assert "index -2" in written.error and "aten.mm" in written.graph
    assert main(["doctor", fallback.repro]) == 3
    assert "the defect still shows" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(["doctor", fallback.repro]) == 0
    told = capsys.readouterr().out
    assert "index -2" in told and told.splitlines()[-1].startswith("Planned again by fxckpt")


def test_torchs_partition_of_a_random_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's partition replays the draws of a region; it runs op by op, with eager's bits."""
    monkeypatch.setenv("FXCKPT_STRICT", "0")
    break_planning(monkeypatch)
    model, x = Net(2), torch.randn(64, 64)

    def step(x: Tensor) -> Tensor:
        masked = torch.rand_like(x).bernoulli() * fxckpt.checkpoint(model, x)
        return fxckpt.checkpoint(lambda y: torch.bernoulli(y.sigmoid()) * y.cos(), masked).sum()

    expected = gradients(step, model, x)
    backend = fxckpt.Backend(inner="aot_eager")
    with pytest.warns(UserWarning, match="torch's own partition"):
        assert equal(gradients(torch.compile(step, backend=backend), model, x), expected)


@pytest.mark.parametrize("budget", [None, 0.9])
def test_plan_of_a_repro_is_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, budget: float | None
) -> None:
    """The graph of a repro file is planned as the graph was: views, dropout and checkpoint tags."""
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path))
    weight = torch.randn(16, 16, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        heads = (x @ weight).view(8, 4, 4).transpose(0, 1)
        return torch.nn.functional.dropout(heads.softmax(-1), 0.1).transpose(0, 1).reshape(8, 16)

    def step(x: Tensor) -> Tensor:
        x = fxckpt.checkpoint(block, x)
        return block(x.sin()).split([4, 12], dim=1)[1].sum()

    plan, again = planned_twice(step, budget)
    assert (again.saved, again.recomputed) == (plan.saved, plan.recomputed)
    assert again.peak_bytes == plan.peak_bytes


def test_repro_has_data_dependent_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A graph whose sizes depend on data is planned again from its file."""
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path))
    weight = torch.randn(16, 16, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        rows = (x @ weight).sin()
        return rows[x.sum(1) > 0].exp().sin().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        plan, again = planned_twice(step, None)
    assert (again.saved, again.recomputed) == (plan.saved, plan.recomputed)


class Keeping(fxckpt.Partitioner):
    """A partitioner that keeps the joint graph, and plans nothing."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **given: Any) -> Any:
        """Keep the graph and leave."""
        self.joint, self.count = copied(gm), given["num_fwd_outputs"]
        raise RuntimeError("the joint graph is known")


def random_region(x: Tensor, w: Tensor) -> Tensor:
    return fxckpt.checkpoint(lambda y: nn.functional.dropout(y.sin(), 0.3).cos() @ w, x)


def selected_rows(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin()[x.sum(1) > 0]


def one_of_two(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a: (a @ w).sin(), lambda a: (a @ w).cos(), (x,))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "config"),
    [
        (random_region, {"fallback_random": True}),
        (random_region, {}),
        (selected_rows, {}),
        (one_of_two, {}),
    ],
)
def test_repro_is_planned_again_for_inductor(
    function: Callable[..., Tensor],
    config: dict[str, bool],
    dynamic: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Random ops in a region, sizes that vary or depend on data, and branches."""
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    kept = Keeping()
    with (
        inductor_config.patch(custom_partitioner_fn=kept, **config),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        with pytest.raises(Exception, match="the joint graph is known"):
            torch.compile(function, fullgraph=True, dynamic=dynamic)(
                torch.randn(8, 16), torch.randn(16, 16, requires_grad=True)
            )
        path = repro.save(kept.joint, kept.count, "", ValueError(), settings={}, inner="inductor")
    assert main(["doctor", str(path)]) == 0
    assert "the graph is planned" in capsys.readouterr().out


def planned_twice(
    step: Callable[[Tensor], Tensor], budget: float | None
) -> tuple[fxckpt.Plan, fxckpt.Plan]:
    """Return the plan of a step, and that of its graph from a repro file."""
    joints: list[tuple[fx.GraphModule, int]] = []
    partitioner = fxckpt.Partitioner(budget=budget)

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **given: Any) -> Any:
        joints.append((copied(joint), num_fwd_outputs))
        return partitioner(joint, inputs, num_fwd_outputs=num_fwd_outputs, **given)

    backend = aot_autograd(fw_compiler=run, partition_fn=partition)
    torch._dynamo.reset()
    torch.compile(step, backend=backend, fullgraph=True)(torch.randn(8, 16)).backward()
    ((joint, count),) = joints
    path = repro.save(joint, count, "", ValueError(), settings={"budget": budget}, inner=None)
    found = repro.load(path)
    again = fxckpt.Partitioner(**found.settings).replan(
        found.joint(), num_fwd_outputs=found.num_fwd_outputs, inner=found.inner
    )
    (plan,) = partitioner.plans
    return plan, again


@pytest.mark.parametrize(
    "change, told",
    [
        ({"target": "ops.nowhere.op.default"}, "not registered here"),
        ({"target": "torch.load"}, "not registered here"),
        ({"target": "os.system"}, "not registered here"),
    ],
)
def test_repro_calls_registered_ops_alone(change: dict[str, str], told: str) -> None:
    """A file from elsewhere runs no Python function but those of sizes."""
    node = {"op": "call_function", "name": "a", "args": [], "kwargs": {"dict": []}, **change}
    with pytest.raises(fxckpt.InvalidOption, match=told):
        from_json([node])


def test_defect_under_a_budget_raises_unless_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's partition is taken only where its simulated peak is within the budget."""
    monkeypatch.setenv("FXCKPT_STRICT", "0")
    break_planning(monkeypatch)
    model, x = Net(2), torch.randn(64, 64)
    with pytest.warns(UserWarning, match="torch's own partition"):
        torch.compile(model, backend=fxckpt.Backend(budget="1GiB", inner="aot_eager"))(x)
    torch._dynamo.reset()
    with pytest.raises(fxckpt.PlanningFailed, match="defect"):
        torch.compile(model, backend=fxckpt.Backend(budget=0.5, inner="aot_eager"))(x)


def test_unwritable_repro_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder that cannot be written is said, and the step runs."""
    monkeypatch.setenv("FXCKPT_STRICT", "0")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path / "file"))
    break_planning(monkeypatch)
    model, x = Net(2), torch.randn(64, 64)
    with pytest.warns(UserWarning, match=r"not written \(.*policy|ignores the policy.*not written"):
        backend = fxckpt.Backend(inner="aot_eager", policy=save_matmuls)
        torch.compile(model, backend=backend)(x).backward()


def test_strict_makes_a_defect_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite runs so: nothing hides behind torch's partition."""
    break_planning(monkeypatch)
    with pytest.raises(fxckpt.PlanningFailed, match="IndexError"):
        torch.compile(Net(2), backend=fxckpt.Backend(inner="aot_eager"))(torch.randn(64, 64))


def test_repro_of_another_form_is_refused(tmp_path: Path) -> None:
    """A file that is no repro is one clear line."""
    path = tmp_path / "other.json"
    for text in ("{", json.dumps({"version": 99}), json.dumps([1])):
        path.write_text(text)
        with pytest.raises(fxckpt.InvalidOption, match="no repro file"):
            repro.load(path)
    with pytest.raises(fxckpt.InvalidOption, match="cannot read"):
        repro.load(tmp_path / "none.json")


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
    assert str(partitioner.report()) and plan.recomputed == ()


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
