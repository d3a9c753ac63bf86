"""Storages of real and fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxckpt.torch_private import (
    allocated_bytes,
    forget_storage,
    laid_out,
    parts_of,
    remember_storage,
    share_version,
    shown,
    storage_addresses,
    storage_id,
    storage_key,
)


def test_views_share_a_storage() -> None:
    """A view has its base's storage, real or fake; a copy has another."""
    for mode in (torch.no_grad(), FakeTensorMode()):
        with mode:
            x = torch.ones(4, 4)
            assert storage_id(x) == storage_id(x.t()[1:]) != storage_id(x.clone())


def test_tensors_without_a_storage_have_a_key() -> None:
    """A sparse tensor has a negative key of its own."""
    sparse = torch.eye(3).to_sparse()
    assert storage_key(sparse) < 0 < storage_key(torch.ones(2))
    assert storage_key(sparse) != storage_key(torch.eye(3).to_sparse())


def test_addresses_are_listed_while_tracing() -> None:
    """Views that were written to are listed without an op, whatever mode is on."""
    first, other = FakeTensorMode(), FakeTensorMode()
    with first:
        x = torch.ones(4, 4, requires_grad=True).clone()
        view = x[1:]
        x.mul_(2)
    real = torch.ones(2, requires_grad=True)
    real.sum().backward()
    assert real.grad is not None
    with other:
        found = storage_addresses()
    assert {storage_key(each) for each in (view, real, real.grad)} <= found


def test_a_remembered_address_is_not_reused() -> None:
    """No new storage gets the address of a dead one that is remembered."""
    x = torch.ones(4)
    address, remembered = storage_key(x), [remember_storage(x)]
    del x
    assert address not in [storage_key(torch.ones(4)) for _ in range(100)]
    forget_storage(remembered)
    assert remembered == []


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:, ::2],
        lambda x: x.t(),
        lambda x: x.conj(),
        lambda x: x.conj().imag,
        lambda x: torch.view_as_real(x),
    ],
    ids=["slice", "transposed", "conjugate", "negative", "as real"],
)
def test_a_view_is_laid_out_again(view: object) -> None:
    """The geometry of a view, over the storage's bytes, gives the view's values."""
    x = torch.randn(4, 6, dtype=torch.complex64)
    y: Tensor = view(x)  # type: ignore[operator]
    geometry = (
        y.storage_offset(),
        y.shape,
        y.stride(),
        y.dtype,
        y.is_conj(),
        y.is_neg(),
    )
    data = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    again = laid_out(data, geometry)
    assert torch.equal(again, y) and storage_id(again) == storage_id(x)


def test_an_alias_counts_writes() -> None:
    """The alias has no history, and its version moves with writes to the tensor."""
    x = torch.ones(2, requires_grad=True) * 2
    alias = share_version(x)
    before = alias._version
    with torch.no_grad():
        x.add_(1)
    assert alias.grad_fn is None and alias._version == before + 1
    leaf = torch.ones(2, requires_grad=True)
    assert share_version(leaf) is leaf


def test_parts_of_composite_tensors() -> None:
    """The values of a sparse tensor and the inner tensors of a subclass are parts."""
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.ones(2), torch.zeros(2)
    assert [t is s for t, s in zip(parts_of(TwoTensor(a, b)), (a, b), strict=True)] == [True] * 2
    assert [t.shape for t in parts_of(torch.eye(3).to_sparse())] == [(3,)]
    assert list(parts_of(a)) == []


def test_bytes_of_the_allocators() -> None:
    """CUDA's allocator hands out whole blocks; a CPU's the bytes asked for."""
    assert [allocated_bytes(n, "cuda") for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert allocated_bytes(513, "cpu") == 513


def test_large_blocks_keep_small_rests() -> None:
    """A segment of a large block is a multiple of 2 MiB; a rest of up to 1 MiB stays with it."""
    mib = 2**20
    sizes = (9 * mib + 1, 10 * mib, 11 * mib - 512, 11 * mib, 12 * mib - 1)
    blocks = [9 * mib + 512, 10 * mib, 11 * mib - 512, 12 * mib, 12 * mib]
    assert [allocated_bytes(n, "cuda") for n in sizes] == blocks


def test_gaps_count_in_what_is_shown() -> None:
    """A tensor spans its gaps; an expanded one spans a single row."""
    assert shown(torch.ones(4, 4)[:, :2]) == 3 * 4 + 2
    assert shown(torch.ones(1, 4).expand(8, 4)) == 4
