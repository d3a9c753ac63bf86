"""Budgets: parsing of the user's budget, and its value in bytes."""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction
from pathlib import Path

import torch

from fxckpt.errors import InvalidBudget

Budget = int | float | str | None
"""Bytes (an int or text such as ``"2GiB"``), a fraction in (0, 1], ``"auto"``, or None."""

_UNITS = {"b": 1}
_UNITS |= {f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)} | {
    f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)
}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]+)\s*", re.IGNORECASE)
_ALLOWED = (
    "Allowed: None, bytes as an int (1500000000) or a string ('1500MB', '2GiB', '123456B'), "
    "a fraction of the uncheckpointed peak in (0, 1], or 'auto'. Example: budget='2GiB'."
)

AUTO_MARGIN = 0.1
"""Share of the free memory that ``"auto"`` leaves for fragmentation and workspace; guess."""


def parse(budget: Budget) -> int | float | str | None:
    """Return bytes as int, a fraction as float, ``"auto"`` or None.

    Raises
    ------
    InvalidBudget
        The budget is none of these.

    >>> parse("1.5 KiB"), parse(0.5), parse("auto")
    (1536, 0.5, 'auto')
    """
    if budget is None:
        return None
    if isinstance(budget, numbers.Integral) and not isinstance(budget, bool):
        budget = int(budget)  # such as numpy's
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise InvalidBudget(f"budget={budget!r} is a {type(budget).__name__}. {_ALLOWED}")
    if isinstance(budget, str):
        return _parse_text(budget)
    if isinstance(budget, float):
        if math.isnan(budget) or not 0 < budget <= 1:
            raise InvalidBudget(f"budget={budget!r} is not a fraction in (0, 1]. {_ALLOWED}")
        return budget
    if budget <= 0:
        raise InvalidBudget(f"budget={budget!r} is not a positive number of bytes. {_ALLOWED}")
    return budget


def _parse_text(budget: str) -> int | str:
    if budget.strip().lower() == "auto":
        return "auto"
    match = _TEXT.fullmatch(budget)
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidBudget(f"budget={budget!r} does not parse as a number of bytes. {_ALLOWED}")
    # Exact: in floats "4.35KB" would lose a byte and a long decimal would overflow.
    nbytes = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if nbytes <= 0:
        raise InvalidBudget(f"budget={budget!r} is not a positive number of bytes. {_ALLOWED}")
    return nbytes


def validate(budget: Budget) -> None:
    """Raise :class:`InvalidBudget` for an invalid budget."""
    parse(budget)


def resolve(budget: Budget, *, baseline_peak_bytes: int, device: torch.device) -> int | None:
    """Return a budget in bytes, or None for None.

    A fraction is of ``baseline_peak_bytes``; ``"auto"`` is the free memory of ``device`` less
    :data:`AUTO_MARGIN`.

    Raises
    ------
    InvalidBudget
        The budget is invalid, or ``"auto"`` cannot read the free memory.
    """
    parsed = parse(budget)
    if parsed is None or isinstance(parsed, int):
        return parsed
    if isinstance(parsed, float):
        return int(parsed * baseline_peak_bytes)
    return int(free_bytes(device) * (1 - AUTO_MARGIN))


def free_bytes(device: torch.device) -> int:
    """Return the bytes a step may still allocate.

    On a GPU they are free on the device or in torch's caching allocator; on a CPU they are the
    ``MemAvailable`` of Linux.

    Raises
    ------
    InvalidBudget
        The free memory of the device cannot be read.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")  # Linux only
    for line in (
        meminfo.read_text().splitlines() if device.type == "cpu" and meminfo.exists() else ()
    ):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise InvalidBudget(
        f"budget='auto' cannot read the free memory of {device}. "
        "Give bytes instead, for example budget='2GiB'."
    )


def format_bytes(nbytes: float) -> str:
    """Return bytes as text.

    >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    size = float(nbytes)
    if abs(size) < 1024:
        return f"{int(size)} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
