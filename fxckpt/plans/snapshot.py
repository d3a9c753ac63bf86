"""Snapshot of a joint graph as plain data: its program, and what its nodes are called."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from fxckpt.solver.program import Op, Program


class NodeKind(enum.StrEnum):
    """What a node of the joint graph is to the planner."""

    INPUT = "input"
    """A parameter, an input, a constant or an incoming gradient: not the step's memory."""
    OP = "op"
    """It fills memory or has an effect."""
    PART = "part"
    """One of the results of an op that has several."""
    VIEW = "view"
    """It shows memory of another node, takes no time, and is made again wherever it is needed."""
    SIZE = "size"
    """A size or a scalar."""


class NodeLabel(NamedTuple):
    """What one node of the joint graph is called. ``inputs`` are positions among the labels, ``storages`` indices of the program."""

    name: str
    kind: NodeKind
    op: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[int, ...]
    storages: tuple[int, ...]
    """What it fills, or, for a view, shows."""
    is_backward: bool
    is_in_region: bool
    """A checkpoint region in the model says something about it."""


@dataclass(frozen=True)
class GraphSnapshot:
    """A joint graph as planning saw it: the program, and a label for every node in the graph's order."""

    program: Program
    labels: tuple[NodeLabel, ...]

    @cached_property
    def by_name(self) -> dict[str, NodeLabel]:
        """Every node's label, by its name."""
        return {label.name: label for label in self.labels}

    @cached_property
    def owners(self) -> tuple[NodeLabel, ...]:
        """Per storage: the node that is saved where the storage is; for a generator state, the op that draws."""
        found = {
            s: label
            for label in reversed(self.labels)
            if label.kind in (NodeKind.OP, NodeKind.PART)
            for s in label.storages
        }
        # An op's parts are named apart: they come after it, and own what they show.
        parts = {
            s: label for label in self.labels if label.kind is NodeKind.PART for s in label.storages
        }
        return tuple(
            (parts.get(s) or found.get(s) or self.by_name[_op_of(st.name)])
            for s, st in enumerate(self.program.storages)
        )

    @cached_property
    def storage_names(self) -> tuple[str, ...]:
        """Per storage: the name a plan knows it by."""
        return tuple(state_name(storage.name) for storage in self.program.storages)

    @cached_property
    def storage_index(self) -> dict[str, int]:
        """Storages by the name a plan knows them by."""
        return {name: s for s, name in enumerate(self.storage_names)}

    @cached_property
    def op_index(self) -> dict[str, int]:
        """Forward ops by name."""
        return {op.name: o for o, op in enumerate(self.program.ops)}

    @cached_property
    def backward_index(self) -> dict[str, int]:
        """Backward ops by name."""
        return {op.name: j for j, op in enumerate(self.program.backward)}

    @cached_property
    def readers(self) -> tuple[tuple[Op, ...], ...]:
        """Per storage: the ops that read it, through views too, the forward's first."""
        found: list[list[Op]] = [[] for _ in self.program.storages]
        for op in (*self.program.ops, *self.program.backward):
            for s in op.reads:
                found[s].append(op)
        return tuple(map(tuple, found))

    def __getstate__(self) -> dict[str, Any]:
        # What is derived is derived again: a pickle carries the data alone.
        return {"program": replace(self.program), "labels": self.labels}


def state_name(storage: str) -> str:
    """Return the graph's name for a storage (generator states are named after their op)."""
    return storage.replace(".rng_state", "_rng_state")


def _op_of(storage: str) -> str:
    return storage.removesuffix(".rng_state").split("#")[0]
