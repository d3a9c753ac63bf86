"""The oracles agree with each other and bound the planner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.milp import in_forward, optimum
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.search import PriceSearch
from tests.solver.oracle import exhaustive
from tests.solver.programs import interpret, programs


def two_values() -> Program:
    """Two values of ten bytes, made in one and in nine seconds."""
    return Program(
        ops=(
            Op("cheap", Side.FORWARD, 1.0, 1, (), (0,)),
            Op("dear", Side.FORWARD, 9.0, 9, (), (1,)),
        ),
        backward=(
            Op("b0", Side.BACKWARD, 1.0, 1, (1,), (2,)),
            Op("b1", Side.BACKWARD, 1.0, 1, (0,), (3,)),
        ),
        storages=(
            Storage("cheap", 10, 0),
            Storage("dear", 10, 1),
            Storage("g0", 1, IN_BACKWARD),
            Storage("g1", 1, IN_BACKWARD),
        ),
        tangents=(),
    )


@pytest.mark.parametrize(("limit", "seconds"), [(21, 0.0), (20, 1.0), (11, 1.0), (10, None)])
def test_both_know_the_answer_of_two_values(limit: int, seconds: float | None) -> None:
    assert exhaustive(two_values(), limit) == seconds
    assert optimum(two_values(), limit).seconds == (
        None if seconds is None else pytest.approx(seconds)
    )


@given(program=programs(max_ops=4), share=st.floats(0.0, 1.0))
def test_an_order_within_stages_only_restricts(program: Program, share: float) -> None:
    """The integer program runs a stage's ops in topological order; the exhaustive search in any."""
    program = in_forward(program)
    search = PriceSearch(restarts=0)
    limit = int(share * search(program, lambda baseline: baseline).baseline.simulation.peak_bytes)
    any_order, in_order = exhaustive(program, limit), optimum(program, limit)
    assert in_order.is_proven
    if in_order.seconds is not None:
        assert any_order is not None
        assert any_order <= in_order.seconds + 1e-6


@pytest.mark.parametrize(
    "search", [PriceSearch(), PriceSearch(exact_size=0)], ids=["exact", "heuristic"]
)
@given(program=programs(max_ops=5), share=st.floats(0.0, 1.0))
def test_the_planner_finds_the_optimum_of_tiny_programs(
    search: PriceSearch, program: Program, share: float
) -> None:
    found = search(program, lambda baseline: int(share * baseline))
    limit = int(share * found.baseline.simulation.peak_bytes)
    best = exhaustive(program, limit)
    if found.best is None:
        return  # the floor is a search of its own
    assert best is not None
    seconds = interpret(program, found.best.schedule).seconds
    assert found.bound.seconds <= best + 1e-6
    assert best <= seconds + 1e-9
    assert seconds <= 1.05 * best + 1e-9


def test_an_op_on_either_side_is_refused() -> None:
    program = two_values()
    either = Program(
        (Op("cheap", Side.EITHER, 1.0, 1, (), (0,)), program.ops[1]),
        program.backward,
        program.storages,
        (),
    )
    with pytest.raises(ValueError, match="in_forward"):
        optimum(either, 100)
    assert optimum(in_forward(either), 21).seconds == 0.0
