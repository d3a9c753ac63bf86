"""Copy views alone: Inductor's kernels copy the view that an op returns, not its storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.passes.inductor.copy_views_alone import copy_views_alone
from fxckpt.passes.transforms.storage_copies import COPIES_STORAGE
from fxckpt.torch_private import FakeTensorMode, size_hint, storage_id
from tests.passes.graphs import storages_of, traced
from tests.passes.writes import WRITES

aten = torch.ops.aten


def test_storages_of_an_example() -> None:
    """A write into a row of a 4 x 4 matrix takes 16 bytes in a compiler's kernel."""

    def f(x: Tensor, row: Tensor) -> Tensor:
        return aten.copy.default(x.sin()[2], row).cos()

    graph = traced(f, torch.rand(4, 4), torch.rand(4)).graph
    copy_views_alone(graph)
    assert_expected_inline(
        storages_of(graph),
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
