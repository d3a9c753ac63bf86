"""Storage table: the storages of a joint graph, and which of them each node holds.

Inputs and constants are the caller's: their storages are free, and no node holds them. A value that
is never stored has no storage of its own; it holds those it is computed from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.byte_counts import storage_bytes, symbolic_bytes
from fxckpt.solver.program import FORWARD_ONLY, IN_BACKWARD, Storage
from fxckpt.torch_private import storage_id


class StorageTable:
    """Storages in the order in which the graph fills them."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.tangents: list[int] = []
        """Storages of the incoming gradients."""
        self.holds: dict[fx.Node, tuple[int, ...]] = {}
        """Storages that a node fills, aliases or is computed from, by position."""
        self.owner: dict[str, fx.Node] = {}
        """Nodes to save, by the name of their storage."""
        self._index: dict[int, int] = {}
        """Positions by storage id."""
        self._free: set[int] = set()
        """Ids of the caller's storages."""
        self._inlined: dict[int, tuple[int, ...]] = {}
        """Storages that a value is computed from, by the id of the storage it never gets."""

    def reads(self, node: fx.Node) -> tuple[int, ...]:
        """Return the storages that the arguments of a node hold."""
        return tuple(dict.fromkeys([i for arg in node.all_input_nodes for i in self.holds[arg]]))

    def is_new(self, sid: int) -> bool:
        """Return whether no node so far has a storage of this id."""
        return sid not in self._free and sid not in self._index and sid not in self._inlined

    def add_input(self, node: fx.Node) -> None:
        """Add an input of the graph, whose storages are free."""
        self._free.update(storage_id(t) for t in tensors(node.meta.get("val")))
        self.alias(node, node.meta.get("val"))

    def add_constant(self, node: fx.Node) -> None:
        """Add a constant of the graph, whose storages are free."""
        self._free.update(storage_id(t) for t in tensors(node.meta.get("val")))
        self.holds[node] = ()

    def add_tangent(self, node: fx.Node) -> None:
        """Add an incoming gradient."""
        for tensor in tensors(node.meta.get("val")):
            if storage_id(tensor) not in self._index:
                self._index[storage_id(tensor)] = len(self.storages)
                self.tangents.append(len(self.storages))
                self.storages.append(
                    Storage(
                        node.name,
                        storage_bytes(tensor),
                        IN_BACKWARD,
                        sized=symbolic_bytes(tensor),
                    )
                )
        self.alias(node, node.meta.get("val"))

    def alias(self, node: fx.Node, value: Any) -> None:
        """Let a node hold the storages that its value has among those of the table."""
        found: dict[int, None] = {}
        for sid in (storage_id(t) for t in tensors(value)):
            known = (self._index[sid],) if sid in self._index else self._inlined.get(sid, ())
            found.update(dict.fromkeys(known))
        self.holds[node] = tuple(found)

    def inline(self, node: fx.Node, value: Any) -> None:
        """Let a value that is never stored hold the storages it is computed from."""
        self.holds[node] = self.reads(node)
        self._inlined.update((storage_id(t), self.holds[node]) for t in tensors(value))

    def fill(
        self, node: fx.Node, value: Any, *, producer: int, is_tuple: bool, is_savable: bool
    ) -> tuple[int, ...]:
        """Add the storages that an op fills, and return them."""
        writes = []
        for position, tensor in enumerate(tensors(value)):
            sid = storage_id(tensor)
            if sid in self._free or sid in self._index:
                continue
            name = f"{node.name}#{position}" if is_tuple else node.name
            self._index[sid] = len(self.storages)
            writes.append(len(self.storages))
            self.storages.append(
                Storage(
                    name,
                    storage_bytes(tensor),
                    producer,
                    is_savable=is_savable,
                    sized=symbolic_bytes(tensor),
                )
            )
            if not is_tuple:
                self.owner[name] = node
        self.alias(node, value)
        return tuple(writes)

    def add_item(self, node: fx.Node, parent: fx.Node) -> None:
        """Add a ``getitem``: the storages of its item get its name, and are saved by it."""
        self.alias(node, node.meta.get("val"))
        for i in self.holds[node]:
            if self.storages[i].name.startswith(f"{parent.name}#"):
                self.storages[i] = replace(self.storages[i], name=node.name)
                self.owner[node.name] = node

    def add_rng_state(self, node: fx.Node, nbytes: int) -> int:
        """Add the generator state of a random op, and return its position."""
        self.storages.append(Storage(f"{node.name}.rng_state", nbytes, FORWARD_ONLY))
        return len(self.storages) - 1

    def bytes_of(self, positions: tuple[int, ...]) -> int:
        """Return the bytes of storages."""
        return sum(self.storages[i].bytes for i in positions)

    def allow_saving(self, positions: tuple[int, ...]) -> None:
        """Mark storages as savable."""
        for i in positions:
            self.storages[i] = replace(self.storages[i], is_savable=True)

    def mark_output(self, node: fx.Node) -> None:
        """Mark the storages of a forward output: they live to the end, and may be saved."""
        for i in self.holds[node]:
            self.storages[i] = replace(self.storages[i], is_output=True, is_savable=True)
