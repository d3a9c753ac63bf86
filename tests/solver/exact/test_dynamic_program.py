"""The dynamic program over sets of live values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.exact.dynamic_program import DynamicProgram
from fxckpt.solver.exact.milp import in_forward, optimum
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import save_all
from fxckpt.solver.simulate import simulate
from tests.solver.oracle import exhaustive
from tests.solver.programs import chain, interpret, on_either_side, programs, two_values


@pytest.mark.parametrize(("limit", "seconds"), [(21, 0.0), (20, 1.0), (11, 1.0), (10, None)])
def test_two_values(limit: int, seconds: float | None) -> None:
    """The optimum of a program of two values is known."""
    assert DynamicProgram(two_values()).optimum(limit).seconds == seconds


@given(program=programs(max_ops=5), share=st.floats(0.0, 1.0))
def test_agrees_with_the_integer_program(program: Program, share: float) -> None:
    """Both have the same least extra time, and the schedule takes it within the limit."""
    program = in_forward(program)
    limit = int(share * simulate(program, save_all(program)).peak_bytes)
    expected, found = optimum(program, limit), DynamicProgram(program).optimum(limit)
    assert expected.is_proven and (found.seconds is None) is (expected.seconds is None)
    if found.seconds is None:
        return
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-6, abs=1e-6)
    assert found.schedule is not None
    simulation = simulate(program, found.schedule)
    assert simulation.peak_bytes <= limit
    assert simulation.extra_seconds <= found.seconds + 1e-9
    assert interpret(program, found.schedule).seconds == pytest.approx(simulation.extra_seconds)


def two_results() -> Program:
    """Return a program of an op of two results, an output and one that the backward reads last."""
    return Program(
        ops=(Op("both", Side.FORWARD, 1.0, 1, (), (0, 1)),),
        backward=(
            Op("b0", Side.BACKWARD, 1.0, 1, (0,), (2,)),
            Op("b1", Side.BACKWARD, 1.0, 1, (0, 1), (3,)),
        ),
        storages=(
            Storage("output", 5, 0, is_output=True),
            Storage("value", 10, 0),
            Storage("g0", 12, IN_BACKWARD),
            Storage("g1", 0, IN_BACKWARD),
        ),
        tangents=(),
    )


@pytest.mark.parametrize(("limit", "seconds"), [(27, 0.0), (26, 1.0), (20, 1.0), (19, None)])
def test_a_copy_of_an_output_counts(limit: int, seconds: float | None) -> None:
    """A recompute writes a second copy of an output, which dies with it although it is read."""
    assert exhaustive(two_results(), limit) == seconds
    assert optimum(two_results(), limit).seconds == seconds
    assert DynamicProgram(two_results()).optimum(limit).seconds == seconds


def test_a_chain_has_the_shortest_path() -> None:
    """At every limit the recomputes of a chain are as few as on any path through all states."""
    program = chain(6)
    found = [DynamicProgram(program).optimum(limit).seconds for limit in range(20, 81, 10)]
    assert found == [exhaustive(program, limit) for limit in range(20, 81, 10)]
    assert found[0] is None and found[-1] == 0 and 0 < found[2] < found[1]


def test_more_memory_never_takes_more_time() -> None:
    """A chain beyond the integer program's reach is solved at every limit."""
    solver = DynamicProgram(chain(15))
    found = [solver.optimum(limit).seconds for limit in range(40, 180, 10)]
    assert found == sorted(found, reverse=True) and found[-1] == 0


def test_longer_chains_have_more_states() -> None:
    """The size is known before the program is solved, and counts values of use alone."""
    sizes = [DynamicProgram(chain(length)).size for length in (4, 8, 16, 400)]
    assert sizes == sorted(sizes) and sizes[0] == sum((k + 1) << k for k in (4, 3, 2, 1))


def test_values_of_no_use_have_no_state() -> None:
    """A value that the backward never reads is no part of a state."""
    program = two_values()
    more = Program(
        (*program.ops, Op("unread", Side.FORWARD, 1.0, 1, (0,), (len(program.storages),))),
        program.backward,
        (*program.storages, Storage("unread", 100, len(program.ops))),
        program.tangents,
    )
    assert DynamicProgram(more).size == DynamicProgram(program).size


def test_refuses_ops_on_either_side() -> None:
    """Ops have one side, as for the integer program."""
    with pytest.raises(ValueError, match="in_forward"):
        DynamicProgram(on_either_side())
