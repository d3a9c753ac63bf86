"""The program of a block, and what it leaves out."""

from __future__ import annotations

from fxckpt.solver.blocks.block_program import BlockPrograms
from fxckpt.solver.blocks.partition import Blocks
from fxckpt.solver.program import Op, Program, Side
from fxckpt.solver.schedule import save_all
from fxckpt.solver.simulate import simulate
from tests.solver.programs import blocks


def _reads(program: Program) -> list[tuple[str, ...]]:
    """Return the bytes of what each op reads, and of what it writes."""
    nbytes = [str(s.bytes) for s in program.storages]
    return [
        (*(nbytes[s] for s in op.reads), "->", *(nbytes[s] for s in op.writes))
        for op in (*program.ops, *program.backward)
    ]


def test_a_block_is_a_program() -> None:
    """The last of three blocks: an op writes what crosses into it, and its gradient leaves."""
    programs = BlockPrograms(Blocks.of(blocks(3, crossing=10, inner=20), [3, 5], holds_inputs=True))
    found = programs.of(2)
    assert _reads(found.program) == [
        ("->", "10"),
        ("10", "->", "20"),
        ("20", "->", "10"),
        ("10", "20", "->", "20"),
        ("20", "10", "->", "10"),
        ("10", "->"),
    ]
    assert found.program.ops[0].no_recompute is not None
    assert (found.ops, found.stage, found.outside_bytes) == ((5, 6), range(0, 2), 0)
    assert found.program.tangent_bytes == 10


def test_blocks_of_one_shape_have_equal_programs() -> None:
    """Inner blocks of a stack differ by nothing."""
    programs = BlockPrograms(Blocks.of(blocks(5, crossing=10, inner=20), [3, 5, 7, 9]))
    assert programs.of(1).program == programs.of(2).program == programs.of(3).program


def test_gradients_that_pass_are_outside() -> None:
    """A gradient that the last block's stage writes and returns is live beside the others."""
    program = blocks(2, crossing=10, inner=20)
    last = program.backward[-1]
    returned = program.backward[0].writes[0]
    output = Op("output", Side.BACKWARD, 0.0, 0, (*last.reads, returned), ())
    program = Program(
        program.ops, (*program.backward[:-1], output), program.storages, program.tangents
    )
    programs = BlockPrograms(Blocks.of(program, [3], holds_inputs=True))
    assert programs.of(1).outside_bytes == 0
    assert programs.bytes_before(0) == 30
    # It is an operand of the output, which is in the stage of the first block.
    assert programs.of(0).program.tangent_bytes == 30


def test_whole_peaks_are_those_of_stages() -> None:
    """Where all is saved, the widest stage beside what others hold is the peak of the whole."""
    program = blocks(3, crossing=10, inner=20)
    programs = BlockPrograms(Blocks.of(program, [3, 5], holds_inputs=True))
    found = programs.of(2)
    whole = simulate(program, save_all(program))
    alone = simulate(found.program, save_all(found.program))
    assert whole.peak_bytes == alone.peak_bytes + found.outside_bytes + 2 * 20 + 2 * 10
