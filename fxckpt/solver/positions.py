"""Positions: the ops of a step in the order in which they run, and where they access storages."""

from __future__ import annotations

import numpy as np

from fxckpt.solver.program import IntArray, Tables


def last_accesses(tables: Tables, order: IntArray) -> IntArray:
    """Return the last position in ``order`` of an op that accesses each storage, or -1."""
    reads, read_at = tables.reads.rows(order)
    writes, written_at = tables.writes.rows(order)
    last = np.full(len(tables.bytes), -1)
    last[writes] = written_at
    # The last of equal indices counts, and a storage is read after it is written.
    last[reads] = read_at
    return last


def last_in_forward(tables: Tables, order: IntArray) -> IntArray:
    """Return the last position in a forward that holds each storage if no plan saves it, or -1.

    It is that of the last access, or of the op that the storage is held to; ``order`` ascends.
    """
    last = last_accesses(tables, order)
    states = tables.rng_state[order]
    made = last >= 0
    made[states[states >= 0]] = True
    held_to = np.searchsorted(order, tables.held_to, side="right") - 1
    return np.where(made, np.maximum(last, held_to), last)


def backward_order(
    tables: Tables, runs: IntArray, before: IntArray, length: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the ops that the backward runs in order, and the positions of recomputes and its own.

    Ops count as in ``tables``.
    """
    run_at = np.arange(len(runs)) + before
    own_at = np.arange(length) + np.searchsorted(before, np.arange(length), side="right")
    op = np.empty(len(runs) + length, dtype=np.int64)
    op[run_at], op[own_at] = runs, len(tables.rng_state) + np.arange(length)
    return op, run_at, own_at
