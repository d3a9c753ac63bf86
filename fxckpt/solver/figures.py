"""Figures of a program: the bytes and seconds that differ between ranks which run one program."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxckpt.solver.program import Program


@dataclass(frozen=True)
class Figures:
    """Bytes and seconds of a program, without its ops and storages."""

    bytes: tuple[int, ...]
    """Bytes of each storage."""
    seconds: tuple[float, ...]
    """Seconds of each op, those of the forward first."""
    workspace_bytes: tuple[int, ...]
    """Workspace of each op, likewise."""


def figures_of(program: Program) -> Figures:
    """Return the figures of a program."""
    both = (*program.ops, *program.backward)
    return Figures(
        tuple(storage.bytes for storage in program.storages),
        tuple(op.seconds for op in both),
        tuple(op.workspace_bytes for op in both),
    )


def largest_figures(all_figures: Sequence[Figures]) -> Figures:
    """Return the greatest of each figure: the largest sizes and the slowest device."""
    return Figures(
        tuple(map(max, *(f.bytes for f in all_figures))),
        tuple(map(max, *(f.seconds for f in all_figures))),
        tuple(map(max, *(f.workspace_bytes for f in all_figures))),
    )


def with_figures(program: Program, figures: Figures) -> Program:
    """Return a program with other figures."""
    ops = tuple(
        replace(op, seconds=seconds, workspace_bytes=workspace)
        for op, seconds, workspace in zip(
            (*program.ops, *program.backward),
            figures.seconds,
            figures.workspace_bytes,
            strict=True,
        )
    )
    return replace(
        program,
        ops=ops[: len(program.ops)],
        backward=ops[len(program.ops) :],
        storages=tuple(
            replace(storage, bytes=nbytes)
            for storage, nbytes in zip(program.storages, figures.bytes, strict=True)
        ),
    )


def structure_of(program: Program) -> str:
    """Return a hash of the ops, their operands and results, which ranks of one program share.

    Sizes, costs and arguments that are no values are left out: they differ between ranks.
    """
    both = (*program.ops, *program.backward)
    lines = [
        *(f"{op.name} {op.side.name} {op.reads} {op.writes} {op.rng_state}" for op in both),
        *(f"{storage.producer} {storage.is_output}" for storage in program.storages),
        str(program.tangents),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
