"""Tiles priced: chosen where they make a step fit or faster, with the gradients of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxckpt
from fxckpt.errors import BudgetInfeasible, InvalidOption
from fxckpt.planner import planner, tiles
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.pipeline import prepare
from fxckpt.planner.tiles import COUNTS, groups_of

VOCABULARY, WIDTH, LENGTH = 4096, 32, 64


class Head(nn.Module):
    """A residual MLP, and a head over a vocabulary with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def made() -> tuple[Head, Tensor, Tensor]:
    """A model and its inputs."""
    torch.manual_seed(0)
    return Head(), torch.randn(4, LENGTH, WIDTH), torch.randint(VOCABULARY, (4, LENGTH))


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of a model's parameters, which are left without."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def test_tiles_fit_where_the_whole_does_not() -> None:
    """The measured peak is the plan's, and gradients are as near to float64 as the whole's."""
    model, x, target = made()
    with pytest.raises(BudgetInfeasible, match="With tile='auto' it could reach about") as refused:
        fxckpt.plan(model, x, target, budget="5MB", cost="flops")
    floor = fxckpt.plan(model, x, target, budget="min", cost="flops").peak_bytes
    assert refused.value.floor_bytes == floor
    backend = fxckpt.Backend(budget="5MB", inner="aot_eager", cost="flops", tile="auto")
    step = torch.compile(model, backend=backend)
    step(x, target).backward()
    gradients(model)
    loss: list[Tensor] = []

    def run() -> None:
        loss.append(step(x, target))
        loss[0].backward()

    peak = fxckpt.measure_peak(run)
    (plan,) = backend.plans
    assert plan.tiling is not None and plan.peak_bytes <= 5_000_000 < floor
    assert plan.peak_bytes <= peak <= 1.03 * plan.peak_bytes
    found = gradients(model)
    exact = made()[0].double()
    exact(x.double(), target).backward()
    for gradient, expected in zip(found, gradients(exact), strict=True):
        torch.testing.assert_close(gradient, expected.float(), rtol=1e-4, atol=1e-7)
    assert "tiles" in str(plan)


def test_budget_that_costs_nothing_is_not_tiled() -> None:
    """Tiles cost launches: without a need there are none."""
    model, x, target = made()
    assert fxckpt.plan(model, x, target, budget="1GiB", tile="auto", cost="flops").tiling is None


def test_tiled_plans_are_applied_again() -> None:
    """A plan knows its tiles, as text too."""
    model, x, target = made()
    plan = fxckpt.plan(model, x, target, budget="min", tile=4, cost="flops")
    assert plan.tiling is not None and plan.tiling.count == 4
    again = fxckpt.Plan.from_json(plan.to_json())
    assert again == plan
    backend = fxckpt.Backend(policy=again, inner="aot_eager")
    torch.compile(model, backend=backend)(x, target).backward()
    assert backend.plans[0].digest == plan.digest


def test_least_memory_takes_the_finest_tiles() -> None:
    """Without a limit on time, more tiles reach less."""
    model, x, target = made()
    peaks = [
        fxckpt.plan(model, x, target, budget="min", tile=tile, cost="flops").peak_bytes
        for tile in (None, 2, 8)
    ]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 2 * peaks[2]


def test_several_graphs_of_a_step_are_refused() -> None:
    """Levels of a step are plans of one graph as it was traced."""
    model, x, target = made()

    def broken(x: Tensor, target: Tensor) -> Tensor:
        hidden = x + model.down(F.gelu(model.up(x)))
        torch._dynamo.graph_break()
        return F.cross_entropy(model.head(hidden).flatten(0, 1), target.flatten())

    backend = fxckpt.Backend(budget="1GiB", inner="aot_eager", tile="auto")
    with pytest.raises(InvalidOption, match="a model that is one graph"):
        torch.compile(broken, backend=backend)(x, target)


def test_each_size_is_tiled_for_itself() -> None:
    """With dynamic=False each size is planned."""
    model, x, target = made()
    backend = fxckpt.Backend(budget="1GiB", inner="aot_eager", cost="flops", tile=4)
    step = torch.compile(model, backend=backend, dynamic=False)
    for rows in (4, 3, 1):
        step(x[:rows], target[:rows]).backward()
        found = gradients(model)
        model(x[:rows], target[:rows]).backward()
        for gradient, whole in zip(found, gradients(model), strict=True):
            torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-7)
    assert [p.tiling.count for p in backend.plans if p.tiling] == [4, 4, 4]


@pytest.mark.parametrize("tile", [0, 1, -4, "many", 2.0, True])
def test_ways_to_tile_that_are_none(tile: Any) -> None:
    """The error says what may be given."""
    with pytest.raises(InvalidOption, match=f"'auto', which tries none and up to {COUNTS[-1]}"):
        fxckpt.Backend(budget="1GiB", inner="aot_eager", tile=tile)


def test_offload_and_groups_are_refused() -> None:
    """An option that could not be kept is an error."""
    with pytest.raises(InvalidOption, match=r"planned for one process. Use one of the two"):
        fxckpt.Backend(budget="1GiB", tile="auto", group="world")
    with pytest.raises(InvalidOption, match="Use one of the two"):
        fxckpt.Backend(budget="1GiB", inner="aot_eager", scope="graph", offload="1GiB", tile="auto")


@pytest.mark.parametrize("module", ["head", "up"])
def test_policy_tiles_some_modules(module: str) -> None:
    """Only regions that begin in the modules are tiled, also where the plan is applied again."""
    model, x, target = made()
    policy = fxckpt.policies.tile(module)
    plan = fxckpt.plan(model, x, target, budget=1.0, policy=policy, cost="flops", tile=4)
    assert plan.tiling is not None and plan.tiling.count == 4
    assert all(module in name for name in plan.tiling.regions) and len(plan.tiling.regions) == 1
    given = fxckpt.Plan.from_json(plan.to_json())
    backend = fxckpt.Backend(policy=given, inner="aot_eager")
    torch.compile(model, backend=backend)(x, target).backward()
    assert backend.plans[0].tiling == plan.tiling


def test_policy_tiles_like_the_option() -> None:
    """A policy chooses as tile='auto' does, and takes nothing from other policies."""
    model, x, target = made()
    policy = fxckpt.policies.tile("head") | fxckpt.policies.save("up")
    plan = fxckpt.plan(model, x, target, budget="5MB", policy=policy, cost="flops")
    assert plan.tiling is not None and plan.peak_bytes <= 5_000_000
    step = fxckpt.rewrite(model, policy, example_inputs=(x, target), budget="5MB", cost="flops")
    assert step.plan.tiling == plan.tiling
    assert repr(policy) == "(tile('head') | save('up'))"
    with pytest.raises(fxckpt.PolicyMatchesNothing, match=r"tile\('haed'\): no region .* 'head'"):
        fxckpt.plan(model, x, target, policy=fxckpt.policies.tile("head", "haed"))
    lenient = fxckpt.policies.tile("haed").lenient()
    assert fxckpt.plan(model, x, target, policy=lenient).tiling is None


def test_policy_with_tiles_is_refused() -> None:
    """Where there can be no tiles, a policy that asks for them is an error."""
    model, x, target = made()
    policy = fxckpt.policies.tile("head")
    for options in ({"group": "world"}, {"inner": "aot_eager", "offload": "1GiB"}):
        with pytest.raises(InvalidOption, match="tile='auto'"):
            fxckpt.Backend(budget="1GiB", policy=policy, **options)
    calls: list[Any] = [
        lambda: fxckpt.plan_step(model, x, target, policy=policy),
        lambda: fxckpt.frontier(model, x, target, policy=policy),
        lambda: fxckpt.checkpoint(model, x, target, policy=policy, use_reentrant=False),
    ]
    for call in calls:
        with pytest.raises(InvalidOption, match="for models that are one graph"):
            call()
    for wrong in (~policy, policy & fxckpt.policies.save_matmuls):
        with pytest.raises(InvalidOption, match="says how ops run"):
            fxckpt.plan(model, x, target, policy=wrong)
    with pytest.raises(InvalidOption, match="give one or more texts"):
        fxckpt.policies.tile()
    with pytest.raises(InvalidOption, match="makes policies, and is none itself"):
        fxckpt.plan(model, x, target, policy=fxckpt.policies.tile)


def test_a_tower_without_matmul_is_no_region() -> None:
    """Element-wise chains make nothing wide from narrow rows: values are recomputed, not tiled."""

    def tower(x: Tensor, scale: Tensor) -> Tensor:
        for _ in range(4):
            x = F.gelu(x) * scale + x
        return x.sum(-1)

    x, scale = torch.randn(1, 4096, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    joint = capture_joint(tower, (x, scale), {})
    prepare(joint)
    assert groups_of(joint.module.graph) == []
    plan = fxckpt.plan(tower, x, scale, budget="min", tile="auto", cost="flops")
    assert plan.tiling is None and plan.peak_bytes < plan.baseline_peak_bytes


class Broken(Exception):
    """A defect."""


def break_tiles(monkeypatch: pytest.MonkeyPatch, counts: Sequence[int]) -> None:
    """Let the unrolling into these numbers of tiles fail, as it does for a user."""
    monkeypatch.setenv("FXCKPT_STRICT", "0")
    unroll = tiles.unroll

    def broken(graph: fx.Graph, regions: Any, count: int) -> None:
        if count in counts:
            raise Broken("no rows")
        unroll(graph, regions, count)

    monkeypatch.setattr(tiles, "unroll", broken)


def test_variant_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning has its name and the reason, and the others are planned."""
    model, x, target = made()
    tiling = fxckpt.plan(model, x, target, budget="5MB", tile="auto", cost="flops").tiling
    assert tiling is not None
    break_tiles(monkeypatch, [tiling.count])
    with pytest.warns(UserWarning, match=rf"left out, {tiling.count} in .*head.*: Broken: no rows"):
        plan = fxckpt.plan(model, x, target, budget="5MB", tile="auto", cost="flops")
    assert plan.tiling is not None and plan.tiling.count != tiling.count
    assert plan.peak_bytes <= 5_000_000


def test_graph_is_planned_without_any_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all variants fail, the untiled graph is planned, or is what the error is about."""
    model, x, target = made()
    floor = fxckpt.plan(model, x, target, budget="min", cost="flops")
    break_tiles(monkeypatch, range(64))
    with pytest.warns(UserWarning, match="left out"):
        plan = fxckpt.plan(model, x, target, budget="min", tile="auto", cost="flops")
    assert plan.tiling is None and plan.peak_bytes == floor.peak_bytes
    for tile in ("auto", None):
        with (
            pytest.warns(UserWarning, match="left out"),
            pytest.raises(BudgetInfeasible) as refused,
        ):
            fxckpt.plan(model, x, target, budget="5MB", tile=tile, cost="flops")
        assert refused.value.floor_bytes == floor.peak_bytes


def test_regions_that_fail_leave_the_graph_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose regions cannot be found is planned without tiles."""
    model, x, target = made()
    monkeypatch.setenv("FXCKPT_STRICT", "0")

    def broken(graph: fx.Graph) -> None:
        raise Broken("no regions")

    monkeypatch.setattr(tiles, "row_regions", broken)
    with pytest.warns(UserWarning, match="left out, all of this graph: Broken: no regions"):
        plan = fxckpt.plan(model, x, target, budget=0.98, tile="auto", cost="flops")
    assert plan.tiling is None


def test_variant_that_cannot_be_emitted_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is that of the untiled graph."""
    model, x, target = made()
    monkeypatch.setenv("FXCKPT_STRICT", "0")
    emit_halves = planner.emit_halves

    def broken(emission: Any) -> Any:
        if emission.plan.tiling is not None:
            raise fxckpt.VerifyError("wrong halves")
        return emit_halves(emission)

    monkeypatch.setattr(planner, "emit_halves", broken)
    backend = fxckpt.Backend(
        budget="min", inner="aot_eager", cost="flops", tile="auto", scope="graph"
    )
    step = torch.compile(model, backend=backend)
    with pytest.warns(UserWarning, match="left out, .* VerifyError: wrong halves"):
        step(x, target).backward()
    assert backend.plans[0].tiling is None
    found = gradients(model)
    model(x, target).backward()
    for gradient, expected in zip(found, gradients(model), strict=True):
        assert gradient.equal(expected)


def test_tiles_that_were_asked_for_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of tiles, modules, and a check of every defect leave nothing out."""
    model, x, target = made()
    break_tiles(monkeypatch, range(64))
    policy = fxckpt.policies.tile("head")
    asked: list[dict[str, Any]] = [{"tile": 8}, {"policy": policy}]
    for options in asked:
        with pytest.raises(Broken, match="no rows") as failed:
            fxckpt.plan(model, x, target, budget="min", cost="flops", **options)
        assert "head" in failed.value.__notes__[0]
    monkeypatch.setenv("FXCKPT_STRICT", "1")
    with pytest.raises(Broken):
        fxckpt.plan(model, x, target, budget="min", cost="flops", tile="auto")


def test_asking_for_tiles_of_nothing_is_told() -> None:
    """A number of tiles without a region is a warning, and so is what keeps a head whole."""
    model, x, _ = made()

    def scored(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.head(x)
        return logits.logsumexp(-1).sum(), logits

    x.requires_grad_()
    with pytest.warns(UserWarning, match=r"tile=4: .* planned whole, as .* by output\."):
        plan = fxckpt.plan(scored, x, budget="min", tile=4, cost="flops")
    assert plan.tiling is None
    policy = fxckpt.policies.tile("**")
    with pytest.raises(fxckpt.PolicyMatchesNothing, match=r"is kept whole by output\."):
        fxckpt.plan(scored, x, budget="min", policy=policy, cost="flops")


def test_tiles_over_the_budget_are_told() -> None:
    """Sums in float32 are larger than small values in half precision: whole, it fits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    least = fxckpt.plan(model, x, budget="min", cost="flops").peak_bytes
    with pytest.warns(UserWarning, match="planned whole, as no plan with them is within the budg"):
        plan = fxckpt.plan(model, x, budget=least, tile=2, cost="flops")
    assert plan.tiling is None and plan.peak_bytes <= least
