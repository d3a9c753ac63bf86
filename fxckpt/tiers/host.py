"""Host: memory of this machine that the device's allocator does not count."""

from __future__ import annotations

import mmap
from typing import Any

from fxckpt import budgets
from fxckpt.errors import InvalidOption, TierFull
from fxckpt.tiers.tier import Tier


class Host(Tier):
    """Memory of this machine, as the place that saved values are sent to.

    For a model on the CPU it is a second pool, which neither torch's allocator nor
    :func:`fxckpt.measure_peak` counts: what a budget bounds is the rest.

    Parameters
    ----------
    limit:
        Most bytes in use at once: an int, or a string such as ``"64GiB"``.
    bytes_per_second:
        Rate of the copies, or a pair of rates to the host and back. None measures them once.

    Raises
    ------
    InvalidOption
        An argument makes no sense.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from torch import nn
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    >>> host = fxckpt.tiers.Host("1GiB", bytes_per_second=10e9)
    >>> backend = fxckpt.Backend(0.6, inner="aot_eager", offload=host)
    >>> torch.compile(model, backend=backend)(torch.randn(4096, 64)).sum().backward()
    >>> backend.plans[0].away_bytes == host.peak_bytes
    True
    """

    def _new_block(self, nbytes: int) -> Any:
        try:
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise TierFull(
                f"the machine has no {budgets.format_bytes(nbytes)} left for {self!r}: {error}. "
                "Lower the tier's limit, or raise the budget."
            ) from error


class Throttled(Host):
    """A host whose copies take as long as on a slower link, for tests and experiments.

    Parameters
    ----------
    limit, bytes_per_second:
        As for :class:`Host`; the rates are those that copies are slowed to.

    Examples
    --------
    >>> import fxckpt
    >>> fxckpt.tiers.Throttled("1GiB", bytes_per_second=1e9).rates()
    (1000000000.0, 1000000000.0)
    """

    def __init__(self, limit: int | str, bytes_per_second: float | tuple[float, float]) -> None:
        super().__init__(limit, bytes_per_second)
        if not self.has_given_rates:
            raise InvalidOption(
                f"fxckpt.tiers.Throttled({limit!r}, {bytes_per_second!r}): its rates are what "
                "copies are slowed to, and must be given. Example: "
                "fxckpt.tiers.Throttled('64GiB', 10e9); fxckpt.tiers.Host measures its own."
            )

    def _pace(self, way: int) -> float:
        return self.rates()[way]
