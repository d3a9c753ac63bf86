"""A link that copies at the latest or the earliest moment that is legal, and poisons the rest."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from torch import Tensor

from fxckpt.tiers import Host, Tier

POISON = 0xFF
"""Each byte of a poisoned storage: NaN in floats, -1 in ints."""


def poison(tensor: Tensor) -> None:
    """Fill a storage with NaN."""
    storage = tensor.untyped_storage()
    ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a storage."""
    to, of = target.untyped_storage(), source.untyped_storage()
    ctypes.memmove(to.data_ptr(), of.data_ptr(), of.nbytes())


def left_in(tier: Tier) -> int:
    """Return the bytes in use once no copy is under way, which holds what it reads or writes."""
    for thread in tier._threads():
        thread.submit(int).result()
    return tier.used_bytes


@dataclass
class _Late:
    """A copy that is made when it is first waited for."""

    target: Tensor
    source: Tensor
    poisons_source: bool
    is_done: bool = field(default=False)

    def result(self) -> None:
        if not self.is_done:
            copy(self.target, self.source)
            self.release()

    def release(self) -> None:
        """Poison a value that was sent, and hold nothing."""
        if self.poisons_source:
            poison(self.source)
        self.is_done = True
        del self.target, self.source


class _Early(_Late):
    """A copy that was made when it began."""

    def result(self) -> None:
        if not self.is_done:
            self.release()


class Adversary(Host):
    """A host that turns a read at the wrong moment into NaN.

    ``sent`` poisons the value. What a copy goes to is poisoned when it begins, and filled at once
    or, if ``late``, when it is waited for. A value that others may hold is not ``owned``, and
    stays as it is.
    """

    def __init__(self, *, late: bool, limit: int | str = "1GiB", owned: bool = True) -> None:
        super().__init__(limit, 1e12)
        self.late, self.owned = late, owned
        self.sent = self.fetched = 0

    def send(self, value: Tensor, held: Tensor) -> _Late:
        """Begin to send a value."""
        self.sent += 1
        return self._begin(held, value, poisons_source=self.owned)

    def fetch(self, held: Tensor, value: Tensor) -> _Late:
        """Begin to fetch a value."""
        self.fetched += 1
        return self._begin(value, held, poisons_source=False)

    def _begin(self, target: Tensor, source: Tensor, *, poisons_source: bool) -> _Late:
        poison(target)
        if self.late:
            return _Late(target, source, poisons_source)
        copy(target, source)
        return _Early(target, source, poisons_source)
