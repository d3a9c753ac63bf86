"""The bound on the peak counts what must be held while the widest ops run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fxckpt.solver.exact.lower_bounds import LowerBounds
from fxckpt.solver.exact.milp import optimum
from fxckpt.solver.exact.peak_bound import PeakBound
from fxckpt.solver.program import IN_BACKWARD, Link, Op, Program, Side, Storage
from fxckpt.solver.search.price_search import PriceSearch
from fxckpt.solver.search.prices import price_range
from tests.solver.oracle import exhaustive
from tests.solver.programs import programs


def stack(layers: int) -> Program:
    """Layers ``h = f(x); y = x + g(h)`` whose ``h`` has eight times the bytes of ``x``."""
    ops: list[Op] = []
    storages: list[Storage] = []
    backward: list[Op] = []

    def value(name: str, nbytes: int, producer: int) -> int:
        storages.append(Storage(name, nbytes, producer))
        return len(storages) - 1

    def run(name: str, reads: tuple[int, ...], nbytes: int) -> int:
        written = value(name, nbytes, len(ops))
        ops.append(Op(name, Side.FORWARD, 1.0, 1, reads, (written,)))
        return written

    def run_backward(name: str, reads: tuple[int, ...], nbytes: int) -> int:
        written = value(name, nbytes, IN_BACKWARD)
        backward.append(Op(name, Side.BACKWARD, 1.0, 1, reads, (written,)))
        return written

    x = run("x0", (), 1)
    wide = []
    for i in range(layers):
        h = run(f"h{i}", (x,), 8)
        wide.append((x, h))
        x = run(f"x{i + 1}", (x, h), 1)
    gradient = tangent = value("t", 1, IN_BACKWARD)
    for x, h in reversed(wide):
        i = len(wide) - 1 - len(backward) // 2
        wide_gradient = run_backward(f"dh{i}", (gradient, h), 8)
        gradient = run_backward(f"dx{i}", (gradient, wide_gradient, x), 1)
    backward.append(Op("output", Side.BACKWARD, 0.0, 0, (gradient,), ()))
    return Program(tuple(ops), tuple(backward), tuple(storages), (tangent,))


@pytest.mark.parametrize("layers", [2, 3])
def test_an_input_is_held_beside_the_widest_op(layers: int) -> None:
    """``dh`` takes 17 bytes, and no ``x`` but the first can be recomputed beside ``dh``."""
    program = stack(layers)
    bounds = LowerBounds(program, *price_range(program))
    assert max(bounds.at_ops) == 17 and bounds.proven_peak_bytes == 18
    assert optimum(program, 17).seconds is None
    found = PriceSearch()(program, lambda baseline: 18)
    assert found.best is not None and found.best.simulation.peak_bytes == 18
    assert found.peak_bound_bytes == 18


def test_what_can_be_recomputed_is_not_held() -> None:
    """The input of the first layer is recomputed beside its gradient."""
    bounds = LowerBounds(stack(1), 1e-3, 1e3)
    assert bounds.proven_peak_bytes == 17 and optimum(stack(1), 17).seconds == 1.0


def test_what_is_away_is_not_held() -> None:
    program = replace(stack(2), link=Link(1.0, 1.0, 100, frozenset({1, 2})))
    assert LowerBounds(program, 1e-3, 1e3).proven_peak_bytes == 17


def test_a_graph_without_a_backward_has_a_bound() -> None:
    assert PeakBound(replace(stack(1), backward=()), [], []).bytes == 0


@given(program=programs(max_ops=5))
def test_no_schedule_peaks_below_the_bound(program: Program) -> None:
    """No schedule at all fits in a byte less, by a search of all states."""
    bounds = LowerBounds(program, *price_range(program))
    assert exhaustive(program, bounds.proven_peak_bytes - 1) is None
