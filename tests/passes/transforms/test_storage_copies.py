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
from fxckpt.passes.transforms.storage_copies import copy_whole_storages
from fxckpt.torch_private import FakeTensorMode, size_hint, storage_id
from tests.joints import normalize
from tests.passes.graphs import storages_of, traced
from tests.passes.writes import WRITES
from tests.steps import peak_of

aten = torch.ops.aten


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
    """A write into a row of a 4 x 4 matrix clones 64 bytes."""

    def f(x: Tensor, row: Tensor) -> Tensor:
        return aten.copy.default(x.sin()[2], row).cos()

    graph = traced(f, torch.rand(4, 4), torch.rand(4)).graph
    copy_whole_storages(graph)
    assert_expected_inline(
        storages_of(graph),
        """\
x_1: input: 64 B from 0
row_1: input: 16 B from 0
sin = sin(x_1): 64 B from 0
select = select(sin, 0, 2): 64 B from 8
copy = copy(select, row_1): 64 B from 8
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


CASES = [
    pytest.param(
        budget, inner, marks=pytest.mark.sweep if inner == "inductor" and budget != 0.82 else ()
    )
    for budget in (None, 0.9, 0.82)
    for inner in ("aot_eager", "inductor")
]


@pytest.mark.parametrize(("budget", "inner"), CASES)
def test_writes_into_slices_keep_the_budget(budget: float | None, inner: str) -> None:
    """The measured peak is the planned one."""
    backend = fxckpt.Backend(budget=budget, inner=inner, cost="flops")
    measured = peak_of(backend, lambda: (Writes(), torch.randn(512, 128)))
    (plan,) = backend.plans
    assert measured == (plan.compiled_peak_bytes or plan.peak_bytes)
    assert plan.budget_bytes is None or measured <= plan.budget_bytes
