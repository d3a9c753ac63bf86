"""Repro files: what a defect of the planner leaves, and how such a graph is planned again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import fxckpt
from fxckpt import repro
from fxckpt.cli import main
from fxckpt.plans.graph_json import from_json
from fxckpt.policies import save_matmuls
from fxckpt.torch_private.inductor.default_partitioner import copied
from tests.test_partitioner import Net, equal, gradients, run


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
    (warning,) = [str(w.message) for w in told if "torch's own partition" in str(w.message)]
    assert "To run" not in warning
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
