"""Values of regions that are away: sent to a tier at a region's end, fetched in its backward.

A copy begins when the region's forward has ended and runs beside what follows. The value itself is
let go when the next region that sends to the tier ends: by then the copy is waited for, so that the
device's peak does not depend on the link. What a backward reads before that never left.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxckpt.eager.tape import TensorVersion
from fxckpt.errors import CheckpointError, InvalidOption
from fxckpt.tiers import Tier
from fxckpt.tiers.streams import Copy, StreamCopy
from fxckpt.torch_private import (
    FakeTensor,
    forget_storage,
    is_wrapper,
    laid_out,
    remember_storage,
    storage_key,
)

_lock = threading.Lock()
_leaving: weakref.WeakKeyDictionary[Tier, list[weakref.ref[AwayStorage]]] = (
    weakref.WeakKeyDictionary()
)
"""Storages of the latest region of each tier, which have not been let go."""
_away: weakref.WeakKeyDictionary[Tier, weakref.WeakValueDictionary[int, AwayStorage]] = (
    weakref.WeakKeyDictionary()
)
"""Storages that are away, by their keys: what several regions read is sent once."""


class AwayStorage:
    """A storage that is sent to a tier."""

    def __init__(
        self, value: Tensor, tier: Tier, counter: int | None, check: Callable[[], object]
    ) -> None:
        self.counter = counter
        """Number of writes to the value before it was kept; None if they are not counted."""
        self._remembered = [remember_storage(value)]
        """The storage's key, which no other storage has for as long as this one is away."""
        self._check: Callable[[], object] | None = check
        """Raises an error if the value was written since it was kept; holds the value."""
        self._written = ""
        """Error for a value that was written before it was let go."""
        self._value: Tensor | None = value
        """The value, until it is let go."""
        self._here: Tensor | None = None
        """Its bytes that came back for the backward that runs."""
        self._coming: Copy | None = None
        self._lock = threading.RLock()
        """Another thread's region may let the value go while this one's backward reads it."""
        self._tier, self._device = tier, value.device
        self._held = tier.take(value.untyped_storage().nbytes())
        self._going = tier.send(value, self._held)

    def let_go(self) -> None:
        """Wait until the value has arrived, and let it go.

        A write in the meantime may be in the copy: the error for it is kept for the backward.
        """
        with self._lock:
            if self._value is None:
                return
            self._going.result()
            try:
                self._check_value()
            except CheckpointError as error:
                self._written = str(error)
            self._value = self._check = None

    def begin(self) -> None:
        """Take memory on the device, and begin to fetch."""
        with self._lock:
            if self._value is None and self._here is None and not self._written:
                nbytes = self._held.untyped_storage().nbytes()
                self._here = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                self._coming = self._tier.fetch(self._held, self._here)

    def arrived(self) -> Tensor:
        """Return the bytes on the device.

        Raises the error for a value that was written before it was sent.
        """
        with self._lock:
            self.begin()
            if self._value is not None:
                self._check_value()
                return self._value
            if self._written:
                raise CheckpointError(self._written)
            assert self._here is not None
            if self._coming is not None:
                self._coming.result()
                self._coming = None
            return self._here

    def __del__(self) -> None:
        forget_storage(self._remembered)

    def _check_value(self) -> None:
        assert self._check is not None
        self._check()

    def leave(self) -> None:
        """Let the bytes go that came back."""
        if self._coming is not None:
            self._coming.result()  # The copy writes to them.
        if isinstance(self._going, StreamCopy):
            # The host would wait for it when a value ends that was never let go.
            self._going.result()
        self._coming = self._here = None


@dataclass(frozen=True)
class AwayValue:
    """What a tape keeps of a value that is away."""

    storage: AwayStorage
    geometry: tuple[object, ...]

    def tensor(self) -> Tensor:
        """Return the value, fetched if it is not here."""
        return laid_out(self.storage.arrived(), self.geometry)


def send_kept(
    versions: Iterable[TensorVersion], tier: Tier, check: Callable[[TensorVersion], object]
) -> list[AwayStorage]:
    """Send the kept values of some versions to a tier, each storage once; return the storages.

    One that another region has sent, and that nothing has written to since, is not sent again.
    ``check`` raises an error for a version that was written since it was kept. Raises
    :class:`TierFull`, and :class:`InvalidOption` for values on devices without such copies.
    """
    with _lock:
        earlier = _leaving.pop(tier, [])
        known = _away.setdefault(tier, weakref.WeakValueDictionary())
    for ref in earlier:
        if (storage := ref()) is not None:
            storage.let_go()
    sent: dict[int, AwayStorage] = {}
    for version in versions:
        value: Tensor = version.kept
        if value.device.type not in ("cpu", "cuda"):
            raise InvalidOption(
                f"offload={tier!r}: values are sent away from the CPU and from CUDA devices, and "
                f"the region keeps one on {value.device}. Leave offload out, or use "
                "torch.autograd.graph.save_on_cpu() around the region."
            )
        key = storage_key(value)
        if key not in sent:
            storage = known.get(key)
            if storage is None or version.counter is None or storage.counter != version.counter:
                check_value = _checking(version, value, check)
                storage = AwayStorage(value, tier, version.counter, check_value)
                known[key] = storage
            sent[key] = storage
        version.kept, version.unpack = AwayValue(sent[key], version.geometry), AwayValue.tensor
    with _lock:
        _leaving[tier] = [weakref.ref(storage) for storage in sent.values()]
    return list(sent.values())


def can_leave(version: TensorVersion) -> bool:
    """Return whether the kept value of a version is a plain tensor with a storage of its own."""
    value = version.kept
    return (
        isinstance(value, Tensor)
        and version.unpack is None
        and not isinstance(value, FakeTensor)
        and not is_wrapper(value)
        and value.layout is torch.strided
        and storage_key(value) > 0
        and version.geometry is not None
        and value.untyped_storage().nbytes() > 0
    )


def _checking(
    version: TensorVersion, value: Tensor, check: Callable[[TensorVersion], object]
) -> Callable[[], object]:
    """Return what checks a value as it was kept."""
    kept = TensorVersion(version.storage, version.geometry, None)
    kept.kept, kept.counter, kept.storage_key = value, version.counter, version.storage_key
    return lambda: check(kept)
