"""Lower bounds: what no plan for the given order undercuts, by flow duality.

Peak: while an op runs, its operands, its results and the backward's own live values are there, whatever is planned.

Time: at one moment of the backward every plan within ``limit`` bytes holds at most the limit less the backward's own live values in forward
values. What the rest of the backward needs is then held or made again after that moment, so its time is at least that of the one-stage cut;
copies do not help. With a price p per byte held, ``least(p) - p * room`` bounds the time from below for every p (the Lagrangian dual),
and the bound is the greatest over p and over a few moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from fxckpt.solver.min_cut import Network, Unbounded
from fxckpt.solver.program import FloatArray, IntArray, Program
from fxckpt.solver.schedule import save_all
from fxckpt.solver.simulate import backward_own_profile, simulate
from fxckpt.solver.staged_cut import no_way, stage_cut


@dataclass(frozen=True)
class Bound:
    """No plan takes less than ``seconds``; ``price`` is the bound's own, in seconds per byte."""

    seconds: float
    price: float


@dataclass(frozen=True)
class Least:
    """The cut of one moment at one price."""

    seconds: float
    held: int
    """Bytes."""
    error: float
    """By how much ``seconds + price * held`` may be above the least, from rounding."""


@dataclass(frozen=True)
class Moments:
    """The one-stage cuts of what the backward needs from each of some positions on, laid side by side, each at a price of its own."""

    program: Program
    positions: tuple[int, ...]

    @cached_property
    def _cut(self) -> tuple[Network, IntArray, IntArray]:
        """The network, and the ops and storages of its vertices."""
        length, reach = len(self.program.backward), len(self.program.ops)
        cuts = [
            stage_cut(self.program, range(position, length), reach) for position in self.positions
        ]
        ops, values = (
            chain.from_iterable(c[1] for c in cuts),
            chain.from_iterable(c[2] for c in cuts),
        )
        return (
            Network.disjoint_union([c[0] for c in cuts]),
            np.fromiter(ops, np.int64),
            np.fromiter(values, np.int64),
        )

    @cached_property
    def _known(self) -> dict[tuple[int, float], Least]:
        """By moment and price: bisections for several rooms begin at the same prices."""
        return {}

    def least(self, prices: Sequence[float]) -> list[Least]:
        """Return, for each moment, the least ``seconds + price * held``."""
        if any(key not in self._known for key in enumerate(prices)):
            self._known.update(zip(enumerate(prices), self._solve(np.asarray(prices)), strict=True))
        return [self._known[key] for key in enumerate(prices)]

    def _solve(self, prices: FloatArray) -> Iterator[Least]:
        tables = self.program.tables
        network, ops, values = self._cut
        # The first run of what only the backward needs may be the uncheckpointed step's own.
        seconds = np.where(tables.is_either[ops], 0.0, tables.seconds[ops])
        recompute_cost = np.where(tables.is_rerunnable[ops], seconds, math.inf)
        nbytes = np.where(tables.is_output[values], 0, tables.bytes[values])
        # After the start a value that must not be saved may be at hand all the same, made again before.
        may_keep = (
            tables.is_savable[values]
            | tables.is_output[values]
            | (np.asarray(self.positions) > 0)[network.part_of_value]
        )
        keep_cost = np.where(may_keep, nbytes * prices[network.part_of_value], math.inf)
        try:
            kept, runs = network.solve(recompute_cost, keep_cost)
        except Unbounded as error:
            raise no_way(self.program, int(values[error.value])) from error
        for moment, rounding in enumerate(network.errors(recompute_cost, keep_cost).tolist()):
            held = kept & (network.part_of_value == moment)
            again = runs & (network.part_of_op == moment)
            yield Least(float(seconds[again].sum()), int(nbytes[held].sum()), rounding)

    def bound(self, rooms: Sequence[int], low: float, high: float, steps: int) -> Bound:
        """Return the greatest bound of prices between ``low`` and ``high``, for at most so many bytes held at each moment."""
        best = [Bound(0.0, 0.0)] * len(rooms)
        ends = [(low, high)] * len(rooms)
        for _ in range(steps):
            prices = [(a * b) ** 0.5 for a, b in ends]
            for i, (price, least) in enumerate(zip(prices, self.least(prices), strict=True)):
                seconds = least.seconds + price * (least.held - rooms[i]) - least.error
                if seconds > best[i].seconds:
                    best[i] = Bound(seconds, price)
                ends[i] = (ends[i][0], price) if least.held <= rooms[i] else (price, ends[i][1])
        return max(best, key=lambda b: b.seconds)


@dataclass(frozen=True)
class LowerBounds:
    """Bounds on any plan of one program, whatever the budget."""

    program: Program
    low: float
    """Seconds per byte below which nothing is worth recomputing."""
    high: float
    steps: int = 12

    @cached_property
    def peak_bytes(self) -> int:
        """Least peak of any plan."""
        program, tables = self.program, self.program.tables
        outputs = int(tables.bytes[tables.is_output].sum())
        nbytes, not_held = (
            tables.bytes.tolist(),
            np.where(tables.is_output, 0, tables.bytes).tolist(),
        )
        forward = [program.ops[o] for o in program.always_forward]
        at_ops = [
            sum([nbytes[s] for s in {*op.reads, *op.writes}]) + op.workspace_bytes for op in forward
        ]
        for own, op, reads in zip(self._own, program.backward, program.forward_reads, strict=True):
            at_ops.append(own + outputs + sum([not_held[s] for s in reads]) + op.workspace_bytes)
        return max(at_ops, default=0)

    def seconds(self, limit: int) -> Bound:
        """Return the bound on the time of any plan of at most ``limit`` bytes."""
        outputs = int(self.program.tables.bytes[self.program.tables.is_output].sum())
        rooms = [
            limit - outputs - self._own_before(position) for position in self._moments.positions
        ]
        return self._moments.bound(rooms, self.low, self.high, self.steps)

    @cached_property
    def _own(self) -> list[int]:
        return backward_own_profile(self.program)

    def _own_before(self, position: int) -> int:
        """Return the backward's own bytes while op ``position`` runs; at the start only the incoming gradients."""
        return self._own[position] if position else self.program.tangent_bytes

    @cached_property
    def _moments(self) -> Moments:
        """The start, and where the uncheckpointed backward and its own values peak."""
        schedule = save_all(self.program)
        simulation = simulate(self.program, schedule)
        ops = np.arange(len(self._own))
        at_ops = simulation.live[
            simulation.forward_ops + ops + np.searchsorted(schedule.before, ops, side="right")
        ]
        return Moments(
            self.program, tuple(sorted({0, int(at_ops.argmax()), int(np.argmax(self._own))}))
        )
