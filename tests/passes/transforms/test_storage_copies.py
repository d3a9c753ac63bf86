"""Storage copies: fake storages have the sizes that the ops really allocate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
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
from tests.passes.graphs import lines_of, traced
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
    """Interpreter that asserts, for each value, the size and the sharing of its fake storage."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.places: dict[int, int] = {}
        self.kept: list[object] = []

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        self.kept.append(result)
        if node.op != "call_function":
            return result
        for real, fake in zip(tensors(result), tensors(node.meta.get("val")), strict=True):
            assert real.untyped_storage().nbytes() == size_hint(fake.untyped_storage().nbytes()), (
                node.format_node()
            )
            assert self.places.setdefault(
                real.untyped_storage().data_ptr(), storage_id(fake)
            ) == storage_id(fake), node.format_node()
        return result


def test_storages_of_an_example() -> None:
    """A write into a row of a 4 x 4 matrix clones 64 bytes, and a compiler's kernel 16."""

    def f(x: Tensor, row: Tensor) -> Tensor:
        return aten.copy.default(x.sin()[2], row).cos()

    def storages(rewrite: Callable[[fx.Graph], None]) -> str:
        graph = traced(f, torch.rand(4, 4), torch.rand(4)).graph
        rewrite(graph)
        values = ((text, node.meta.get("val")) for node, text in lines_of(graph))
        return "\n".join(
            f"{text}: {v.untyped_storage().nbytes()} B from {v.storage_offset()}"
            for text, v in values
            if isinstance(v, Tensor)
        )

    assert_expected_inline(
        storages(copy_whole_storages),
        """\
x_1: input: 64 B from 0
row_1: input: 16 B from 0
sin = sin(x_1): 64 B from 0
select = select(sin, 0, 2): 64 B from 8
copy = copy(select, row_1): 64 B from 8
cos = cos(copy): 16 B from 0""",
    )
    assert_expected_inline(
        storages(copy_views_alone),
        """\
x_1: input: 64 B from 0
row_1: input: 16 B from 0
sin = sin(x_1): 64 B from 0
select = select(sin, 0, 2): 64 B from 8
copy = copy(select, row_1): 16 B from 0
cos = cos(copy): 16 B from 0""",
    )


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_storages_have_real_sizes(write: Callable[[Tensor, Tensor], Tensor], tracing: str) -> None:
    """Called as they are, the ops clone the whole storage of their first argument."""

    def f(x: Tensor, row: Tensor) -> Tensor:
        written = write((x * 2)[2], row)
        return written.view(-1) + 1 if written.is_contiguous() else written.sum()

    x, row = torch.rand(8, 4, 4), torch.rand(4)
    module = make_fx(f, tracing_mode=tracing)(x, row)
    copy_whole_storages(module.graph)
    assert torch.equal(Allocates(module).run(x, row), f(x, row))


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_compiled_copies_hold_the_view_alone(
    write: Callable[[Tensor, Tensor], Tensor], tracing: str
) -> None:
    """A compiler copies the view alone, however the trace came by its fake values."""

    def f(x: Tensor, row: Tensor) -> Tensor:
        return write((x * 2)[2], row)[1:].cos()

    def storages() -> list[tuple[int, ...]]:
        # In the order of a graph: which storage, its bytes, and where in it a value begins.
        module = make_fx(f, tracing_mode=tracing)(torch.rand(8, 4, 4), torch.rand(4))
        copy_views_alone(module.graph)
        found: list[tuple[int, ...]] = []
        places: dict[int, int] = {}
        for node in (n for n in module.graph.nodes if n.op == "call_function"):
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


def test_merged_writes_keep_their_offsets() -> None:
    """Readers of a merged write read it at the same offset in its storage."""

    def f(x: Tensor, row: Tensor) -> Tensor:
        # Of equal ops the second is found in the cache of fake tensors, and begins elsewhere.
        first, second = (
            aten.slice_scatter.default((x * 2)[2], row[None], 0, 1, 2) for _ in range(2)
        )
        return first[1].cos() + second[2].sin()

    FakeTensorMode.cache_clear()
    inputs = torch.rand(8, 4, 4), torch.rand(4)
    for is_fused in (False, True):
        module = make_fx(f, tracing_mode="fake")(*inputs)
        normalize(module, for_inductor=is_fused)
        _, written, *views = (
            n.meta["val"]
            for n in module.graph.nodes
            if n.target in (aten.slice_scatter.default, aten.select.int)
        )
        assert {storage_id(v) for v in views} == {storage_id(written)}
        assert [v.storage_offset() - written.storage_offset() for v in views] == [4, 8]
        assert torch.equal(module(*inputs), f(*inputs))


def test_as_strided_keeps_its_storage() -> None:
    """A storage that ``as_strided`` reads at an offset is not replaced."""

    def f(x: Tensor, row: Tensor) -> Tensor:
        return aten.copy.default((x * 2)[2], row).as_strided([4], [1], 0).cos()

    module = make_fx(f, tracing_mode="fake")(torch.rand(8, 4, 4), torch.rand(4))

    def begins() -> list[int]:
        return [
            n.meta["val"].storage_offset() for n in module.graph.nodes if n.op == "call_function"
        ]

    before = begins()
    copy_views_alone(module.graph)
    assert begins() == before


class Writes(nn.Module):
    """Model that collects the results of its layers in one buffer."""

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
def test_writes_into_slices_keep_the_budget(budget: float | None, inner: str) -> None:
    """The measured peak is the planned one."""
    backend = fxckpt.Backend(budget=budget, inner=inner)
    measured = peak_of(backend, lambda: (Writes(), torch.randn(512, 128)))
    (plan,) = backend.plans
    assert measured == (plan.compiled_peak_bytes or plan.peak_bytes)
    assert plan.budget_bytes is None or measured <= plan.budget_bytes
