"""Storages of real and fake tensors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.utils.checkpoint
from torch._prims_common import compute_required_storage_length
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

CUDA_BLOCK_BYTES = 512
"""Granularity in bytes to which the CUDA caching allocator rounds blocks up."""
CUDA_LARGE_BYTES, CUDA_SEGMENT_BYTES = 10 * 2**20, 2 * 2**20
"""A block of so many bytes gets a segment of its own, of a multiple of so many."""
CUDA_LEAST_REST_BYTES = 2**20
"""The rest of a segment is split off if it has more bytes than that."""


def allocated_bytes(nbytes: int, device_type: str) -> int:
    """Return the bytes that a device's allocator takes for a request of ``nbytes``.

    On CUDA a large block keeps the rest of its segment, if that is too small to be split off.
    With ``expandable_segments`` each rest is split off, so that this is up to 1 MiB too much.
    Source: ``round_size``, ``get_allocation_size`` and ``should_split`` of
    ``c10/cuda/CUDACachingAllocator.cpp``.

    >>> [allocated_bytes(n, "cuda") for n in (1, 4 * 2**20 + 1, 11 * 2**20 + 1, 12 * 2**20 + 1)]
    [512, 4194816, 12582912, 12583424]
    """
    if device_type != "cuda":
        return nbytes
    block = -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES
    if block < CUDA_LARGE_BYTES:
        return block
    segment = -(-block // CUDA_SEGMENT_BYTES) * CUDA_SEGMENT_BYTES
    return segment if segment - block <= CUDA_LEAST_REST_BYTES else block


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage.

    Fake tensors of one trace share storages like the real ones would.
    """
    return int(tensor.untyped_storage()._cdata)


def storage_addresses() -> set[int]:
    """Return the addresses of the storages of all tensors that Python can see.

    Gradients of these tensors are among them, but for those of views; what only autograd or C++
    holds is not.
    """
    untyped_storage, addresses = torch.Tensor.untyped_storage, set[int]()
    # No code of a subclass must run here.
    with torch._C.DisableTorchFunctionSubclass():
        for found in _tensors_and_storages():
            is_tensor = issubclass(type(found), torch.Tensor)
            with contextlib.suppress(NotImplementedError, RuntimeError):  # has no storage
                addresses.add(int((untyped_storage(found) if is_tensor else found)._cdata))
    return addresses


def _tensors_and_storages() -> Iterator[Any]:
    # The properties of the base, which a subclass may override.
    base: Any = torch._C.TensorBase
    is_view, is_leaf, grad = base._is_view, base.is_leaf.__get__, base.grad.__get__
    for found in gc.get_objects():
        # The type, as `isinstance` would ask a lazy proxy for its class.
        kind = type(found)
        if issubclass(kind, torch.Tensor):
            yield found
            # Of a view that was written to, `is_leaf` runs the view's op again, and with it what
            # dispatches ops of the tensor's class.
            if not is_view(found) and is_leaf(found) and (gradient := grad(found)) is not None:
                yield gradient
        elif issubclass(kind, torch.UntypedStorage):
            yield found


def remember_storage(tensor: torch.Tensor) -> int:
    """Reserve the address of a tensor's storage against reuse and return it.

    The memory itself may be freed. :func:`forget_storage` releases the address.
    """
    reference: Any = tensor.untyped_storage()._weak_ref()
    return int(reference)


def is_freed(remembered: int) -> bool:
    """Return whether a storage whose address is reserved has been freed."""
    return bool(torch.UntypedStorage._expired(remembered))


def forget_storage(remembered: list[int]) -> None:
    """Release addresses reserved by :func:`remember_storage` and empty the list."""
    for reference in remembered:
        torch.UntypedStorage._free_weak_ref(reference)
    remembered.clear()


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's storage.

    It is positive for a storage, and negative, derived from the tensor object, for a tensor
    without a storage of its own.
    """
    kind = type(tensor)
    if (
        kind is torch.Tensor
        or kind is torch.nn.Parameter
        or not hasattr(kind, "__tensor_flatten__")
    ):
        try:
            return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
        except (NotImplementedError, RuntimeError):  # sparse and opaque layouts
            pass
    return -id(tensor)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a wrapper subclass, or the values of a sparse tensor."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            # A part may be no tensor, such as the mesh of a DTensor.
            if isinstance(inner, torch.Tensor):
                yield inner
                yield from parts_of(inner)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        yield tensor.values()
    elif tensor.layout is torch.sparse_coo:
        yield tensor._values()


def is_wrapper(tensor: object) -> bool:
    """Return whether a tensor is of a subclass that is made of other tensors, such as a DTensor."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    return is_traceable_wrapper_subclass(tensor)


def holds_wrapper(types: Iterable[type]) -> bool:
    """Return whether a class is of tensors that are made of other tensors."""
    return any(map(is_traceable_wrapper_subclass_type, types))


def only_waits(types: Iterable[type]) -> bool:
    """Return whether all classes of tensors made of others are of ones that wait for a collective.

    Their ops wait and then run on the tensor inside, which is all that there is to know of them.
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    kinds = filter(is_traceable_wrapper_subclass_type, types)
    return all(issubclass(kind, AsyncCollectiveTensor) for kind in kinds)


def taken_apart(wrapper: Any) -> tuple[dict[str, Any], Any]:
    """Return the parts of a tensor of tensors by name, and what else it is rebuilt from."""
    names, context = wrapper.__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}, (
        type(wrapper),
        context,
        wrapper.size(),
        wrapper.stride(),
    )


def put_together(parts: Mapping[str, Any], rest: Any) -> torch.Tensor:
    """Return the tensor of tensors that :func:`taken_apart` took apart."""
    kind, context, size, stride = rest
    return kind.__tensor_unflatten__(parts, context, size, stride)  # type: ignore[no-any-return]


def is_faking() -> bool:
    """Return whether ops make fake tensors here."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def share_version(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias without autograd history that shares the version counter of ``tensor``.

    Its ``_version`` counts writes to ``tensor`` made above or below autograd. For speed, a leaf
    that requires grad and an inference tensor are returned themselves.
    """
    if (tensor.requires_grad and tensor.grad_fn is None) or tensor.is_inference():
        return tensor
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def laid_out(data: torch.Tensor, geometry: tuple[Any, ...]) -> torch.Tensor:
    """Return a tensor with the given geometry over the storage of ``data``.

    The geometry is (offset, sizes, strides, dtype, conjugate bit, negative bit).
    """
    offset, shape, stride, dtype, is_conj, is_neg = geometry
    tensor = torch.empty(0, dtype=dtype, device=data.device).set_(
        data.untyped_storage(), offset, shape, stride
    )
    tensor = torch._neg_view(tensor) if is_neg else tensor
    return torch._conj(tensor) if is_conj else tensor


def fake_like(value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a fake tensor on the device of ``value``, in the trace of ``value`` if it is fake."""
    with value.fake_mode if isinstance(value, FakeTensor) else FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=value.device)


def fake_view(
    value: torch.Tensor,
    shape: Sequence[int | torch.SymInt],
    stride: Sequence[int | torch.SymInt],
    offset: int | torch.SymInt,
) -> torch.Tensor:
    """Return a view of the storage of ``value``, a fake tensor.

    Sizes that vary are not compared, and torch does not cache it: no other view is equal.
    """
    assert isinstance(value, FakeTensor)
    mode = value.fake_mode
    is_cached, mode.cache_enabled = mode.cache_enabled, False
    try:
        with torch.no_grad(), mode:
            return value.as_strided(shape, stride, offset)
    finally:
        mode.cache_enabled = is_cached


def fake_twin(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor on a device that is laid out like ``value`` in a storage of its own."""
    count = value.untyped_storage().nbytes() // value.element_size()
    with value.fake_mode if isinstance(value, FakeTensor) else FakeTensorMode():
        return torch.empty(count, dtype=value.dtype, device=device).as_strided(
            value.shape, value.stride(), value.storage_offset()
        )


def move_fake(tensor: FakeTensor, device: torch.device) -> None:
    """Move a fake tensor to a device, which need not be here."""
    tensor.fake_device = device


def shown(tensor: torch.Tensor) -> int:
    """Return the number of elements that a tensor spans in its storage, gaps included."""
    return compute_required_storage_length(tensor.shape, tensor.stride(), 0)


def seen_in(view: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a fake view of the storage of ``new`` that mirrors ``view``, a view of ``old``.

    ``new`` is a tensor like ``old``; the two may begin at different offsets of their storages.
    """
    offset = (
        view.storage_offset()
        + _begins_at(new, view.element_size())
        - _begins_at(old, view.element_size())
    )
    with new.fake_mode if isinstance(new, FakeTensor) else contextlib.nullcontext():
        if view.dtype != new.dtype:
            row = new.as_strided((new.untyped_storage().nbytes() // new.element_size(),), (1,), 0)
            new = (
                torch.view_as_real(row)
                if row.is_complex() and not view.is_complex()
                else row.view(view.dtype)
            )
        return new.as_strided(view.shape, view.stride(), offset)


def _begins_at(tensor: torch.Tensor, bytes_each: int) -> int | torch.SymInt:
    """Return the storage offset of a tensor in elements of ``bytes_each`` bytes."""
    offset, own = tensor.storage_offset(), tensor.element_size()
    return offset if own == bytes_each else offset * own // bytes_each
