"""Ways to run the stage of a block: what is held for it until then, and what it recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from fxckpt.solver.blocks.block_program import BlockProgram, BlockPrograms
from fxckpt.solver.blocks.partition import Blocks
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Schedule
from fxckpt.solver.simulate import Simulation

MOST_WAYS = 16
"""Most ways of one block, spread evenly from the fastest to the smallest."""


@dataclass(frozen=True)
class Way:
    """One way to run the stage of a block."""

    saved: tuple[int, ...]
    """Storages of the block that are held from its run of the forward on."""
    runs: tuple[int, ...]
    """Forward ops that the stage recomputes."""
    before: tuple[int, ...]
    """Backward op that each recompute precedes."""
    held_bytes: int
    """Bytes held from the run of the forward on, also of values from earlier blocks."""
    stage_bytes: int
    """Bytes that the stage takes, with all that is live."""
    forward_bytes: int
    """Bytes that the run of the forward takes, beside what is live before it."""
    run_bytes: int
    """Bytes that the forward and then the stage take, with all that is live."""
    extra_seconds: float
    """Seconds of the stage's recomputes."""
    run_seconds: float
    """Seconds of the forward ops that write what is held."""
    pass_seconds: float
    """Seconds of the forward ops that write what is held, and what crosses the next boundary."""

    @property
    def rank(self) -> tuple[float, int, int, float]:
        """Figures of which at least one is less in any way that is worth a try."""
        return (self.extra_seconds, self.held_bytes, self.stage_bytes, self.run_seconds)


Candidates = Callable[[Program, int], Iterable[tuple[Schedule, Simulation]]]
"""Search of a block's program, given with the number of different ones."""


def ways_of_blocks(programs: BlockPrograms, search: Candidates) -> tuple[tuple[Way, ...], ...]:
    """Return the ways of each block; blocks of one shape are searched once."""
    found = [programs.of(block) for block in range(programs.blocks.count)]
    kinds = dict.fromkeys(each.program for each in found)
    candidates = {kind: list(search(kind, len(kinds))) for kind in kinds}
    return tuple(
        ways_of(programs.blocks, block, each, candidates[each.program])
        for block, each in enumerate(found)
    )


def ways_of(
    blocks: Blocks,
    block: int,
    found: BlockProgram,
    candidates: Iterable[tuple[Schedule, Simulation]],
) -> tuple[Way, ...]:
    """Return the ways of a block that no other one is better than, the fastest first.

    ``candidates`` are schedules of the block's program.
    """
    seconds = blocks.program.tables.seconds
    entering = found.program.tangent_bytes
    own = {*chain.from_iterable(blocks.program.ops[o].writes for o in found.ops)}
    ways = []
    for schedule, simulation in candidates:
        saved = tuple(s for i in schedule.saved if (s := found.storages[i]) in own)
        forward = int(simulation.live[: simulation.forward_ops].max(initial=0))
        stage = int(simulation.live[simulation.forward_ops :].max(initial=0))
        runs, before = found.recomputes(schedule)
        passed = blocks.writers((*saved, *blocks.crossing[block + 1]), block)
        ways.append(
            Way(
                saved,
                runs,
                before,
                simulation.saved_bytes,
                found.outside_bytes + stage,
                forward,
                found.outside_bytes + (max(stage, forward + entering) if saved else stage),
                simulation.extra_seconds,
                float(seconds[blocks.writers(saved, block)].sum()),
                float(seconds[passed].sum()),
            )
        )
    ways.sort(key=lambda way: way.rank)
    kept: list[Way] = []
    for way in ways:
        if not any(
            all(a <= b for a, b in zip(other.rank, way.rank, strict=True)) for other in kept
        ):
            kept.append(way)
    chosen = np.unique(np.linspace(0, len(kept) - 1, min(len(kept), MOST_WAYS)).astype(int))
    return tuple(kept[i] for i in chosen.tolist())
