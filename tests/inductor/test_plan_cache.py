"""Plan cache: plans are found by all that they depend on, and by nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.costs.models import FlopCost
from fxckpt.inductor.plan_cache import PlanCache, key_of
from fxckpt.passes.analysis.fingerprint import fingerprint
from fxckpt.planner.planner import Planner
from fxckpt.policies import save_ops
from fxckpt.torch_private.inductor.lowering import Lowerings
from tests.joints import inductor_joint, plain_joint


class Net(nn.Module):
    """Three layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanCache:
    """A cache of the test's own, which backends use too."""
    found = PlanCache(tmp_path / "plans")
    monkeypatch.setattr(PlanCache, "beside_inductor", lambda: found)
    return found


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that grows with each half that is lowered ahead of its compile."""
    calls: list[bool] = []
    lower = Lowerings.lower

    def counted(self: Lowerings, half: Any, donated: Any, strides: Any) -> Any:
        calls.append(donated is not None)
        return lower(self, half, donated, strides)

    monkeypatch.setattr(Lowerings, "lower", counted)
    return calls


def step(budget: Any = "4MiB", rows: int = 2048) -> fxckpt.Plan:
    torch._dynamo.reset()
    backend = fxckpt.Backend(budget=budget)
    torch.compile(Net(), backend=backend)(torch.randn(rows, 32)).backward()
    (plan,) = backend.plans
    return plan


def test_cached_plan_is_neither_searched_nor_lowered(store: PlanCache, lowered: list[bool]) -> None:
    """A second compile of one graph takes the plan from the cache."""
    first = step()
    assert lowered
    lowered.clear()
    again = step()
    assert not lowered
    assert again == first
    assert str(again.explain()) == str(first.explain())


@pytest.mark.parametrize("other", [{"budget": "8MiB"}, {"rows": 1024}], ids=str)
def test_other_budgets_and_shapes_are_planned_anew(
    store: PlanCache, lowered: list[bool], other: dict[str, Any]
) -> None:
    """Each has a file of its own."""
    step()
    lowered.clear()
    step(**other)
    assert lowered
    assert len(list(store.folder.iterdir())) == 2


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda text: text[:100], id="cut"),
        pytest.param(lambda text: "[" * 100_000, id="deep", marks=pytest.mark.sweep),
        pytest.param(lambda text: "9" * 5_000, id="long", marks=pytest.mark.sweep),
    ],
)
def test_unreadable_file_is_replaced(
    store: PlanCache,
    lowered: list[bool],
    caplog: pytest.LogCaptureFixture,
    broken: Callable[[str], str],
) -> None:
    """A warning names the file, and the plan is made and kept anew."""
    first = step()
    (path,) = store.folder.iterdir()
    path.write_text(broken(path.read_text()))
    lowered.clear()
    with caplog.at_level(logging.WARNING, "fxckpt"):
        again = step()
    assert "cannot be read" in caplog.text and str(path) in caplog.text
    assert lowered and again == first
    assert fxckpt.Plan.from_json(path.read_text()) == first


def test_unwritable_folder_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compile goes on without a cache."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        PlanCache, "beside_inductor", lambda: PlanCache(tmp_path / "file" / "plans")
    )
    with caplog.at_level(logging.WARNING, "fxckpt"):
        assert step().saved
    assert "cannot be written" in caplog.text


def test_no_cache_without_inductors_cache() -> None:
    """Turning the cache of compiled graphs off turns that of plans off."""
    assert PlanCache.beside_inductor() is not None
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert PlanCache.beside_inductor() is None


def test_keys_differ_by_all_that_plans_depend_on() -> None:
    """Options, code, graph and configuration count; policies and cost models have no key."""

    def key(planner: Planner = Planner(budget=0.9), code: str = "1", width: int = 32) -> str | None:  # noqa: B008
        joint, _ = inductor_joint(Net(width), torch.randn(64, width))
        return key_of(joint, planner, code, {})

    keys = [
        key(),
        key(Planner(budget=0.8)),
        key(Planner(budget=0.9, cost="flops")),
        key(code="2"),
        key(width=16),
    ]
    assert None not in keys and len(set(keys)) == len(keys)
    assert key() == keys[0]
    with torch._inductor.config.patch(allow_buffer_reuse=False):
        assert key() != keys[0]
    joint, _ = inductor_joint(Net(), torch.randn(64, 32))
    for planner in (
        Planner(policy=save_ops(torch.ops.aten.mm)),
        Planner(budget="auto"),
        Planner(cost=FlopCost()),
    ):
        assert key_of(joint, planner, "1", {}) is None


@torch.library.custom_op("fxckpt_tests::stored", mutates_args=())
def stored(x: Tensor) -> Tensor:
    return x + 1


@stored.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def key_with(function: Callable[[Tensor], Tensor]) -> str | None:
    joint, _ = plain_joint(function, torch.ones(8, 8, requires_grad=True))
    return key_of(joint, Planner(), "1", {})


def test_keys_differ_by_registered_costs() -> None:
    """What register_op says of an op is keyed; a formula has no key."""

    def function(x: Tensor) -> Tensor:
        return (x * stored(x.detach())).sum()

    keys = [key_with(function)]
    for said in (
        {"recompute": True},
        {"recompute": True, "flops": 8},
        {"flops": lambda x: x.numel()},
    ):
        fxckpt.register_op(stored, **said)  # type: ignore[arg-type]
        keys.append(key_with(function))
    fxckpt.register_op(stored)
    assert keys.pop() is None, "a formula may be any code"
    assert len(set(keys)) == 3
    assert key_with(function) == keys[0]


def test_keys_differ_by_branches() -> None:
    """Graphs inside ops are keyed too."""

    def branching(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.cond(x.sum() > 0, inner, lambda t: t.cos(), (x,)).sum()

    assert key_with(branching(torch.sin)) != key_with(branching(torch.tanh))
    joints = [
        plain_joint(branching(f), torch.ones(8, 8, requires_grad=True))[0]
        for f in (torch.sin, torch.tanh)
    ]
    assert fingerprint(joints[0].graph) != fingerprint(joints[1].graph)


def test_keys_differ_by_kernel_switches() -> None:
    """Turning a kernel library off changes the key."""

    def function(x: Tensor) -> Tensor:
        return x.tanh().sum()

    before = key_with(function)
    torch._C._set_mkldnn_enabled(False)
    try:
        assert key_with(function) != before
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert key_with(function) == before
