"""Prices per byte that a search tries."""

from __future__ import annotations

from fxckpt.solver.program import Program


def price_range(program: Program) -> tuple[float, float]:
    """Return about the seconds per byte below which nothing is recomputed, and above which all is.

    They are the least and the greatest seconds per byte of any op: the former divided by 100, for
    many stages share it, the latter times 100, for chains of ops.
    """
    tables = program.tables
    count = len(program.ops)
    costs = (tables.seconds[:count] > 0) & (tables.written_bytes[:count] > 0)
    if not costs.any():
        return 1e-15, 1e-6
    rates = tables.seconds[:count][costs] / tables.written_bytes[:count][costs]
    return float(rates.min()) / 100, float(rates.max()) * 100


def between(low: float, high: float, count: int) -> list[float]:
    """Return ``count`` prices from low to high, evenly spaced in their logarithm."""
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**i for i in range(count)]
