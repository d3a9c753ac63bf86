"""Figures of programs that differ in sizes and costs, and the structure that they share."""

from __future__ import annotations

from dataclasses import replace

from fxckpt.solver.figures import figures_of, largest_figures, structure_of, with_figures
from fxckpt.solver.program import Op, Program, Side, Storage


def program(nbytes: int, seconds: float) -> Program:
    ops = (Op("a", Side.FORWARD, seconds, 1, (), (0,)), Op("b", Side.FORWARD, 1.0, 1, (0,), (1,)))
    backward = (Op("c", Side.BACKWARD, 2.0, 1, (0, 1), (), workspace_bytes=nbytes),)
    return Program(ops, backward, (Storage("a", nbytes, 0), Storage("b", 8, 1)), ())


def test_greatest_takes_each_figure_apart() -> None:
    """Bytes may come from one program and seconds from another."""
    merged = largest_figures([figures_of(program(4, 3.0)), figures_of(program(16, 0.5))])
    assert merged.bytes == (16, 8)
    assert merged.seconds == (3.0, 1.0, 2.0)
    assert merged.workspace_bytes == (0, 0, 16)
    assert with_figures(program(4, 0.1), merged) == program(16, 3.0)


def test_structure_leaves_figures_out() -> None:
    """Sizes and costs are no part of it; what an op reads is."""
    first = program(4, 3.0)
    assert structure_of(first) == structure_of(program(16, 0.5))
    other = replace(first, backward=(replace(first.backward[0], reads=(1,)),))
    assert structure_of(first) != structure_of(other)
