"""Lower bounds: what no plan for the given order undercuts, by flow duality.

Peak: while an op runs, its operands, its results and the backward's own live values are there, whatever is planned.

Time: at one moment of the backward every plan within ``limit`` bytes holds at most the limit less the backward's own live values in forward
values. What the rest of the backward needs is then held or made again after that moment, so its time is at least that of the one-stage cut;
copies do not help. With a price p per byte held, ``least(p) - p * room`` bounds the time from below for every p (the Lagrangian dual),
and the bound is the greatest over p and over a few moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxckpt.passes.flow import Network, Unbounded
from fxckpt.passes.program import IntArray, Program
from fxckpt.passes.schedule import save_all
from fxckpt.passes.simulate import backward_own_profile, simulate
from fxckpt.passes.staged_cut import needed_cut, no_way


@dataclass(frozen=True)
class Bound:
    """No plan takes less than ``seconds``; ``price`` is the bound's own, in seconds per byte."""

    seconds: float
    price: float


@dataclass(frozen=True)
class Moment:
    """The one-stage cut of what the backward needs from op ``position`` on."""

    program: Program
    position: int

    @cached_property
    def _cut(self) -> tuple[Network, IntArray, IntArray]:
        problem, ops, values = needed_cut(self.program, range(self.position, len(self.program.backward)), len(self.program.ops))
        return Network.side_by_side([problem]), np.asarray(ops, dtype=np.int64), np.asarray(values, dtype=np.int64)

    def least(self, price: float) -> tuple[float, int, float]:
        """Return seconds and bytes held of the least ``seconds + price * held``, and by how much the sum may be above the least for rounding."""
        tables = self.program.tables
        network, ops, values = self._cut
        # The first run of what only the backward needs may be the uncheckpointed step's own.
        seconds = np.where(tables.is_either[ops], 0.0, tables.seconds[ops])
        run_price = np.where(tables.is_rerunnable[ops], seconds, math.inf)
        nbytes = np.where(tables.is_output[values], 0, tables.bytes[values])
        keep_price = np.where(tables.is_savable[values] | tables.is_output[values], nbytes * price, math.inf)
        if self.position:
            # After the start a value that must not be saved may be at hand all the same, made again before.
            keep_price = nbytes * price
        try:
            kept, runs = network.solve(run_price, keep_price)
        except Unbounded as error:
            raise no_way(self.program, int(values[error.value])) from error
        return float(seconds[runs].sum()), int(nbytes[kept].sum()), network.error(run_price, keep_price)

    def bound(self, room: int, low: float, high: float, steps: int) -> Bound:
        """Return the greatest bound of prices between ``low`` and ``high``, for at most ``room`` bytes held."""
        best = Bound(0.0, 0.0)
        for _ in range(steps):
            price = (low * high) ** 0.5
            seconds, held, error = self.least(price)
            if seconds + price * (held - room) - error > best.seconds:
                best = Bound(seconds + price * (held - room) - error, price)
            if held <= room:
                high = price
            else:
                low = price
        return best


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
        at_ops = [
            sum(program.storages[s].bytes for s in {*op.reads, *op.writes}) + op.scratch_bytes
            for op, is_forward in zip(program.ops, tables.is_forward, strict=True)
            if is_forward
        ]
        for j, own in enumerate(self._own):
            read = sum(program.storages[s].bytes for s in program.forward_reads[j] if not program.storages[s].is_output)
            at_ops.append(own + outputs + read + program.backward[j].scratch_bytes)
        return max(at_ops, default=0)

    def seconds(self, limit: int) -> Bound:
        """Return the bound on the time of any plan of at most ``limit`` bytes."""
        outputs = int(self.program.tables.bytes[self.program.tables.is_output].sum())
        bounds = [
            moment.bound(limit - outputs - self._own_before(moment.position), self.low, self.high, self.steps) for moment in self._moments
        ]
        return max(bounds, key=lambda b: b.seconds)

    @cached_property
    def _own(self) -> list[int]:
        return backward_own_profile(self.program)

    def _own_before(self, position: int) -> int:
        """Return the backward's own bytes while op ``position`` runs; at the start only the incoming gradients."""
        return self._own[position] if position else self.program.tangent_bytes

    @cached_property
    def _moments(self) -> tuple[Moment, ...]:
        """The start, and where the uncheckpointed backward and its own values peak."""
        schedule = save_all(self.program)
        simulation = simulate(self.program, schedule)
        ops = np.arange(len(self._own))
        at_ops = np.asarray(simulation.profile)[simulation.forward_ops + ops + np.searchsorted(schedule.before, ops, side="right")]
        return tuple(Moment(self.program, j) for j in sorted({0, int(at_ops.argmax()), int(np.argmax(self._own))}))
