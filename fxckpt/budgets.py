"""Budgets: parsing of the user's budget, and its value in bytes."""

from __future__ import annotations

import math
import numbers
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

import torch

from fxckpt.errors import InvalidBudget
from fxckpt.optimizer_state import bytes_to_come


@dataclass(frozen=True)
class LeastMemory:
    """Budget of the least peak whose extra time is within a share of the step's."""

    max_slowdown: float = math.inf
    """Most extra time as a share of the uncheckpointed step's, by the cost model."""


Budget = int | float | str | LeastMemory | None
"""Bytes (an int or text such as ``"2GiB"``), a fraction in (0, 1] of the uncheckpointed peak
(``0.6`` or ``"60%"``), ``"auto"``, ``"min"``, the least memory within some time, or None."""

_UNITS = {"b": 1}
_UNITS |= {f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)} | {
    p + ending: 1024**n for n, p in enumerate("kmgt", 1) for ending in ("", "i", "ib")
}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]+|%)\s*", re.IGNORECASE)
_ALLOWED = (
    "Allowed: None, bytes as an int (1500000000) or a string ('2GiB' or '2G', '1500MB', "
    "'123456B'), a fraction of the uncheckpointed peak in (0, 1] or as '60%', 'min' (the least "
    "possible), or 'auto'. Example: budget='2GiB'."
)

AUTO_MARGIN = 0.1
"""Share of the free memory that ``"auto"`` leaves for fragmentation and workspace; guess."""


def parse(budget: Budget) -> int | float | str | LeastMemory | None:
    """Return bytes as int, a fraction as float, ``"auto"``, the least memory, or None.

    Raises
    ------
    InvalidBudget
        The budget is none of these.

    >>> parse("1.5 KiB"), parse("2K"), parse("2KB"), parse("60%"), parse("auto")
    (1536, 2048, 2000, 0.6, 'auto')
    """
    if budget is None or isinstance(budget, LeastMemory):
        return budget
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


@cache
def _parse_text(budget: str) -> int | float | str | LeastMemory:
    if (word := budget.strip().lower()) in ("auto", "min"):
        return "auto" if word == "auto" else LeastMemory()
    match = _TEXT.fullmatch(budget)
    unit = match[2].lower() if match else ""
    if match is None or unit not in {*_UNITS, "%"}:
        hint = f"Did you mean '{word}%' or '{word}GiB'? " if word.isdecimal() else ""
        raise InvalidBudget(
            f"budget={budget!r} does not parse as a number of bytes. {hint}{_ALLOWED}"
        )
    if unit == "%":
        share = Fraction(match[1]) / 100
        if not 0 < share <= 1:
            raise InvalidBudget(f"budget={budget!r} is not within (0%, 100%]. {_ALLOWED}")
        return float(share)
    # Exact: in floats "4.35KB" would lose a byte and a long decimal would overflow.
    nbytes = int(Fraction(match[1]) * _UNITS[unit])
    if nbytes <= 0:
        raise InvalidBudget(f"budget={budget!r} is not a positive number of bytes. {_ALLOWED}")
    return nbytes


def parse_region(budget: int | float | str) -> int | float:
    """Return the budget of a region of a model: bytes as int, or a fraction as float.

    Raises
    ------
    InvalidBudget
        The budget is neither.

    >>> parse_region("300MiB"), parse_region(0.0), parse_region("25%")
    (314572800, 0.0, 0.25)
    """
    if isinstance(budget, float) and budget == 0:
        return 0.0
    try:
        parsed = parse(budget)
    except InvalidBudget:
        parsed = None
    if isinstance(parsed, (int, float)):
        return parsed
    raise InvalidBudget(
        f"budget({budget!r}) is no budget of a region. Allowed: bytes to save of its values, as an "
        "int or a string ('300MiB'), or a fraction in [0, 1] or as '40%': 0.0 saves the least "
        "possible, 1.0 is no limit."
    )


def from_text(text: str) -> Budget:
    """Return a budget of the Python type that its text has.

    Raises
    ------
    InvalidBudget
        The text is no budget.

    >>> from_text("4096"), from_text("0.6"), from_text("2GiB"), from_text("none")
    (4096, 0.6, '2GiB', None)
    """
    if text.strip().lower() == "none":
        return None
    value: int | float | str = text
    for kind in (int, float):
        try:
            value = kind(text)
            break
        except ValueError:
            continue
    validate(value)
    return value


def within(budget: Budget, max_slowdown: float | None) -> Budget:
    """Return the budget of a user who may have given a target in time in its place.

    Raises
    ------
    InvalidBudget
        The budget or the target is invalid, or both were given.

    >>> within("2GiB", None), within(None, 0.1)
    ('2GiB', LeastMemory(max_slowdown=0.1))
    """
    parse(budget)
    if max_slowdown is None:
        return budget
    if budget is not None:
        raise InvalidBudget(
            f"budget={budget!r} and max_slowdown={max_slowdown!r} were given: one asks for the "
            "least time in so much memory, the other for the least memory in so much time. Leave "
            "one of them out."
        )
    is_number = isinstance(max_slowdown, numbers.Real) and not isinstance(max_slowdown, bool)
    if not is_number or not 0 <= max_slowdown < math.inf:
        raise InvalidBudget(
            f"max_slowdown={max_slowdown!r} is no share of the step's time. "
            "Example: max_slowdown=0.1 for at most 10 % more."
        )
    return LeastMemory(float(max_slowdown))


def validate(budget: Budget) -> None:
    """Raise :class:`InvalidBudget` for an invalid budget."""
    parse(budget)


def resolve(budget: Budget, *, baseline_peak_bytes: int, device: torch.device) -> int | None:
    """Return a budget in bytes, or None for None.

    A fraction is of ``baseline_peak_bytes``; ``"auto"`` is the free memory of ``device``, less the
    state that optimizers will allocate there (:mod:`fxckpt.optimizer_state`) and
    :data:`AUTO_MARGIN`.

    Raises
    ------
    InvalidBudget
        The budget is invalid or a search's goal (:class:`LeastMemory`), or ``"auto"`` cannot read
        the free memory.
    """
    parsed = parse(budget)
    if isinstance(parsed, LeastMemory):
        raise InvalidBudget(f"budget={budget!r} has no bytes before a plan is searched.")
    if parsed is None or isinstance(parsed, int):
        return parsed
    if isinstance(parsed, float):
        return int(parsed * baseline_peak_bytes)
    return max(1, int((free_bytes(device) - bytes_to_come(device)) * (1 - AUTO_MARGIN)))


def is_in_bytes(budget: Budget) -> bool:
    """Return whether a budget has a value in bytes before a plan is searched.

    >>> is_in_bytes("60%"), is_in_bytes("min"), is_in_bytes(None)
    (True, False, False)
    """
    return not isinstance(parse(budget), (LeastMemory, type(None)))


def free_bytes(device: torch.device) -> int:
    """Return the bytes a step may still allocate.

    On a GPU they are free on the device or in torch's caching allocator; on a CPU they are the
    ``MemAvailable`` of Linux.

    Raises
    ------
    InvalidBudget
        The free memory of the device cannot be read.
    """
    if device.type == "cuda" and torch.cuda.is_available():
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


def format_bytes(nbytes: float, decimals: int = 1) -> str:
    """Return bytes as text.

    >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**30), format_bytes(1540, 3)
    ('512 B', '1.5 KiB', '3.0 GiB', '1.504 KiB')
    """
    size = float(nbytes)
    if abs(size) < 1024:
        return f"{int(size)} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1024:
            return f"{size:.{decimals}f} {unit}"
    return f"{size / 1024:.{decimals}f} TiB"


def format_apart(*sizes: int) -> tuple[str, ...]:
    """Return sizes as texts that differ where the sizes do.

    >>> format_apart(3 * 2**30, 5 * 2**30), format_apart(2**30, 2**30 + 5 * 2**20)
    (('3.0 GiB', '5.0 GiB'), ('1.000 GiB', '1.005 GiB'))
    """
    for decimals in (1, 2, 3):
        texts = tuple(format_bytes(size, decimals) for size in sizes)
        if len(set(texts)) == len(set(sizes)):
            return texts
    return tuple(f"{size} bytes" for size in sizes)


def least_fraction(budget: Budget, floor_bytes: int, baseline_peak_bytes: int) -> str | None:
    """Return the least fraction that ``floor_bytes`` are within, written as ``budget`` is.

    None for a budget that is no fraction, and where no fraction is enough.

    >>> least_fraction(0.2, 407, 1000), least_fraction("20%", 407, 1000), least_fraction(9, 1, 2)
    ('0.41', "'41%'", None)
    """
    if not isinstance(parse(budget), float) or floor_bytes > baseline_peak_bytes:
        return None
    percent = math.ceil(Fraction(100 * floor_bytes, max(1, baseline_peak_bytes)))
    return f"'{percent}%'" if isinstance(budget, str) else f"{percent / 100:.2f}"
