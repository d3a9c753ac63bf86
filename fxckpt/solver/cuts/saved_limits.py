"""Limits on saved values: how many bytes of a region's values the forward may save.

A limit is dualized into a price per byte of its storages, on top of the price of all saved values.
At given prices the least choice is one cut of the whole backward (:class:`SavedCut`), and the
Lagrangian less the prices of what is allowed bounds the time of every plan from below. The prices
are bisected, all limits at once; a storage of several limits, whose regions nest, pays the sum. A
feasible choice tells which storages may be saved. The search runs on the program in which the other
storages of the limits may not be saved at all, so that each of its plans keeps every limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxckpt.solver.cuts.min_cut import InfeasibleCut, Network
from fxckpt.solver.cuts.staged_cut import no_finite_cut, stage_cut
from fxckpt.solver.program import BoolArray, FloatArray, IntArray, Program, SavedLimit
from fxckpt.solver.schedule import Schedule, StageAssignment, emit

STEPS = 16
"""Number of bisections of the prices."""
RAISES = 8
"""Most times that the prices of exceeded limits are raised after that."""
RAISE = 8.0
"""Factor of a raise."""


class SavedRooms:
    """Bytes that may still be saved within each limit."""

    def __init__(self, program: Program, saved: Iterable[int]) -> None:
        self.program = program
        self.left = [limit.bytes for limit in program.limits]
        self.limits_of: dict[int, list[int]] = {}
        for i, limit in enumerate(program.limits):
            for s in limit.storages:
                self.limits_of.setdefault(s, []).append(i)
        self.take(saved)

    def needed(self, storages: Iterable[int]) -> dict[int, int]:
        """Return the bytes that storages take of each limit they count for."""
        needed: dict[int, int] = {}
        for s in storages:
            for i in self.limits_of.get(s, ()):
                needed[i] = needed.get(i, 0) + self.program.storages[s].bytes
        return needed

    def has_room(self, storages: Iterable[int]) -> bool:
        """Return whether more storages may be saved."""
        if not self.limits_of:
            return True
        return all(nbytes <= self.left[i] for i, nbytes in self.needed(storages).items())

    def take(self, storages: Iterable[int]) -> None:
        """Count storages as saved."""
        for i, nbytes in self.needed(storages).items():
            self.left[i] -= nbytes


def exceeded(program: Program, saved: Iterable[int]) -> tuple[SavedLimit, ...]:
    """Return the limits that a set of saved storages exceeds."""
    left = SavedRooms(program, saved).left
    return tuple(limit for limit, room in zip(program.limits, left, strict=True) if room < 0)


@dataclass(frozen=True, eq=False)
class SavedChoice:
    """The least choice of saved and recomputed values at some prices."""

    saved: BoolArray
    """Whether each storage is saved."""
    runs: IntArray
    """Ops that are recomputed."""
    seconds: float
    """Time of the recomputes."""
    value: float
    """Lower bound on the Lagrangian of any plan: time, and bytes saved by their prices."""

    def schedule(self, program: Program) -> Schedule:
        """Return the schedule that recomputes each op once, just in time."""
        kept = frozenset(np.flatnonzero(self.saved).tolist())
        runs = frozenset(self.runs.tolist())
        return emit(program, StageAssignment((0,), (kept,), (runs,)))


@dataclass(frozen=True)
class SavedCut:
    """One-stage cut of the whole backward, with a price for each storage."""

    program: Program

    @cached_property
    def _cut(self) -> tuple[Network, IntArray, IntArray]:
        """The network, and the ops and storages of its vertices."""
        length, reach = len(self.program.backward), len(self.program.ops)
        problem, ops, values = stage_cut(self.program, range(length), reach)
        network = Network.disjoint_union([problem])
        return network, np.asarray(ops, np.int64), np.asarray(values, np.int64)

    def least(self, prices: FloatArray, *, time: float = 1.0) -> SavedChoice:
        """Return the choice of least ``time * seconds + prices * bytes``.

        Raises :class:`~fxckpt.errors.FxckptError` if a value can be neither saved nor recomputed.
        """
        tables = self.program.tables
        network, ops, values = self._cut
        # The first run of an op that only the backward depends on is part of any step.
        seconds = np.where(tables.is_either[ops], 0.0, tables.seconds[ops])
        recompute_cost = np.where(tables.is_recomputable[ops], time * seconds, np.inf)
        nbytes = np.where(tables.is_output[values], 0, tables.bytes[values])
        may_keep = tables.is_savable[values] | tables.is_output[values]
        keep_cost = np.where(may_keep, nbytes * prices[values], np.inf)
        try:
            kept, runs = network.solve(recompute_cost, keep_cost)
        except InfeasibleCut as error:
            raise no_finite_cut(self.program, int(values[error.value])) from error
        saved = np.zeros(len(tables.bytes), dtype=bool)
        saved[values[kept]] = True
        rounding = float(network.rounding_errors(recompute_cost, keep_cost).sum())
        spent = float(seconds[runs].sum())
        paid = float((nbytes * prices[values])[kept].sum())
        return SavedChoice(saved, ops[runs], spent, time * spent + paid - rounding)


def least_bytes(program: Program, storages: Sequence[int]) -> int:
    """Return the fewest bytes of ``storages`` that any plan saves."""
    prices = np.zeros(len(program.storages))
    prices[list(storages)] = 1.0
    saved = SavedCut(program).least(prices, time=0.0).saved
    return int(program.tables.bytes[list(storages)][saved[list(storages)]].sum())


def least_bytes_together(program: Program, groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the bytes of each group that one plan saves which saves the fewest of all groups.

    Regions may depend on one another, so that each group's own least may exclude another's.
    """
    if not groups:
        return []
    prices = np.zeros(len(program.storages))
    for group in groups:
        prices[list(group)] += 1.0
    saved = SavedCut(program).least(prices, time=0.0).saved
    return [int(program.tables.bytes[list(g)][saved[list(g)]].sum()) for g in groups]


def binding(program: Program, schedule: Schedule, price: float) -> tuple[bool, ...]:
    """Return whether each limit binds: a schedule recomputes a value for lack of room within it.

    The value would be saved at ``price`` per saved byte without any limit. Of several limits that
    lack room for it one binds: one that binds for another value too, else the innermost.
    """
    binds: set[int] = set()
    if program.limits:
        kept, runs = frozenset(schedule.saved), frozenset(schedule.runs)
        wanted = SavedCut(program).least(np.full(len(program.storages), price)).saved
        rooms = SavedRooms(program, kept)
        lacking = [
            [i for i, nbytes in rooms.needed([s]).items() if nbytes > rooms.left[i]]
            for s in np.flatnonzero(wanted).tolist()
            if s not in kept and program.storages[s].producer in runs
        ]
        for limits in sorted(filter(None, lacking), key=len):
            if binds.isdisjoint(limits):
                binds.add(min(limits, key=lambda i: len(program.limits[i].storages)))
    return tuple(i in binds for i in range(len(program.limits)))


class SavedLimits:
    """The limits of one program, and choices within them."""

    def __init__(self, program: Program, low: float, high: float) -> None:
        self.program = program
        self.low, self.high = low * 1e-3, high
        self.tie = low * 1e-6
        """Price of every saved byte that decides between choices of equal time."""
        self.cut = SavedCut(program)
        self.limits = np.asarray([limit.bytes for limit in program.limits], dtype=np.int64)
        self.member = np.zeros((len(program.limits), len(program.storages)), dtype=bool)
        for i, limit in enumerate(program.limits):
            self.member[i, list(limit.storages)] = True
        self.nbytes = np.where(program.tables.is_output, 0, program.tables.bytes)
        self.bounds: list[tuple[float, float]] = []
        """Prices of all saved values, each with the Lagrangian's bound there, for any room."""

    def choose(self, price: float) -> SavedChoice | None:
        """Return the choice of about the least time, at ``price`` per byte of all saved values.

        None if none was found.
        """
        choice = self._least(price, np.zeros(len(self.limits)))
        if not self._over(choice).any():
            return choice
        lows, highs = (np.full(len(self.limits), p) for p in (self.low, self.high))
        best: SavedChoice | None = None
        for _ in range(STEPS):
            prices = np.sqrt(lows * highs)
            choice = self._least(price, prices)
            over = self._over(choice)
            best = self._better(price, best, choice)
            lows, highs = np.where(over, prices, lows), np.where(over, highs, prices)
        prices = highs
        for _ in range(RAISES):
            choice = self._least(price, prices)
            best = self._better(price, best, choice)
            over = self._over(choice)
            if not over.any():
                break
            prices = np.where(over, RAISE * prices, prices)
        return best

    def fewest(self) -> SavedChoice:
        """Return the choice that saves the fewest bytes of all limits."""
        return self.cut.least(self.member.sum(axis=0).astype(np.float64), time=0.0)

    def restricted(self, saved: BoolArray) -> Program:
        """Return the program in which no storage of a limit may be saved but the ``saved`` ones."""
        barred = self.member.any(axis=0) & ~saved
        storages = tuple(
            replace(storage, is_savable=False) if is_barred else storage
            for storage, is_barred in zip(self.program.storages, barred.tolist(), strict=True)
        )
        return replace(self.program, storages=storages, limits=())

    def bound(self, room: int | None) -> float:
        """Return the greatest bound on the time of any plan that may save ``room`` bytes."""
        return max(
            (
                value - price * (room or 0)
                for price, value in self.bounds
                if room is not None or price == 0
            ),
            default=0.0,
        )

    def _least(self, price: float, prices: FloatArray) -> SavedChoice:
        choice = self.cut.least(price + self.tie + prices @ self.member)
        most = self.tie * float(self.nbytes.sum())
        self.bounds.append((price, choice.value - most - float(prices @ self.limits)))
        return choice

    def _over(self, choice: SavedChoice) -> BoolArray:
        over: BoolArray = self.member @ np.where(choice.saved, self.nbytes, 0) > self.limits
        return over

    def _better(
        self, price: float, best: SavedChoice | None, choice: SavedChoice
    ) -> SavedChoice | None:
        """Return the better of two choices; None if neither is within the limits."""
        if self._over(choice).any():
            return best
        if best is not None and self._cost(price, best) <= self._cost(price, choice):
            return best
        return choice

    def _cost(self, price: float, choice: SavedChoice) -> float:
        return choice.seconds + price * float(self.nbytes[choice.saved].sum())
