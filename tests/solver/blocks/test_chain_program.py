"""Nested schedules of chains: as fast as any, and legal for any program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.blocks.block_program import BlockPrograms
from fxckpt.solver.blocks.chain_program import ChainProgram
from fxckpt.solver.blocks.partition import Blocks
from fxckpt.solver.blocks.ways import ways_of_blocks
from fxckpt.solver.exact.dynamic_program import DynamicProgram
from fxckpt.solver.exact.milp import in_forward, optimum
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import Schedule, with_runs
from fxckpt.solver.search.local_search import LocalSearch
from fxckpt.solver.search.options import SearchOptions
from fxckpt.solver.search.price_search import PriceSearch
from fxckpt.solver.simulate import Simulation, simulate
from tests.solver.programs import QUICK_SEARCH, blocks, chain, interpret, programs


def pebbles(length: int) -> Program:
    """Return a chain of values of a byte that the backward reads one by one, without gradients."""
    loss = Op("loss", Side.FORWARD, 1.0, 1, (length - 1,), (length,))
    gradients = range(length + 1, 2 * length + 1)
    return Program(
        (
            *(
                Op(f"f{i}", Side.FORWARD, 1.0, 1, (i - 1,) if i else (), (i,))
                for i in range(length)
            ),
            loss,
        ),
        tuple(
            Op(f"b{i}", Side.BACKWARD, 1.0, 1, (i, *((g - 1,) if g > gradients[0] else ())), (g,))
            for g, i in zip(gradients, reversed(range(length)), strict=True)
        ),
        (
            *(Storage(f"v{i}", 1, i) for i in range(length)),
            Storage("loss", 0, length, is_output=True),
            *(Storage(f"g{i}", 0, IN_BACKWARD) for i in range(length)),
        ),
        (),
    )


def _every_schedule(program: Program, kinds: int) -> Iterator[tuple[Schedule, Simulation]]:
    """Yield the schedules of a block's program that recompute ops in their order, once."""
    ops = range(1, len(program.ops))
    for runs in itertools.chain.from_iterable(combinations(ops, n) for n in range(len(ops) + 1)):
        for before in product(range(len(program.backward)), repeat=len(runs)):
            if list(before) == sorted(before):
                schedule = with_runs(program, runs, before)
                yield schedule, simulate(program, schedule)


@pytest.mark.parametrize("limit", [3, 4, 5, 7])
def test_chains_are_reversed_in_fewest_ops(limit: int) -> None:
    """Of twelve values the schedule takes as long as the best of all schedules."""
    program = pebbles(12)
    programs = BlockPrograms(Blocks.of(program, range(1, 12), holds_inputs=True))
    found = ChainProgram(programs, ways_of_blocks(programs, _every_schedule), limit, limit)
    schedule = found.schedule(limit)
    assert schedule is not None
    ran = interpret(program, schedule)
    assert max(ran.profile) <= limit
    exact = DynamicProgram(in_forward(program)).optimum(limit)
    assert ran.seconds == found.seconds(limit) == exact.seconds


def test_rounding_leaves_room_for_every_value() -> None:
    """Four values of 99 bytes fit 396 bytes in parts of 7, of which each takes little over 14."""
    small = pebbles(12)
    storages = tuple(replace(s, bytes=99 * s.bytes) for s in small.storages)
    programs = BlockPrograms(
        Blocks.of(replace(small, storages=storages), range(1, 12), holds_inputs=True)
    )
    found = ChainProgram(programs, ways_of_blocks(programs, _every_schedule), 396, 64)
    assert found.seconds(396) == DynamicProgram(in_forward(small)).optimum(4).seconds
    schedule = found.schedule(396)
    assert schedule is not None
    assert max(interpret(programs.blocks.program, schedule).profile) <= 396


@pytest.mark.parametrize("limit", [40, 70, 80, 90, 100, 120])
def test_stacks_are_as_fast_as_the_optimum(limit: int) -> None:
    """Of five blocks the schedule takes no longer than that of the integer program.

    So it is where none needs to hold a value by turns: at 60 bytes the optimum does.
    """
    program = blocks(5, crossing=10, inner=20)
    search = LocalSearch(SearchOptions(small_chain_blocks=(8,)), program)
    schedules = [search.chain_program(limit, form).schedule(limit) for form in search.chain_forms]
    exact = optimum(program, limit)
    assert exact.is_proven
    fitting = [simulate(program, schedule) for schedule in schedules if schedule is not None]
    assert all(simulation.peak_bytes <= limit for simulation in fitting)
    seconds = min((simulation.extra_seconds for simulation in fitting), default=None)
    assert seconds == (exact.seconds and pytest.approx(exact.seconds))


def chain_of(program: Program, limit: int) -> ChainProgram:
    """The dynamic program over the finest chain of blocks."""
    search = LocalSearch(SearchOptions(), program)
    return search.chain_program(limit, search.chain_forms[0])


def test_no_schedule_below_the_least() -> None:
    """A limit below the widest op has none; more memory never takes more time."""
    found = chain_of(chain(64), 1300)
    assert found.schedule(19) is None
    assert found.least_limit(-1.0) is None
    least = found.least_limit(1000.0)
    assert least is not None
    seconds = [found.seconds(limit) for limit in range(least, 1300, 20)]
    assert seconds == sorted(seconds, reverse=True)
    assert math.isinf(found.seconds(least - 10))


def test_no_schedule_without_a_way() -> None:
    """Where a block's stage can not be run there is no schedule, however great the limit."""
    found = chain_of(chain(64), 1300)
    assert found.schedule(1300) is not None
    assert replace(found, ways=(*found.ways[:-1], ())).schedule(1300) is None


@given(program=programs(), data=st.data())
def test_any_program_follows_its_chain(program: Program, data: st.DataObject) -> None:
    """The interpreter finds every value that a schedule reads, and the simulator's figures."""
    search = LocalSearch(QUICK_SEARCH, program)
    peak = search.baseline.simulation.peak_bytes
    limit = data.draw(st.integers(0, 2 * peak + 1))
    if not search.chain_forms:
        return
    found = search.chain_program(limit, data.draw(st.sampled_from(search.chain_forms)))
    schedule = found.schedule(limit)
    if schedule is None:
        return
    ran, simulation = interpret(program, schedule), simulate(program, schedule)
    assert ran.profile == list(simulation.profile)
    assert ran.seconds == pytest.approx(simulation.extra_seconds)


def test_search_goes_below_single_recomputes() -> None:
    """Of 64 equal values, a plan fits what no plan that recomputes each once fits."""
    program = chain(64)
    search = PriceSearch()
    once = min(
        simulate(program, LocalSearch(search, program).heuristics.block_boundaries(n)).peak_bytes
        for n in (4, 8, 16)
    )
    found = search(program, lambda baseline: once - 40).best
    assert found is not None and max(interpret(program, found.schedule).profile) <= once - 40
