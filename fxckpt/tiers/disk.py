"""Disk: files of a folder, mapped into memory."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import torch

from fxckpt import budgets
from fxckpt.errors import InvalidOption, TierFull
from fxckpt.tiers.tier import MEASURED_BYTES, MEASURED_RUNS, Tier

LEAST_MEASURED_BYTES = 2**20
"""Bytes of the smallest file that rates are measured by, on a disk that is almost full."""


class Disk(Tier):
    """A disk, as the place that saved values are sent to.

    Each value that is away has a file of its own, without a name: its space is taken before the
    value is sent, and free again when the process ends, however it ends. The machine's page cache
    keeps of the files what it has room for. One file handle is open for each value.

    Parameters
    ----------
    path:
        A folder on the disk, which exists. One in memory (``/dev/shm``, or ``/tmp`` on many
        machines) is a host by another name.
    limit, bytes_per_second:
        As for :class:`fxckpt.tiers.Host`. None measures the rates of the disk itself, past the
        page cache, by a few files of 32 MiB, or of less where no more is free.

    Raises
    ------
    InvalidOption
        An argument makes no sense, or the folder cannot be written to.

    Examples
    --------
    >>> import tempfile, torch, fxckpt
    >>> from torch import nn
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    >>> disk = fxckpt.tiers.Disk(tempfile.gettempdir(), "1GiB", bytes_per_second=1e12)
    >>> backend = fxckpt.Backend(0.6, inner="aot_eager", offload=disk)
    >>> torch.compile(model, backend=backend)(torch.randn(4096, 64)).sum().backward()
    >>> disk.used_bytes, backend.plans[0].away_bytes > 0
    (0, True)
    """

    _locks_pages = False
    _is_shared_by_forks = True

    def __init__(
        self,
        path: str | Path,
        limit: int | str,
        bytes_per_second: float | tuple[float, float] | None = None,
    ) -> None:
        super().__init__(limit, bytes_per_second)
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidOption(
                f"fxckpt.tiers.Disk({path!r}): that is no path. Give a folder that exists and that "
                "this process may write to."
            )
        if not os.fspath(path):
            raise InvalidOption(
                f"fxckpt.tiers.Disk({path!r}): that names no folder. Give one that exists and that "
                "this process may write to; '.' is the current one."
            )
        self.path = Path(path)
        """The folder."""
        try:
            self._file().close()
        except (OSError, ValueError) as error:  # A ValueError is of a null character.
            raise InvalidOption(
                f"fxckpt.tiers.Disk({str(path)!r}): no file can be made there: {error}. Give a "
                "folder that exists and that this process may write to."
            ) from error

    def __repr__(self) -> str:
        limit, rate = self._given
        given = "" if rate is None else f", bytes_per_second={rate!r}"
        return f"fxckpt.tiers.Disk({str(self.path)!r}, {limit!r}{given})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.path, *self._given))

    def _file(self) -> IO[bytes]:
        """Return a new file without a name."""
        return tempfile.TemporaryFile(dir=self.path, prefix="fxckpt-")

    def _new_block(self, nbytes: int) -> Any:
        try:
            with self._file() as file:
                # A write to a mapped page of a full disk would end the process.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return mmap.mmap(file.fileno(), nbytes)
        except (OSError, ValueError, OverflowError) as error:
            in_use = budgets.format_bytes(self._used_bytes - nbytes)
            raise self._no_room(nbytes, f", with {in_use} of it in use", error) from error

    def _no_room(self, nbytes: int, in_use: str, error: Exception) -> TierFull:
        """Return the error for a file that cannot be made or filled."""
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return TierFull(
                f"{self!r} has a file open for each value that is away, and there are no file "
                f"descriptors left for one of {budgets.format_bytes(nbytes)}{in_use}: {error}. "
                "Raise their limit (ulimit -n), send fewer values, or raise the budget."
            )
        return TierFull(
            f"the disk of {self!r} has no room for {budgets.format_bytes(nbytes)} more{in_use}: "
            f"{error}. Make room there, name another folder, or raise the budget."
        )

    def _measure(self, device: torch.device) -> tuple[float, float]:
        data = os.urandom(min(MEASURED_BYTES, self.limit_bytes))
        while True:
            try:
                return self._measured_by(data)
            except OSError as error:
                if len(data) <= LEAST_MEASURED_BYTES:
                    raise self._no_room(len(data), " to measure its rates by", error) from error
            data = data[: max(len(data) // 4, LEAST_MEASURED_BYTES)]

    def _measured_by(self, data: bytes) -> tuple[float, float]:
        """Return the rates of a file of some bytes, each way."""
        away, back = [], []
        for _ in range(MEASURED_RUNS):
            with self._file() as file:
                begin = time.perf_counter()
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                away.append(time.perf_counter() - begin)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                begin = time.perf_counter()
                file.read()
                back.append(time.perf_counter() - begin)
        return len(data) / min(away), len(data) / min(back)
