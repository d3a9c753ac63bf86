"""Blocks of the forward, their stages of the backward, and what crosses between them."""

from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.blocks.partition import Blocks
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from tests.solver.programs import blocks, programs


def test_blocks_have_stages_in_reverse() -> None:
    """Two blocks of a stack: the later one's stage comes first, and one value crosses."""
    found = Blocks.of(blocks(2, crossing=10, inner=20), [3], holds_inputs=True)
    assert found.ops == ((0, 1, 2), (3, 4))
    assert found.stages == (range(2, 5), range(0, 2))
    assert found.crossing == (frozenset(), {2}, frozenset())
    assert found.writers([4], 1) == [3, 4]


def test_inputs_may_be_read_after_a_stage() -> None:
    """Where stages do not hold their inputs, the earlier block's reads what crossed."""
    found = Blocks.of(blocks(2, crossing=10, inner=20), [3])
    assert found.stages == (range(1, 5), range(0, 1))


def test_blocks_without_a_stage_are_joined() -> None:
    """The first of three blocks has no reader in the backward: it belongs to the next one."""
    program = Program(
        tuple(Op(f"f{i}", Side.FORWARD, 1.0, 1, (i - 1,) if i else (), (i,)) for i in range(3)),
        (
            Op("b2", Side.BACKWARD, 1.0, 1, (2,), (3,)),
            Op("b1", Side.BACKWARD, 1.0, 1, (1, 3), (4,)),
        ),
        (*(Storage(f"v{i}", 1, i) for i in range(3)), *(Storage("g", 1, IN_BACKWARD),) * 2),
        (),
    )
    found = Blocks.of(program, [1, 2])
    assert found.ops == ((0, 1), (2,))
    assert found.stages == (range(1, 2), range(0, 1))


def test_values_across_many_blocks_are_carried() -> None:
    """What the first block writes and the last reads is held throughout; so are outputs.

    The block of the output, which the backward need not run again, is joined to the next one.
    """
    program = Program(
        tuple(
            Op(f"f{i}", Side.FORWARD, 1.0, 1, {0: (), 4: (0, 3)}.get(i, (i - 1,)), (i,))
            for i in range(5)
        ),
        tuple(Op(f"b{i}", Side.BACKWARD, 1.0, 1, (i,), (9 - i,)) for i in reversed(range(5))),
        (
            *(Storage(f"v{i}", 1, i, is_output=i == 2) for i in range(5)),
            *(Storage(f"g{i}", 1, IN_BACKWARD) for i in range(5)),
        ),
        (),
    )
    found = Blocks.of(program, [1, 2, 3, 4])
    assert found.carried == {0, 2}
    assert found.crossing == (frozenset(), frozenset(), {1}, {3}, frozenset())


@given(program=programs(), data=st.data())
def test_each_op_is_in_one_block(program: Program, data: st.DataObject) -> None:
    """Blocks have all forward ops, and their stages are all of the backward, the last first."""
    boundaries = data.draw(st.sets(st.integers(1, max(1, len(program.ops) - 1))))
    found = Blocks.of(program, sorted(boundaries))
    assert sorted(chain.from_iterable(found.ops)) == list(range(len(program.ops)))
    assert list(chain.from_iterable(found.stages[::-1])) == list(range(len(program.backward)))
    assert all(found.stages)
    assert all(later.stop == earlier.start for earlier, later in pairwise(found.stages))
