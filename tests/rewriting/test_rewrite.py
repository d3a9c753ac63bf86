"""The rewrite door: whatever the graph came from, the same step, within the plan."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import fxckpt
from fxckpt import policies
from fxckpt.planner.capture import capture_joint
from fxckpt.rewriting.export_guards import Guards
from fxckpt.torch_private import aot_autograd, boxed
from tests.models.zoo import ResNet
from tests.steps import differing, loss_of, outcome

WIDTH = 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 24, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(4, 24, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.drop = Attention(), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """GPT-2 as small as it gets, its loss inside; the head is tied to the embedding."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.wte(ids))).flatten(0, 1), ids.flatten())


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return GPT(), (torch.randint(0, 50, (4, 24)),)


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ResNet(8, 2), (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)))


def by_dynamo(
    model: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """What Dynamo hands to a backend: parameters and buffers are inputs as well."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        found.append((gm, tuple(example_inputs)))
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found[0]


ROUTES: dict[
    str, Callable[[nn.Module, tuple[Tensor, ...]], tuple[nn.Module, tuple[Tensor, ...]]]
] = {
    "module": lambda model, inputs: (model, inputs),
    "symbolic_trace": lambda model, inputs: (fx.symbolic_trace(model), inputs),
    "make_fx": lambda model, inputs: (make_fx(model)(*inputs), inputs),
    "export": lambda model, inputs: (torch.export.export(model, inputs).module(), inputs),
    "dynamo": by_dynamo,
}


@pytest.mark.parametrize(
    ("make", "options"),
    [(gpt, {"budget": 0.75}), (resnet, {"policy": policies.recompute_all})],
    ids=["gpt", "resnet"],
)
@pytest.mark.parametrize("route", ROUTES)
def test_the_step_is_the_same_by_every_route_and_its_peak_is_the_plan_s(
    make: Callable[[], Any], options: Any, route: str
) -> None:
    torch.manual_seed(0)
    source, inputs = ROUTES[route](*make())
    start = copy.deepcopy(source.state_dict())
    expected = outcome(source, source, copy.deepcopy(inputs))
    source.load_state_dict(start)
    source.zero_grad(set_to_none=True)
    made = fxckpt.rewrite(source, example_inputs=inputs, **options)
    given = copy.deepcopy(inputs)
    assert differing(expected, outcome(source, made, given)) == []
    (plan,) = made.plans
    assert plan.schedule
    assert plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes
    for tensor in (*source.parameters(), *given):
        tensor.grad = None
    measured = fxckpt.measure_peak(lambda: loss_of(made(*given)).backward())
    assert abs(measured - plan.peak_bytes) <= 0.01 * plan.peak_bytes


def test_the_backward_does_the_work_that_the_plan_says() -> None:
    def flops(model: nn.Module, x: Tensor) -> int:
        loss = model(x).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return int(counter.get_total_flops())

    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))),
        torch.randn(64, 16),
    )
    made = fxckpt.rewrite(fx.symbolic_trace(model), policies.recompute_all)
    made(x).sum().backward()
    assert flops(made, x) - flops(model, x) == made.plan.recompute_flops > 0


# What a rewritten module is.


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(2))
    )


SOURCES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "module": lambda model: model,
    "graph": fx.symbolic_trace,
}
either = pytest.mark.parametrize("of", SOURCES.values(), ids=SOURCES)


@either
def test_parameters_buffers_and_keys_are_those_of_the_source(
    of: Callable[[nn.Module], nn.Module],
) -> None:
    source = of(stack())
    made = fxckpt.rewrite(source)
    assert isinstance(made, fx.GraphModule)
    assert list(made.state_dict()) == list(source.state_dict())
    assert all(a is b for a, b in zip(made.parameters(), source.parameters(), strict=True))
    assert all(a is b for a, b in zip(made.buffers(), source.buffers(), strict=True))
    made.graph.lint()


@either
def test_what_happens_to_the_state_takes_effect(of: Callable[[nn.Module], nn.Module]) -> None:
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


@either
def test_without_gradients_the_forward_runs_as_it_is(of: Callable[[nn.Module], nn.Module]) -> None:
    made = fxckpt.rewrite(of(stack()), policies.recompute_all)
    with torch.no_grad():
        made(torch.randn(4, 8))
    made.requires_grad_(False)
    made(torch.randn(4, 8))
    assert made.plans == ()
    assert made.state_dict()["0.1.num_batches_tracked"] == 2


@either
def test_a_signature_is_planned_once(of: Callable[[nn.Module], nn.Module]) -> None:
    made = fxckpt.rewrite(of(stack()), policies.save_matmuls, example_inputs=(torch.randn(4, 8),))
    assert len(made.plans) == 1
    for size in (4, 5, 4, 6, 5):
        made(torch.randn(size, 8)).sum().backward()
    assert [row.shape[0] for plan in made.plans for row in plan.rows if row.name == "addmm"] == [
        4,
        5,
        6,
    ]
    assert made.eval()(torch.randn(4, 8)).requires_grad
    assert len(made.plans) == 4


@either
def test_a_copy_is_independent(of: Callable[[nn.Module], nn.Module]) -> None:
    x = torch.randn(4, 8)
    made = fxckpt.rewrite(of(stack()), policies.recompute_all, example_inputs=(x,))
    twin = copy.deepcopy(made)
    assert twin.plan == made.plan
    assert not any(a is b for a, b in zip(made.parameters(), twin.parameters(), strict=True))
    twin(x).sum().backward()
    assert all(p.grad is None for p in made.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    assert made.state_dict()["0.1.num_batches_tracked"] == 0
    assert twin.plans == made.plans


@pytest.mark.parametrize("route", ["module", "symbolic_trace", "make_fx", "export"])
def test_a_pickle_brings_its_plan(route: str) -> None:
    x = torch.randn(4, 8)
    source, _ = ROUTES[route](stack(), (x,))
    made = fxckpt.rewrite(source, policies.save_matmuls, example_inputs=(x,))
    again = pickle.loads(pickle.dumps(made))
    assert again.plan == made.plan
    expected, got = (outcome(m, m, (x,)) for m in (made, again))
    assert differing(expected, got) == []
    assert again.plans == made.plans
    assert again.forward_graph.code == made.forward_graph.code


@pytest.mark.parametrize(
    "copied",
    [lambda made: pickle.loads(pickle.dumps(made)), copy.deepcopy],
    ids=["pickle", "deepcopy"],
)
def test_the_input_checks_of_an_export_are_copied(copied: Callable[[Any], Any]) -> None:
    x, dims = torch.randn(4, 8), {"input": {0: torch.export.Dim("n", min=3, max=64)}}
    exported = torch.export.export(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (x,), dynamic_shapes=dims
    ).module()
    made = copied(copied(fxckpt.rewrite(exported, policies.recompute_all)))
    made(torch.randn(64, 8)).sum().backward()
    assert torch.equal(torch.compile(made, backend="eager", fullgraph=True)(x), exported(x))
    with pytest.raises(fxckpt.CaptureError, match=r"Guard failed: input.size\(\)\[0\] <= 64"):
        made(torch.randn(65, 8))
    with (
        torch.no_grad(),
        pytest.raises(AssertionError, match=r"Guard failed: input.size\(\)\[0\] >= 3"),
    ):
        made(torch.randn(2, 8))


def test_input_checks_made_by_another_python_are_refused() -> None:
    with pytest.raises(
        fxckpt.CaptureError, match=r"pickled under Python 3\.1(.|\n)*check_guards=False"
    ):
        Guards(b"", (3, 1)).load()


def twice(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 2 * out


def test_a_pickle_of_a_graph_keeps_its_hooks_and_attributes() -> None:
    made, x = (
        fxckpt.rewrite(fx.symbolic_trace(stack().eval()), policies.recompute_all),
        torch.randn(4, 8),
    )
    made.register_forward_hook(twice)
    made.get_submodule("0.0").register_forward_hook(twice)
    made.scale = 3.0
    again = pickle.loads(pickle.dumps(made))
    assert again.scale == 3.0
    assert torch.equal(again(x), made(x))


def test_a_pickle_is_read_in_a_new_process(tmp_path: Any) -> None:
    x = torch.randn(4, 8)
    made = fxckpt.rewrite(fx.symbolic_trace(stack()), policies.save("0"), example_inputs=(x,))
    torch.save((made, x), tmp_path / "made.pt")
    program = (
        "import torch, sys; m, x = torch.load(sys.argv[1], weights_only=False); torch.manual_seed(1); m(x).square().sum().backward();"
        "print(m.plan.digest, len(m.plans), sum(p.grad.sum().item() for p in m.parameters()));"
        "m(torch.randn(6, 8)); print(m.plan.rows[0].module)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "made.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    torch.manual_seed(1)
    made(x).square().sum().backward()
    total = sum(p.grad.sum().item() for p in made.parameters())
    assert run.stdout.split() == [made.plan.digest, "1", str(total), "0.0"]


def test_print_readable_names_what_is_saved_and_what_runs_again() -> None:
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
def test_torch_compile_goes_through_it(of: Callable[[nn.Module], nn.Module]) -> None:
    x = torch.randn(4, 8)
    expected = outcome(model := stack(), model, (x,))
    made = fxckpt.rewrite(of(stack()), policies.recompute_all)
    assert (
        differing(
            expected, outcome(made, torch.compile(made, backend="aot_eager", fullgraph=True), (x,))
        )
        == []
    )


def test_fx_takes_it_for_the_graph_that_it_is() -> None:
    x = torch.randn(4, 8)
    made = fxckpt.rewrite(fx.symbolic_trace(stack().eval()), policies.recompute_all)
    assert torch.equal(fx.Interpreter(made).run(x), made(x))
    assert torch.equal(fx.symbolic_trace(made)(x), made(x))


# Calls.


@dataclasses.dataclass
class Result:
    loss: Tensor
    parts: dict[str, Any]


class Odd(nn.Module):
    """Odd ways to call and to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, *more: Tensor, scale: float = 2.0, flag: bool = False, **named: Tensor
    ) -> Result:
        y = self.lin(x).sin() * scale
        for t in (*more, *named.values()):
            y = y + t
        return Result((y.cos() if flag else y).sum(), {"y": y, "list": [y.detach(), None, 3]})


def test_arguments_and_results_of_any_form() -> None:
    x, a, b = torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 8)
    model = Odd()
    made = fxckpt.rewrite(model, policies.recompute_all)
    for args, kwargs in (
        ((x,), {}),
        ((x, a), {"scale": 3.0}),
        ((x,), {"flag": True, "b": b}),
        ((x, a, b), {"named": a}),
    ):
        expected, got = model(*args, **kwargs), made(*args, **kwargs)
        assert isinstance(got, Result)
        assert torch.equal(got.loss, expected.loss)
        assert torch.equal(got.parts["y"], expected.parts["y"])
        assert got.parts["list"][1:] == [None, 3]
        grads = [torch.autograd.grad(r.loss, model.parameters()) for r in (expected, got)]
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_a_graph_that_answers_with_a_dataclass() -> None:
    def f(x: Tensor, scale: float = 2.0) -> Result:
        y = x.sin() * scale
        return Result(y.sum(), {"y": y})

    made = fxckpt.rewrite(fx.symbolic_trace(f), policies.recompute_all)
    x = torch.randn(3, requires_grad=True)
    for scale in (2.0, 3.0):
        result = made(x, scale)
        assert isinstance(result, Result)
        result.loss.backward()
        assert torch.equal(x.grad, scale * x.cos())
        x.grad = None
    assert len(made.plans) == 2


def test_inputs_that_are_one_tensor_are_not_taken_for_two() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        z = (x * 2).sin()
        y.mul_(3)
        return (z + y + x).sum()

    made = fxckpt.rewrite(fx.symbolic_trace(f), policies.recompute_all)
    for alias in (False, True, False):
        for run in (f, made):
            x = torch.ones(3, requires_grad=True)
            base = x * 1
            loss = run(base, base if alias else x.detach().clone())
            loss.backward()
            if run is f:
                expected = (loss, x.grad)
        assert torch.equal(loss, expected[0])
        assert torch.equal(x.grad, expected[1])


def test_functions_are_rewritten_and_their_parameters_found() -> None:
    w = torch.randn(8, 8, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return (x @ w).sin().cos().sum()

    x = torch.randn(4, 8)
    made = fxckpt.rewrite(f, policies.recompute_all)
    made(x).backward()
    (expected,) = torch.autograd.grad(f(x), w)
    assert torch.equal(w.grad, expected)
    assert {"mm", "sin"} <= set(made.plan.recomputed)


def test_a_method_s_module_is_its_child() -> None:
    class Net(nn.Sequential):
        def features(self, x: Tensor) -> Tensor:
            return F.dropout(self[1](self[0](x)), training=self.training)

    net, x = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 8)
    made = fxckpt.rewrite(net.features, policies.save("1"), example_inputs=(x,))
    made(x).sum().backward()
    assert "tanh" in made.plan.saved
    assert len(made.plans) == 1
    assert dict(made.named_parameters())["owner.0.weight"] is net[0].weight
    assert torch.equal(made.eval()(x), net.features(x))


def test_a_module_s_forward_is_the_module_and_a_function_in_c_is_a_function() -> None:
    model = stack()
    assert list(fxckpt.rewrite(model.forward).state_dict()) == list(model.state_dict())
    x = torch.randn(3, requires_grad=True)
    fxckpt.rewrite(torch.sin)(x).sum().backward()
    assert torch.equal(x.grad, x.cos())


# One module in two objects.


class Own(nn.Module):
    """A module with a state, a mode and a way to save itself that nn.Module knows nothing of."""

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


def test_attributes_and_methods_are_those_of_the_source() -> None:
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


def test_a_module_s_own_way_to_save_itself_is_kept() -> None:
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
def test_hooks_of_the_module_itself_take_effect(
    of: Callable[[nn.Module], nn.Module], change: Callable[[nn.Module], object]
) -> None:
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


def test_a_forward_that_hides_the_class_s_is_no_way_round_the_plan() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    model.forward = lambda x: F.linear(x, model.weight).sin()  # type: ignore[method-assign]
    made = fxckpt.rewrite(model, policies.recompute_all)
    made.forward(x).sum().backward()
    assert "mm" in made.plan.recomputed


def test_a_module_that_holds_itself_is_copied() -> None:
    made = fxckpt.rewrite(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), policies.recompute_all)
    made.parts = [made, made.get_submodule("0")]
    twin = copy.deepcopy(made)
    assert twin.parts[0] is twin
    assert twin.parts[1] is twin.get_submodule("0")


@either
def test_torch_s_other_ways_to_run_or_clean_a_graph(of: Callable[[nn.Module], nn.Module]) -> None:
    made, x = fxckpt.rewrite(of(stack().eval()), policies.recompute_all), torch.randn(4, 8)
    expected = made(x)
    made.delete_all_unused_submodules()
    assert torch.equal(torch.export.export(made, (x,)).module()(x), expected)
    made.compile(backend="aot_eager")
    assert torch.equal(made(x), expected)


def test_a_module_that_is_called_twice_has_one_path() -> None:
    lin = nn.Linear(4, 4)
    model, x = nn.Sequential(lin, nn.Tanh(), lin, nn.Tanh()), torch.randn(2, 4)
    for made in (
        fxckpt.rewrite(model, policies.save("1"), example_inputs=(x,)),
        fxckpt.rewrite(model, policies.save("1")),
    ):
        made(x).sum().backward()
        assert "tanh" in made.plan.saved


# Changes after a plan was made.


def exchange(m: nn.Module) -> None:
    setattr(m, "1", nn.ReLU())


def edit(m: nn.Module) -> None:
    if isinstance(m, fx.GraphModule):
        m.graph.find_nodes(op="call_module", target="1")[0].replace_all_uses_with(
            m.graph.find_nodes(op="call_module", target="0")[0]
        )
        m.recompile()


@pytest.mark.parametrize(
    "change",
    [
        exchange,
        edit,
        lambda m: setattr(m.get_submodule("1"), "p", 0.0),
        lambda m: m.get_submodule("1").eval(),
        lambda m: m.get_submodule("0").register_forward_hook(lambda module, args, out: 3 * out),
        lambda m: m.get_submodule("0").register_forward_pre_hook(
            lambda module, args: (2 * args[0],)
        ),
    ],
    ids=["another submodule", "another graph", "an attribute", "a mode", "a hook", "a pre-hook"],
)
@either
def test_what_changes_in_the_source_is_seen(
    of: Callable[[nn.Module], nn.Module], change: Callable[[nn.Module], object]
) -> None:
    source, x = (
        of(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))),
        torch.randn(4, 8),
    )
    made = fxckpt.rewrite(source, policies.recompute_all)
    for _ in range(2):
        torch.manual_seed(0)
        expected = source(x)
        torch.manual_seed(0)
        assert torch.equal(made(x), expected)
        change(source)


def test_what_nobody_reads_is_no_reason_to_trace_again() -> None:
    source, x = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), torch.randn(4, 8)
    source.get_submodule("0").register_forward_hook(
        lambda module, args, out: setattr(module, "seen", out)
    )
    made = fxckpt.rewrite(source)
    made(x)
    seen = source.get_submodule("0").seen
    made.steps = 1
    made(x)
    assert source.get_submodule("0").seen is seen


@either
def test_threads_may_call_it_first_at_the_same_time(of: Callable[[nn.Module], nn.Module]) -> None:
    source, x = of(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))), torch.randn(4, 8)
    made = fxckpt.rewrite(source, policies.recompute_all)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(made, [x] * 8))
    assert all(torch.equal(result, source(x)) for result in results)
    assert len(made.plans) == 1


def test_copies_of_dynamo_s_graphs_are_rewritten_too() -> None:
    graph, inputs = by_dynamo(stack().eval(), (torch.randn(4, 8),))
    expected = graph(*inputs)[0]
    for source in (copy.deepcopy(graph), (graph.recompile(), graph)[1]):
        made = fxckpt.rewrite(source, policies.recompute_all)
        for module in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert torch.equal(module(*inputs)[0], expected)


def test_shapes_are_read_from_a_graph_that_knows_them() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    assert fxckpt.rewrite(make_fx(model)(x), policies.recompute_all).plan.recomputed == ("addmm",)
    dims = {"input": {0: torch.export.Dim("n", max=64)}}
    exported = torch.export.export(model, (x,), dynamic_shapes=dims).module()
    assert fxckpt.rewrite(exported, policies.recompute_all).plan.rows[0].shape == (64, 8)
    assert fxckpt.rewrite(fx.symbolic_trace(model)).plans == ()


def test_an_inner_compiler_gets_both_halves() -> None:
    halves: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        halves.append(gm)
        return gm.forward

    made = fxckpt.rewrite(
        fx.symbolic_trace(stack()),
        policies.save_matmuls,
        inner=inner,
        example_inputs=(torch.randn(4, 8),),
    )
    made(torch.randn(4, 8)).sum().backward()
    assert len(halves) == 2


# Plans.


def test_rewriting_again_changes_nothing() -> None:
    x = torch.randn(4, 8)
    made = fxckpt.rewrite(fx.symbolic_trace(stack()), policies.save_matmuls, example_inputs=(x,))
    assert fxckpt.rewrite(made) is made
    assert fxckpt.rewrite(made, policies.save_matmuls, example_inputs=(x,)).plan == made.plan
    twice = fxckpt.rewrite(
        fxckpt.rewrite(made, made.plan, example_inputs=(x,)), made.plan, example_inputs=(x,)
    )
    assert twice.plan == made.plan
    assert twice.forward_graph.code == made.forward_graph.code


@either
def test_a_stored_plan_is_applied_as_it_is(of: Callable[[nn.Module], nn.Module]) -> None:
    x = torch.randn(4, 8)
    plan = fxckpt.rewrite(of(stack()), policies.save_matmuls, example_inputs=(x,)).plan
    stored = fxckpt.Plan.from_json(plan.to_json())
    assert stored == plan
    assert stored.digest == plan.digest
    made = fxckpt.rewrite(of(stack()), stored)
    made(x).sum().backward()
    assert made.plan == plan
    with pytest.raises(fxckpt.PlanMismatch, match=r"float32\[4, 8\](.|\n)*float32\[5, 8\]"):
        made(torch.randn(5, 8))
    with pytest.raises(fxckpt.InvalidOption, match="a plan is applied as it is"):
        fxckpt.rewrite(of(stack()), stored, budget=0.5)


def test_a_plan_of_the_compile_door_fits_the_rewrite_door() -> None:
    x = torch.randn(4, 8)
    plan = fxckpt.plan(stack(), x, policy=policies.save_matmuls)
    made = fxckpt.rewrite(stack(), plan, example_inputs=(x,))
    assert made.plan == plan
    backend = fxckpt.Backend(policy=plan, inner="aot_eager")
    torch.compile(stack(), backend=backend)(x)
    assert backend.plans == (plan,)


@pytest.mark.parametrize("make", [gpt, resnet])
def test_a_plan_moves_from_one_way_of_capture_to_another(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    plan = fxckpt.plan(model, *inputs, budget=0.8)
    for route in ("symbolic_trace", "export", "dynamo"):
        source, given = ROUTES[route](model, inputs)
        made = fxckpt.rewrite(source, fxckpt.Plan.from_json(plan.to_json()), example_inputs=given)
        assert made.plan == plan
        loss_of(made(*given)).backward()
        for tensor in (*model.parameters(), *source.parameters(), *given):
            tensor.grad = None
        assert (
            fxckpt.measure_peak(lambda made=made, given=given: loss_of(made(*given)).backward())
            == plan.peak_bytes
        )
        own = fxckpt.rewrite(source, budget=0.8, example_inputs=given).plan
        assert own.digest == plan.digest


def test_graphs_that_differ_in_more_than_the_order_of_inputs_stay_two() -> None:
    def of(f: Callable[..., Tensor]) -> str:
        return fxckpt.plan(f, *(torch.randn(3, 3, requires_grad=True) for _ in range(2))).digest

    assert of(lambda x, y: (x @ y).sin().sum()) == of(lambda x, y: (y @ x).sin().sum())
    assert of(lambda x, y: (x @ y + x).sin().sum()) != of(lambda x, y: (x @ y + y).sin().sum())
    assert of(lambda x, y: (x @ y).sin().sum()) != of(
        lambda x, y: (x @ x).sin().sum() + 0 * y.sum()
    )


def test_a_stored_plan_is_compared_as_any_other() -> None:
    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU())
    one, other = (
        fxckpt.plan(model, x, policy=policy)
        for policy in (policies.save_all, policies.recompute_all)
    )
    stored = fxckpt.Plan.from_json(one.to_json())
    expected = str(one.diff(other))
    assert "recomputed" in expected
    assert str(stored.diff(other)) == expected
    assert "recomputed" in str(stored.diff(fxckpt.Plan.from_json(other.to_json())))
    with pytest.raises(fxckpt.InvalidOption, match="different graphs"):
        stored.diff(fxckpt.plan(model, x[:2]))


def test_a_plan_written_before_there_was_a_field_says_its_default() -> None:
    plan = fxckpt.plan(stack(), torch.randn(4, 8))
    figures = {
        name: value
        for name, value in json.loads(plan.to_json()).items()
        if name not in ("form", "checksum", "lets_go")
    }
    digest = hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()
    older = {"form": "fxckpt plan 1", "checksum": digest[:16], **figures}
    assert fxckpt.Plan.from_json(json.dumps(older)) == plan
    with pytest.raises(fxckpt.InvalidPlan, match="'rows'"):
        fxckpt.Plan.from_json(
            json.dumps({name: value for name, value in older.items() if name != "rows"})
        )


def test_a_text_that_is_no_plan_is_refused() -> None:
    text = fxckpt.plan(stack(), torch.randn(4, 8)).to_json()
    for wrong, says in (
        ("{", "not JSON"),
        ("[]", "of form None"),
        (text.replace("fxckpt plan 1", "fxckpt plan 0"), "reads 'fxckpt plan 1'"),
        (text.replace('"saved_bytes"', '"spared_bytes"'), "spared_bytes"),
        (text.replace('"decision": "saved"', '"decision": "lost"'), "lost"),
        (text.replace('"runs": 0', '"runs": 1', 1), "changed since it was written"),
        (text.replace('"saved_bytes": ', '"saved_bytes": 1', 1), "changed since it was written"),
        (text.replace('"saved": [', '"saved": ["other", ', 1), "changed since it was written"),
    ):
        with pytest.raises(fxckpt.InvalidPlan, match=says):
            fxckpt.Plan.from_json(wrong)


def test_a_plan_that_was_changed_by_hand_is_refused() -> None:
    x = torch.randn(4, 8)
    plan = fxckpt.rewrite(
        fx.symbolic_trace(stack()), policies.recompute_all, example_inputs=(x,)
    ).plan
    for schedule in (
        (fxckpt.Recompute("nothing", "output"),),
        (fxckpt.Recompute("addmm", "nowhere"),),
    ):
        with pytest.raises(fxckpt.InvalidPlan, match="changed by hand"):
            fxckpt.rewrite(
                fx.symbolic_trace(stack()),
                dataclasses.replace(plan, schedule=schedule),
                example_inputs=(x,),
            )
    with pytest.raises(fxckpt.VerifyError, match="which the plan does not save"):
        fxckpt.rewrite(
            fx.symbolic_trace(stack()),
            dataclasses.replace(plan, schedule=plan.schedule[1:], saved=()),
            example_inputs=(x,),
        )


# Errors.


def test_what_cannot_be_rewritten_is_named() -> None:
    with pytest.raises(fxckpt.CaptureError, match="nothing to plan"):
        fxckpt.rewrite(lambda x: x.argmax(), example_inputs=(torch.ones(3, requires_grad=True),))
    slotted = type("Slotted", (nn.Linear,), {"__slots__": ("scale",)})
    for wrong, says in (
        (3, "int is nothing to rewrite"),
        (GPT, r"an instance: rewrite\(Model\(\)\)"),
        (nn.ModuleList([nn.Linear(2, 2)]), "a ModuleList has no forward"),
        (nn.LazyLinear(2), "no shapes before its first call"),
        (slotted(2, 2), "keeps attributes in __slots__"),
    ):
        with pytest.raises(fxckpt.InvalidOption, match=says):
            fxckpt.rewrite(wrong)  # type: ignore[arg-type]
    with pytest.raises(fxckpt.CaptureError, match="module '0' is an LSTM"):
        fxckpt.rewrite(
            fx.symbolic_trace(nn.Sequential(nn.LSTM(2, 2))), example_inputs=(torch.randn(3, 2),)
        )
    with pytest.raises(
        fxckpt.InvalidOption, match=r"example_inputs do not fit: too many positional arguments"
    ):
        fxckpt.rewrite(fx.symbolic_trace(stack()), example_inputs=(torch.randn(4, 8), 3))
    with pytest.raises(fxckpt.CaptureError, match="the module does not run on these inputs"):
        fxckpt.rewrite(fx.symbolic_trace(stack()), example_inputs=(torch.randn(4, 7),))
    with pytest.raises(
        fxckpt.CaptureError, match="the model does not run on these inputs: RuntimeError"
    ):
        fxckpt.rewrite(stack(), example_inputs=(torch.randn(4, 7),))
    with pytest.raises(fxckpt.CaptureError, match="nothing was planned yet"):
        fxckpt.rewrite(stack()).plan  # noqa: B018
    with pytest.raises(fxckpt.BudgetInfeasible) as info:
        fxckpt.rewrite(fx.symbolic_trace(stack()), example_inputs=(torch.randn(4, 8),), budget=64)
    assert info.value.floor_bytes > 64


def test_a_module_that_breaks_the_graph_is_refused() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if x.sum() > 0 else x.cos()

    with pytest.raises(fxckpt.CaptureError, match="one graph"):
        fxckpt.rewrite(Breaks())(torch.randn(3, requires_grad=True))


# Joint graphs.


def test_a_joint_graph_gets_explicit_recompute() -> None:
    model, x = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU()),
        torch.randn(4, 8),
    )
    joint = capture_joint(model, (x,), {}).module
    before = joint.code
    made = fxckpt.rewrite(joint, policies.recompute_all)
    assert joint.code == before
    assert made.plan.recomputed == ("addmm", "tanh", "addmm_1")
    values = [torch.randn(n.meta["val"].shape) for n in joint.graph.find_nodes(op="placeholder")]
    expected, got = (pytree.tree_leaves(gm(values[:-1], values[-1:])) for gm in (joint, made))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True) if a is not None)
    assert sum(n.target is torch.ops.aten.addmm.default for n in made.graph.nodes) == 4
    assert fxckpt.rewrite(made) is made
    assert fxckpt.rewrite(made, made.plan).code == made.code
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (twin.code, twin.plan, twin.forward_graph.code) == (
            made.code,
            made.plan,
            made.forward_graph.code,
        )


def test_a_joint_graph_s_halves_are_a_partition_for_aot_autograd() -> None:
    model, x = GPT(2), torch.randint(0, 50, (4, 24))
    expected = outcome(model, model, (x,))
    model.zero_grad(set_to_none=True)
    plans = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, **_: Any) -> Any:
        made = fxckpt.rewrite(joint, policies.save_matmuls)
        plans.append(made.plan)
        return made.forward_graph, made.backward_graph

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=boxed, partition_fn=partition))
    assert differing(expected, outcome(model, compiled, (x,))) == []
    assert plans[0].recomputed


def test_a_joint_graph_whose_gradients_do_not_match_its_inputs_is_refused() -> None:
    graph = fx.Graph()
    primals = [graph.placeholder(f"primals_{i}") for i in range(3)]
    graph.placeholder("tangents_1")
    graph.output([primals[0]])
    with pytest.raises(fxckpt.CaptureError, match="3 primals and 1 outputs"):
        fxckpt.rewrite(fx.GraphModule(nn.Module(), graph))
