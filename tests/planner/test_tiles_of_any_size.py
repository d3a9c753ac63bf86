"""Tiles of sizes that vary: one compiled graph is right, and within its peak, at all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import fxckpt
from fxckpt.passes.tiles.row_regions import RowRegion
from fxckpt.planner import tiles
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.pipeline import prepare
from fxckpt.planner.tiles import groups_of, tiled
from fxckpt.plans.types import Tiling

VOCABULARY, WIDTH, IGNORED = 512, 16, 5
LARGEST = (6, 40)


class Model(nn.Module):
    """A table, a gated MLP, and a head over a vocabulary with its loss."""

    def __init__(self, shift: bool = False, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift, self.reduction = shift, reduction
        self.table, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.head = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.table(tokens)
        y = self.norm(x)
        logits = self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))
        if self.shift:
            logits, target = logits[:, :-1], target[:, 1:]
        return F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction=self.reduction, ignore_index=IGNORED
        )


def batch(rows: int, length: int, dims: Sequence[int] = (0, 1)) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which some are ignored; the dims are marked as dynamic."""
    tokens = torch.randint(VOCABULARY, (rows, length))
    target = tokens.clone()
    target[:, ::3] = IGNORED
    for value in (tokens, target):
        for dim in dims:
            torch._dynamo.mark_dynamic(value, dim)
    return tokens, target


def result(step: Any, model: nn.Module, given: tuple[Tensor, ...]) -> list[Tensor]:
    """The loss, and the gradients of the parameters, which are left without."""
    model.zero_grad()
    loss = step(*given)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def assert_right(step: Any, model: nn.Module, given: tuple[Tensor, ...]) -> None:
    """Compare with the model in float64."""
    exact = copy.deepcopy(model).double()
    doubled = tuple(value.double() if value.is_floating_point() else value for value in given)
    pairs = zip(result(step, model, given), result(exact, exact, doubled), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-6)


def measured(step: Any, model: nn.Module, given: tuple[Tensor, Tensor]) -> int:
    """The peak of a step."""
    model.zero_grad()
    peak = fxckpt.measure_peak(lambda: step(*given).backward())
    model.zero_grad()
    return peak


def compiled(model: nn.Module, **options: Any) -> tuple[Any, fxckpt.Backend, Any]:
    """A compiled model, its backend, and a counter of compiles."""
    given = {"budget": 1.0, "inner": "aot_eager", "cost": "flops", "tile": 4, **options}
    dynamic = given.pop("dynamic", None)
    backend = fxckpt.Backend(**given)
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, dynamic=dynamic), backend, counter


def tile_nodes(backend: fxckpt.Backend) -> int:
    """The number of tiles in the plan of the first graph."""
    tiling = backend.plans[0].tiling
    return 0 if tiling is None else tiling.count


@pytest.mark.parametrize(("shift", "reduction"), [(True, "mean"), (False, "sum")])
def test_one_graph_for_batch_and_length(shift: bool, reduction: str) -> None:
    """Sizes that no number of tiles divides, and fewer rows than tiles, are right."""
    model = Model(shift, reduction)
    step, backend, counter = compiled(model)
    for sizes in (LARGEST, (5, 17), (2, 3)):
        given = batch(*sizes)
        assert_right(step, model, given)
        (plan,) = backend.plans
        peak = measured(step, model, given)
        assert peak == plan.peak_bytes if sizes == LARGEST else peak < plan.peak_bytes
    assert plan.tiling is not None and plan.tiling.count == 4
    assert counter.frame_count == 1


@pytest.mark.parametrize("dim", [0, 1])
def test_one_graph_for_one_dim(dim: int) -> None:
    """Rows are those of a batch or of positions, and the other dimension is fixed."""
    model = Model(shift=True)
    step, backend, counter = compiled(model, tile=3)
    for size in ((9, 7, 2), (40, 17, 3))[dim]:
        sizes = (size, 12) if dim == 0 else (4, size)
        assert_right(step, model, batch(*sizes, dims=(dim,)))
    assert tile_nodes(backend) == 3 and counter.frame_count == 1


def test_second_size_is_taken_to_vary() -> None:
    """Dynamo compiles a graph of any size for the second one, and the third one needs no other."""
    model = Model()
    step, backend, counter = compiled(model)
    for sizes in ((4, 12), LARGEST, (3, 17)):
        assert_right(step, model, batch(*sizes, dims=()))
    assert counter.frame_count == 2
    assert [p.tiling.count for p in backend.plans if p.tiling] == [4, 4]


def test_bounded_sizes_are_planned_at_their_bound() -> None:
    """The peak at the greatest size is the plan's, and a smaller one is compiled first."""
    model = Model()
    step, backend, counter = compiled(model)
    for length in (12, 40):
        given = batch(4, length, dims=())
        for value in given:
            torch._dynamo.mark_dynamic(value, 1, min=2, max=40)
        assert_right(step, model, given)
    assert measured(step, model, given) == backend.plans[0].peak_bytes
    assert tile_nodes(backend) == 4 and counter.frame_count == 1


def test_growing_sizes_are_planned_again() -> None:
    """Under a budget of bytes, sizes whose tiles are over it are compiled anew, with tiles."""
    model = Model()
    step, backend, counter = compiled(model, budget="500KB", scope="graph")
    for sizes in ((4, 12), (4, 14), (4, 80)):
        given = batch(*sizes)
        assert_right(step, model, given)
        assert measured(step, model, given) <= 500_000
    assert counter.frame_count == len(backend.plans) > 1
    assert all(plan.tiling is not None for plan in backend.plans)


@pytest.mark.parametrize(("shift", "reduction"), [(True, "mean"), (False, "sum")])
def test_gradients_go_ahead_at_any_size(shift: bool, reduction: str) -> None:
    """The backward of a tile runs with its forward, scaled by the gradient of the loss."""
    model = Model(shift, reduction)
    step, backend, counter = compiled(model, budget="450KB", scope="graph")
    for sizes in (LARGEST, (5, 17), (2, 3)):
        assert_right(step, model, batch(*sizes))
    (plan,) = backend.plans
    assert plan.tiling is not None and plan.tiling.is_ahead and counter.frame_count == 1


class Scored(nn.Module):
    """A table, and a head over a vocabulary with a loss of its logits and tokens."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        # Both have one size then, which gather does not ask for.
        target = tokens.where(target != IGNORED, target)
        return self.loss(self.head(self.table(tokens)), target)


def chosen(logits: Tensor, target: Tensor) -> Tensor:
    """The log-probabilities of chosen tokens."""
    return logits.log_softmax(-1).gather(2, target[..., None]).squeeze(2)


def without_last(logits: Tensor, target: Tensor) -> Tensor:
    return -chosen(logits[:, :-1], target[:, 1:]).mean()


def without_first(logits: Tensor, target: Tensor) -> Tensor:
    scores = chosen(logits[:, 1:], target[:, :-1])
    return -scores[:, 0].sum() - scores.mean()


def without_either(logits: Tensor, target: Tensor) -> Tensor:
    flat = logits[:, 1:-1].reshape(-1, VOCABULARY).log_softmax(-1)
    return -flat.gather(1, target[:, 2:].reshape(-1, 1)).mean()


@pytest.mark.parametrize("loss", [without_last, without_first, without_either])
def test_values_of_some_rows_are_joined(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A value without the first or the last position is joined without rows of zeros."""
    model = Scored(loss)
    step, backend, _ = compiled(model, dynamic=True)
    for sizes in (LARGEST, (5, 17), (3, 5)):
        assert_right(step, model, batch(*sizes))
    assert tile_nodes(backend) == 4


class Apart(Scored):
    """A head whose tokens and targets have sizes of their own."""

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(self.table(tokens)), target)


def of_chosen(logits: Tensor, target: Tensor) -> Tensor:
    return -chosen(logits, target).mean()


@pytest.mark.parametrize("loss", [of_chosen, without_last, without_either])
def test_sizes_of_two_inputs_are_guarded(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A gather of as many rows as there are is in a region, and other sizes are compiled anew."""
    model = Apart(loss)
    step, backend, _ = compiled(model, dynamic=True)
    for sizes in (LARGEST, (5, 17), (3, 6)):
        assert_right(step, model, batch(*sizes))
        assert len(backend.plans) == 1
    assert tile_nodes(backend) == 4
    if loss is of_chosen:
        tokens, target = batch(5, 17)
        given = tokens, target[:, :9].clone()
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(given[1], dim)
        with pytest.warns(UserWarning, match="head is kept whole by gather"):
            assert_right(step, model, given)
        assert [plan.tiling is None for plan in backend.plans] == [False, True]


def test_sizes_after_a_slice_are_computed() -> None:
    """A size that the backward reads from what follows the head waits for no tile."""

    def sliced_later(logits: Tensor, target: Tensor) -> Tensor:
        return -logits.log_softmax(-1).gather(2, target[..., None])[:, :-1].sum()

    model = Scored(sliced_later)
    step, backend, _ = compiled(model, dynamic=True)
    for sizes in (LARGEST, (5, 17), (2, 3)):
        assert_right(step, model, batch(*sizes))
    assert tile_nodes(backend) == 4


class Towers(nn.Module):
    """Two MLPs of other widths, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(WIDTH, width * WIDTH) for width in (10, 8))
        self.down = nn.ModuleList(nn.Linear(width * WIDTH, WIDTH) for width in (10, 8))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.silu(up(x)))
        return x.pow(2).mean()


@pytest.mark.parametrize("dynamic", [False, True])
def test_regions_that_grow_together_are_one(dynamic: bool) -> None:
    """A region whose gradients go ahead takes in the one behind it, which is no other then."""
    model = Towers()
    step, backend, _ = compiled(model, dynamic=dynamic)
    for sizes in (LARGEST, (5, 17), (2, 3)) if dynamic else (LARGEST,):
        assert_right(step, model, (torch.randn(*sizes, WIDTH, requires_grad=True),))
    assert tile_nodes(backend) == 4
    joint = capture_joint(model, (torch.randn(*LARGEST, WIDTH),), {})
    prepare(joint)
    groups = groups_of(joint.module.graph)
    assert len(groups) == 2
    found = tiled(joint, Tiling(4, 2, is_ahead=True), groups)
    assert found is not None and len(found[1].regions) == 1


def test_sizes_that_depend_on_data_are_no_rows() -> None:
    """A head on selected rows is left whole: how many there are is not known before it runs."""
    head = nn.Linear(WIDTH, VOCABULARY)

    def selected(x: Tensor, target: Tensor) -> Tensor:
        keep = target != IGNORED
        return F.cross_entropy(head(x[keep]), target[keep])

    x, target = torch.randn(40, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (40,))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        joint = capture_joint(selected, (x, target), {})
        prepare(joint)
    assert groups_of(joint.module.graph) == []


def test_variants_are_screened_at_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are unrolled at sizes that vary, and the plan is as fast as if all were."""
    unroll, fix = tiles.unroll, tiles.at_planned_sizes
    varied: list[bool] = []

    def counted(graph: fx.Graph, regions: Sequence[RowRegion], count: int) -> None:
        varied.append(any(not isinstance(region.length, int) for region in regions))
        unroll(graph, regions, count)

    monkeypatch.setattr(tiles, "unroll", counted)
    plans = []
    for way in (fix, lambda joint: None):
        monkeypatch.setattr(tiles, "at_planned_sizes", way)
        torch._dynamo.reset()
        varied.clear()
        model = Model(shift=True)
        step, backend, _ = compiled(model, budget="500KB", scope="graph", tile="auto")
        assert_right(step, model, batch(*LARGEST))
        plans.append((backend.plans[0], sum(varied), len(varied)))
    (plan, few, both), (expected, many, every) = plans
    assert plan.tiling is not None and plan.peak_bytes <= 500_000
    times = [p.step_seconds + p.recompute_seconds for p in (plan, expected)]
    assert times[0] == pytest.approx(times[1])
    assert few <= tiles.PLANNED < both - few and many == every
