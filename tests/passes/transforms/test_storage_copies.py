"""Storages as large as real ones; the oracle is what the ops really allocate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxckpt
from fxckpt.ops.properties import tensors
from fxckpt.passes.transforms.storage_copies import (
    COPIES_STORAGE,
    copy_views_alone,
    copy_whole_storages,
)
from fxckpt.torch_private import FakeTensorMode, size_hint, storage_id
from tests.joints import normalize
from tests.steps import peak_of

aten = torch.ops.aten
WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": lambda view, row: aten.copy.default(view, row),
    "copy into a transposed view": lambda view, row: aten.copy.default(view.t(), row),
    "copy into what shows an element twice": lambda view, row: aten.copy.default(
        view[:1].expand(4, 4), row
    ),
    "copy into other dtypes' memory": lambda view, row: aten.copy.default(
        view.view(torch.int32), row
    ).view(torch.float32),
    "select_scatter": lambda view, row: aten.select_scatter.default(view, row, 0, 1),
    "slice_scatter": lambda view, row: aten.slice_scatter.default(view, row[None], 0, 1, 2),
    "diagonal_scatter": lambda view, row: aten.diagonal_scatter.default(view, row),
    "as_strided_scatter": lambda view, row: aten.as_strided_scatter.default(view, row, [4], [1], 8),
    "index_put": lambda view, row: aten.index_put.default(view, [torch.tensor([1])], row),
    "a write into what was written": lambda view, row: aten.select_scatter.default(
        aten.copy.default(view, row)[1:3].t()[1:], row[:2], 0, 0
    ),
}


class Allocates(fx.Interpreter):
    """Runs a graph, and finds where the storages of its values are not as the trace has them: their sizes, and who shares one."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.places: dict[int, int] = {}
        self.kept: list[object] = []

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        self.kept.append(result)
        if node.op != "call_function":
            return result
        for real, traced in zip(tensors(result), tensors(node.meta.get("val")), strict=True):
            assert real.untyped_storage().nbytes() == size_hint(
                traced.untyped_storage().nbytes()
            ), node.format_node()
            assert self.places.setdefault(
                real.untyped_storage().data_ptr(), storage_id(traced)
            ) == storage_id(traced), node.format_node()
        return result


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_storages_are_as_large_as_real_ones(
    write: Callable[[Tensor, Tensor], Tensor], tracing: str
) -> None:
    def f(x: Tensor, row: Tensor) -> Tensor:
        written = write((x * 2)[2], row)
        return written.view(-1) + 1 if written.is_contiguous() else written.sum()

    x, row = torch.rand(8, 4, 4), torch.rand(4)
    traced = make_fx(f, tracing_mode=tracing)(x, row)
    copy_whole_storages(traced.graph)
    assert torch.equal(Allocates(traced).run(x, row), f(x, row))


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_compiler_copies_what_is_shown_alone(
    write: Callable[[Tensor, Tensor], Tensor], tracing: str
) -> None:
    def f(x: Tensor, row: Tensor) -> Tensor:
        return write((x * 2)[2], row)[1:].cos()

    def storages() -> list[tuple[int, ...]]:
        # In the order of a graph: which storage, its bytes, and where in it a value begins.
        traced = make_fx(f, tracing_mode=tracing)(torch.rand(8, 4, 4), torch.rand(4))
        copy_views_alone(traced.graph)
        found: list[tuple[int, ...]] = []
        places: dict[int, int] = {}
        for node in (n for n in traced.graph.nodes if n.op == "call_function"):
            value = node.meta["val"]
            place = places.setdefault(storage_id(value), len(places))
            found.append(
                (
                    place,
                    size_hint(value.untyped_storage().nbytes()),
                    size_hint(value.storage_offset()),
                )
            )
            if node.target in COPIES_STORAGE:
                fresh = torch.empty_strided(
                    [*map(size_hint, value.shape)],
                    [*map(size_hint, value.stride())],
                    dtype=value.dtype,
                )
                assert found[-1][1:] == (fresh.untyped_storage().nbytes(), 0)
        return found

    # The second trace finds its ops in the cache of fake tensors.
    FakeTensorMode.cache_clear()
    assert storages() == storages()


def test_merged_writes_are_read_where_they_lie() -> None:
    def f(x: Tensor, row: Tensor) -> Tensor:
        # Of equal ops the second is found in the cache of fake tensors, and begins elsewhere.
        first, second = (
            aten.slice_scatter.default((x * 2)[2], row[None], 0, 1, 2) for _ in range(2)
        )
        return first[1].cos() + second[2].sin()

    FakeTensorMode.cache_clear()
    inputs = torch.rand(8, 4, 4), torch.rand(4)
    for is_fused in (False, True):
        traced = make_fx(f, tracing_mode="fake")(*inputs)
        normalize(traced, for_inductor=is_fused)
        _, written, *views = (
            n.meta["val"]
            for n in traced.graph.nodes
            if n.target in (aten.slice_scatter.default, aten.select.int)
        )
        assert {storage_id(v) for v in views} == {storage_id(written)}
        assert [v.storage_offset() - written.storage_offset() for v in views] == [4, 8]
        assert torch.equal(traced(*inputs), f(*inputs))


def test_what_is_read_by_its_place_stays_in_it() -> None:
    def f(x: Tensor, row: Tensor) -> Tensor:
        return aten.copy.default((x * 2)[2], row).as_strided([4], [1], 0).cos()

    traced = make_fx(f, tracing_mode="fake")(torch.rand(8, 4, 4), torch.rand(4))

    def begins() -> list[int]:
        return [
            n.meta["val"].storage_offset() for n in traced.graph.nodes if n.op == "call_function"
        ]

    before = begins()
    copy_views_alone(traced.graph)
    assert begins() == before


class Writes(nn.Module):
    """Collects what its layers give in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        collected = x.new_empty(5, *x.shape)
        for i, layer in enumerate(self.layers):
            x = layer(x).relu().clone()
            x[:, ::2] += 1
            collected[i] = x * torch.sigmoid(x.sum(-1, keepdim=True))
            collected[i, 2:4] = 0.5
        return collected.cumsum(0).square().mean()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("budget", [None, 0.9, 0.82])
def test_a_model_that_writes_into_slices_stays_within_its_budget(
    budget: float | None, inner: str
) -> None:
    backend = fxckpt.Backend(budget=budget, inner=inner)
    measured = peak_of(backend, lambda: (Writes(), torch.randn(512, 128)))
    (plan,) = backend.plans
    assert measured == (plan.compiled_peak_bytes or plan.peak_bytes)
    assert plan.budget_bytes is None or measured <= plan.budget_bytes
