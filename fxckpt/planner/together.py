"""One plan for the ranks of a group, which differ in sizes, costs and free memory.

Every rank brings the figures of its program; the first rank searches once, at the largest sizes and
the slowest costs, and all take what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fxckpt.errors import BudgetInfeasible, RanksDisagree
from fxckpt.planner.ranks import Ranks
from fxckpt.solver.figures import Figures, figures_of, largest_figures, structure_of, with_figures
from fxckpt.solver.program import Program

Found = TypeVar("Found")


@dataclass(frozen=True)
class Proposal:
    """Figures of one rank's graph."""

    structure: str
    """Hash of the program without figures."""
    figures: Figures
    room: int | None = None
    """Bytes that only this rank knows of, such as its free memory; None if none are asked for."""


def search_together(
    ranks: Ranks,
    subject: str,
    program: Program,
    search: Callable[[Program, int | None], Found],
    room: int | None = None,
) -> tuple[Program, Found]:
    """Return a program with the greatest figures of all ranks, and the search's result for it.

    The first rank alone calls ``search``, with that program and the least ``room`` of all. Raises
    on all ranks what it raises, and :class:`RanksDisagree` if the ranks' programs differ.
    """

    def choose(proposals: Sequence[Proposal]) -> tuple[Figures, Found]:
        """Search the program of the greatest figures; raise if two programs differ."""
        first = proposals[0]
        for rank, each in enumerate(proposals):
            if each.structure != first.structure:
                raise RanksDisagree(
                    f"ranks 0 and {rank} compile other programs as {subject}: of "
                    f"{len(first.figures.seconds)} and {len(each.figures.seconds)} ops. Ranks of "
                    "one group must run one program, whose sizes alone may differ. Give each "
                    "program its own group, or none: fxckpt.Backend(group=...)."
                )
        figures = largest_figures([each.figures for each in proposals])
        rooms = [each.room for each in proposals if each.room is not None]
        try:
            return figures, search(with_figures(program, figures), min(rooms, default=None))
        except BudgetInfeasible as error:
            total = [sum(each.figures.bytes) for each in proposals]
            if min(total) < max(total):
                raise error.on_rank(total.index(max(total))) from error
            raise

    proposal = Proposal(structure_of(program), figures_of(program), room)
    figures, found = ranks.decide(subject, proposal, choose)
    return with_figures(program, figures), found
