"""Copies and pickles of rewritten modules, with their plans, hooks and input checks."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxckpt
from fxckpt import policies
from fxckpt.rewriting.export_guards import Guards
from tests.rewriting.sources import ROUTES, by_dynamo, either, stack
from tests.steps import differing, outcome


@either
def test_copy_is_independent(of: Callable[[nn.Module], nn.Module]) -> None:
    """A deep copy has its own state and the same plan."""
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
def test_pickle_keeps_plan(route: str) -> None:
    """An unpickled module has the plan, the step and the graphs of the original."""
    x = torch.randn(4, 8)
    source, _ = ROUTES[route](stack(), (x,))
    made = fxckpt.rewrite(source, policies.save_matmuls, example_inputs=(x,))
    unpickled = pickle.loads(pickle.dumps(made))
    assert unpickled.plan == made.plan
    expected, got = (outcome(m, m, (x,)) for m in (made, unpickled))
    assert differing(expected, got) == []
    assert unpickled.plans == made.plans
    assert unpickled.forward_graph.code == made.forward_graph.code


@pytest.mark.parametrize(
    "copied",
    [lambda made: pickle.loads(pickle.dumps(made)), copy.deepcopy],
    ids=["pickle", "deepcopy"],
)
def test_export_input_checks_are_copied(copied: Callable[[Any], Any]) -> None:
    """Copies of copies of an exported graph still check their inputs."""
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


def test_guards_of_another_python_are_refused() -> None:
    """Input checks pickled by another version of Python raise CaptureError."""
    with pytest.raises(
        fxckpt.CaptureError, match=r"pickled under Python 3\.1(.|\n)*check_guards=False"
    ):
        Guards(b"", (3, 1)).load()


def twice(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 2 * out


def test_graph_pickle_keeps_hooks_and_attributes() -> None:
    """An unpickled graph has its hooks and attributes."""
    made, x = (
        fxckpt.rewrite(fx.symbolic_trace(stack().eval()), policies.recompute_all),
        torch.randn(4, 8),
    )
    made.register_forward_hook(twice)
    made.get_submodule("0.0").register_forward_hook(twice)
    made.scale = 3.0
    unpickled = pickle.loads(pickle.dumps(made))
    assert unpickled.scale == 3.0
    assert torch.equal(unpickled(x), made(x))


def test_pickle_loads_in_new_process(tmp_path: Any) -> None:
    """A module loaded in a new process follows its plan without planning."""
    x = torch.randn(4, 8)
    made = fxckpt.rewrite(fx.symbolic_trace(stack()), policies.save("0"), example_inputs=(x,))
    torch.save((made, x), tmp_path / "made.pt")
    program = (
        "import torch, sys; torch.set_num_threads(2);"
        "m, x = torch.load(sys.argv[1], weights_only=False);"
        "torch.manual_seed(1); m(x).square().sum().backward();"
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


def test_self_referencing_module_is_copied() -> None:
    """A module among its own attributes is copied once."""
    made = fxckpt.rewrite(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), policies.recompute_all)
    made.parts = [made, made.get_submodule("0")]
    twin = copy.deepcopy(made)
    assert twin.parts[0] is twin
    assert twin.parts[1] is twin.get_submodule("0")


def test_copied_dynamo_graphs_are_rewritten() -> None:
    """Copied and recompiled graphs of Dynamo can be rewritten, copied and pickled."""
    graph, inputs = by_dynamo(stack().eval(), (torch.randn(4, 8),))
    expected = graph(*inputs)[0]
    for source in (copy.deepcopy(graph), (graph.recompile(), graph)[1]):
        made = fxckpt.rewrite(source, policies.recompute_all)
        for module in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert torch.equal(module(*inputs)[0], expected)
