"""Snapshot of a joint graph as plain data: its program, and a label for each node."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from fxckpt.solver.program import Op, Program


class NodeKind(enum.StrEnum):
    """Role of a node of the joint graph in planning."""

    INPUT = "input"
    """A parameter, an input, a constant or an incoming gradient."""
    OP = "op"
    """An op that writes memory or has a side effect."""
    PART = "part"
    """One result of an op with several."""
    VIEW = "view"
    """An alias of another node's memory, which takes no time and is recomputed wherever needed."""
    SIZE = "size"
    """A size or a scalar."""


class NodeLabel(NamedTuple):
    """Description of one node of the joint graph."""

    name: str
    kind: NodeKind
    op: str
    """Name of the op, for people."""
    module: str
    """Path of the module that called the op."""
    source: str
    """File and line of the model's source."""
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[int, ...]
    """Positions of the node's inputs among the labels."""
    storages: tuple[int, ...]
    """Indices of the storages that the node writes, or, if it is a view, aliases."""
    is_backward: bool
    is_in_region: bool
    """Whether a checkpoint region in the model decides about the node."""
    is_traced_in_backward: bool = False
    """Whether a formula of a gradient made the node, which may need no incoming gradient."""


@dataclass(frozen=True)
class GraphSnapshot:
    """A joint graph at the time of planning."""

    program: Program
    labels: tuple[NodeLabel, ...]
    """Label of each node, in the graph's order."""
    model: str = ""
    """Name of the model; empty where it is not known."""
    device: str = ""
    """Device that the step is planned for: a GPU's name, or torch's name of one that is here."""

    @property
    def first_source(self) -> str:
        """First line of the model's source that a label has; empty if none has one."""
        return next((label.source for label in self.labels if label.source), "")

    @cached_property
    def by_name(self) -> dict[str, NodeLabel]:
        """Labels by the name of the node."""
        return {label.name: label for label in self.labels}

    @cached_property
    def owners(self) -> tuple[NodeLabel, ...]:
        """Label of the node that stands for each storage.

        It is the node that is saved with the storage; for a generator state, the random op.
        """
        found = {
            s: label
            for label in reversed(self.labels)
            if label.kind in (NodeKind.OP, NodeKind.PART)
            for s in label.storages
        }
        # The parts of an op come after it, and own the storages that they alias.
        parts = {
            s: label for label in self.labels if label.kind is NodeKind.PART for s in label.storages
        }
        return tuple(
            (parts.get(s) or found.get(s) or self.by_name[_op_of(st.name)])
            for s, st in enumerate(self.program.storages)
        )

    @cached_property
    def storage_names(self) -> tuple[str, ...]:
        """Name of each storage in a plan."""
        return tuple(state_name(storage.name) for storage in self.program.storages)

    @cached_property
    def storage_index(self) -> dict[str, int]:
        """Index of each storage, by its name in a plan."""
        return {name: s for s, name in enumerate(self.storage_names)}

    @cached_property
    def op_index(self) -> dict[str, int]:
        """Index of each forward op, by name."""
        return {op.name: o for o, op in enumerate(self.program.ops)}

    @cached_property
    def backward_index(self) -> dict[str, int]:
        """Index of each backward op, by name."""
        return {op.name: j for j, op in enumerate(self.program.backward)}

    @cached_property
    def readers(self) -> tuple[tuple[Op, ...], ...]:
        """Ops that read each storage, also through views; the forward's come first."""
        found: list[list[Op]] = [[] for _ in self.program.storages]
        for op in (*self.program.ops, *self.program.backward):
            for s in op.reads:
                found[s].append(op)
        return tuple(map(tuple, found))

    def __getstate__(self) -> dict[str, Any]:
        # A pickle has no cached properties.
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"program": replace(self.program)}


def state_name(storage: str) -> str:
    """Return the name of a storage in the graph: a generator state is named after its op."""
    return storage.replace(".rng_state", "_rng_state")


def _op_of(storage: str) -> str:
    """Return the name of the op that a storage is named after."""
    return storage.removesuffix(".rng_state").split("#")[0]
