"""Lower bounds on the peak and the time of any plan for the given order of ops, by flow duality.

Peak: while an op runs, its operands, its results and the gradients of that moment are live, under
any plan; while the widest ops of the backward run, what must be held for those after them is too
(:mod:`~fxckpt.solver.exact.peak_bound`).

Time: while any op of the backward runs, a plan within ``limit`` bytes holds at most the limit less
the live gradients in forward values. Each value that the suffix of the backward from there needs is
held then, or recomputed later, so that the plan's time is at least that of the suffix's one-stage
cut; further copies do not help. What the op itself reads is held in any case: its bytes and the
op's workspace are subtracted from the limit too, and in the cut it costs nothing to keep. With a
Lagrange multiplier p per byte held, ``least(p) - p * room`` bounds the time from below for every p
(the Lagrangian dual). The bound is the greatest over p and over a few suffixes, from the end of the
forward too, when nothing is read yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxckpt.solver.cuts.min_cut import InfeasibleCut, Network
from fxckpt.solver.cuts.staged_cut import no_finite_cut, stage_cuts
from fxckpt.solver.exact.peak_bound import PeakBound
from fxckpt.solver.program import BoolArray, FloatArray, IntArray, Program
from fxckpt.solver.schedule import save_all
from fxckpt.solver.simulate import backward_own_profile, may_take_forward, simulate

END_OF_FORWARD = -1
"""Position of the moment before the first backward op; other moments are those while one runs."""


@dataclass(frozen=True)
class Bound:
    """Lower bound on the extra time of a plan."""

    seconds: float
    price: float
    """Lagrange multiplier of the bound, in seconds per byte."""


@dataclass(frozen=True)
class SuffixCut:
    """One-stage cut of one suffix of the backward at one price."""

    seconds: float
    """Recompute time of the suffix."""
    held: int
    """Bytes of forward values held when the suffix begins."""
    error: float
    """Most by which rounding may raise ``seconds + price * held`` above the least."""


@dataclass(frozen=True)
class SuffixCuts:
    """One-stage cuts of several suffixes of the backward, each at its own price, in one network."""

    program: Program
    positions: tuple[int, ...]
    """First backward op of each suffix, or :data:`END_OF_FORWARD`."""

    @cached_property
    def _cut(self) -> tuple[Network, IntArray, IntArray]:
        """The network, and the ops and storages of its vertices."""
        length, reach = len(self.program.backward), len(self.program.ops)
        suffixes = (range(max(i, 0), length) for i in self.positions)
        return stage_cuts(self.program, suffixes, reach)

    @cached_property
    def _is_read(self) -> BoolArray:
        """Whether the first op of its suffix reads each value."""
        network, _, values = self._cut
        reads = [
            frozenset() if i == END_OF_FORWARD else frozenset(self.program.forward_reads[i])
            for i in self.positions
        ]
        return np.fromiter(
            (
                s in reads[suffix]
                for s, suffix in zip(
                    values.tolist(), network.problem_of_value.tolist(), strict=True
                )
            ),
            np.bool_,
            len(values),
        )

    @cached_property
    def _known(self) -> dict[tuple[int, float], SuffixCut]:
        """Cuts by suffix and price; bisections for several limits begin at the same prices."""
        return {}

    def least(self, prices: Sequence[float]) -> list[SuffixCut]:
        """Return the cut of least ``seconds + price * held`` of each suffix."""
        if any(key not in self._known for key in enumerate(prices)):
            self._known.update(zip(enumerate(prices), self._solve(np.asarray(prices)), strict=True))
        return [self._known[key] for key in enumerate(prices)]

    def _solve(self, prices: FloatArray) -> Iterator[SuffixCut]:
        """Yield the least cut of each suffix at its price."""
        tables = self.program.tables
        network, ops, values = self._cut
        # The first run of an op that only the backward depends on may be part of any step.
        seconds = np.where(tables.is_either[ops], 0.0, tables.seconds[ops])
        recompute_cost = np.where(tables.is_recomputable[ops], seconds, math.inf)
        nbytes = np.where(tables.is_output[values] | self._is_read, 0, tables.bytes[values])
        # After the start, a value that must not be saved may be held: recomputed before.
        may_keep = (
            tables.is_savable[values]
            | tables.is_output[values]
            | (np.asarray(self.positions) != END_OF_FORWARD)[network.problem_of_value]
        )
        keep_cost = np.where(may_keep, nbytes * prices[network.problem_of_value], math.inf)
        try:
            kept, runs = network.solve(recompute_cost, keep_cost)
        except InfeasibleCut as error:
            raise no_finite_cut(self.program, int(values[error.value])) from error
        for suffix, rounding in enumerate(
            network.rounding_errors(recompute_cost, keep_cost).tolist()
        ):
            held = kept & (network.problem_of_value == suffix)
            recomputed = runs & (network.problem_of_op == suffix)
            yield SuffixCut(float(seconds[recomputed].sum()), int(nbytes[held].sum()), rounding)

    def bound(self, rooms: Sequence[int], low: float, high: float, steps: int) -> Bound:
        """Return the greatest bound at prices from ``low`` to ``high``.

        ``rooms`` are the most bytes of forward values that each suffix may hold at its start.
        """
        best = [Bound(0.0, 0.0)] * len(rooms)
        ends = [(low, high)] * len(rooms)
        for _ in range(steps):
            prices = [(a * b) ** 0.5 for a, b in ends]
            for i, (price, cut) in enumerate(zip(prices, self.least(prices), strict=True)):
                seconds = cut.seconds + price * (cut.held - rooms[i]) - cut.error
                if seconds > best[i].seconds:
                    best[i] = Bound(seconds, price)
                ends[i] = (ends[i][0], price) if cut.held <= rooms[i] else (price, ends[i][1])
        return max(best, key=lambda b: b.seconds)


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds on the plans of one program."""

    program: Program
    low: float
    """Least price in question, in seconds per byte."""
    high: float
    """Greatest price in question, in seconds per byte."""
    steps: int = 12
    """Number of bisections of the price."""

    @cached_property
    def proven_peak_bytes(self) -> int:
        """Bytes that the peak of every plan reaches, with what is held beside the widest ops."""
        beside = PeakBound(self.program, self.at_ops, self._between)
        return max(self.peak_bytes, beside.bytes)

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes that the peak of every plan reaches, from single ops."""
        program, tables = self.program, self.program.tables
        nbytes = tables.bytes.tolist()
        not_held = np.where(tables.is_output, 0, tables.bytes).tolist()
        forward = [program.ops[o] for o in program.always_forward]
        at_ops = [
            sum([nbytes[s] for s in {*op.reads, *op.writes}])
            + op.workspace_bytes
            - max([not_held[s] for s in op.takes], default=0)
            for op in forward
        ]
        return max([*at_ops, *self.at_ops], default=0)

    def seconds(self, limit: int) -> Bound:
        """Return the bound on the extra time of any plan within ``limit`` bytes."""
        rooms = [self.room(limit, position) for position in self.positions]
        return self._cuts.bound(rooms, self.low, self.high, self.steps)

    def room(self, limit: int, position: int) -> int:
        """Return the most bytes of forward values held while a backward op runs, beside its reads.

        ``position`` may be :data:`END_OF_FORWARD` too.
        """
        if position == END_OF_FORWARD:
            return limit - self._outputs - self.program.tangent_bytes
        return limit - self.at_ops[position]

    @property
    def positions(self) -> tuple[int, ...]:
        """First backward ops of the suffixes that the bounds are of."""
        return self._cuts.positions

    @cached_property
    def _own(self) -> list[int]:
        """Bytes of gradients live during each backward op, without what it may write in place."""
        (_, own), spared = backward_own_profile(self.program), may_take_forward(self.program)
        return [a - b for a, b in zip(own, spared, strict=True)]

    @property
    def _between(self) -> list[int]:
        """Bytes of outputs and gradients live before each backward op."""
        return [self._outputs + before for before in backward_own_profile(self.program)[0]]

    @cached_property
    def _outputs(self) -> int:
        """Bytes of the forward's outputs."""
        tables = self.program.tables
        return int(tables.bytes[tables.is_output].sum())

    @cached_property
    def at_ops(self) -> list[int]:
        """Bytes live during each backward op under any plan."""
        tables = self.program.tables
        not_held = np.where(tables.is_output, 0, tables.bytes).tolist()
        return [
            own + self._outputs + sum([not_held[s] for s in reads]) + op.workspace_bytes
            for own, op, reads in zip(
                self._own, self.program.backward, self.program.forward_reads, strict=True
            )
        ]

    @cached_property
    def _cuts(self) -> SuffixCuts:
        """Cuts from the start, and from the peaks without checkpoints, of gradients and of ops."""
        schedule = save_all(self.program)
        simulation = simulate(self.program, schedule)
        ops = np.arange(len(self._own))
        at_ops = simulation.live[
            simulation.forward_ops + ops + np.searchsorted(schedule.before, ops, side="right")
        ]
        return SuffixCuts(
            self.program,
            tuple(
                sorted(
                    {
                        END_OF_FORWARD,
                        int(at_ops.argmax()),
                        int(np.argmax(self._own)),
                        int(np.argmax(self.at_ops)),
                    }
                )
            ),
        )
