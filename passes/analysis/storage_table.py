"""Storage table: the storages of a joint graph, and which of them each node holds.

Inputs and constants are the caller's: their storages are free, and no node holds them. A value that
is never stored has no storage of its own; it holds those it is computed from.

:class:`Writable` says into which operands an op may write its result: those of the very geometry of
the result, in storages of their own. When a storage dies depends on the plan. Never written are
inputs, constants and incoming gradients, storages that the step writes itself, those that ops other
than torch's fill (they may alias an input unseen), and those that a collective or a copy between
devices may still be reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from fxckpt.ops.in_place import in_place_form
from fxckpt.ops.kernels import OWN
from fxckpt.ops.properties import is_collective, tensors
from fxckpt.passes.analysis.byte_counts import (
    gradient_bytes,
    storage_bytes,
    symbolic_bytes,
    symbolic_gradient_bytes,
)
from fxckpt.passes.analysis.placement import has_streams
from fxckpt.passes.meta import ACCUMULATES
from fxckpt.solver.program import FORWARD_ONLY, IN_BACKWARD, Storage
from fxckpt.torch_private import (
    OpOverload,
    run_and_save_rng_state,
    run_with_rng_state,
    size_hint,
    size_key,
    storage_id,
)


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
        """Positions by storage id, but of the incoming gradients."""
        self._of_tangents: dict[int, set[int]] = {}
        """Positions of the incoming gradients by storage id, which several may share."""
        self._free: set[int] = set()
        """Ids of the caller's storages."""
        self._inlined: dict[int, tuple[int, ...]] = {}
        """Storages that a value is computed from, by the id of the storage it never gets."""

    def reads(self, node: fx.Node) -> tuple[int, ...]:
        """Return the storages that the arguments of a node hold."""
        return tuple(dict.fromkeys([i for arg in node.all_input_nodes for i in self.holds[arg]]))

    def is_new(self, sid: int) -> bool:
        """Return whether no node so far has a storage of this id."""
        places = (self._free, self._index, self._of_tangents, self._inlined)
        return all(sid not in known for known in places)

    def add_input(self, node: fx.Node) -> None:
        """Add an input of the graph, whose storages are free."""
        self._free.update(storage_id(t) for t in tensors(node.meta.get("val")))
        self.alias(node, node.meta.get("val"))

    def add_constant(self, node: fx.Node) -> None:
        """Add a constant of the graph, whose storages are free."""
        self._free.update(storage_id(t) for t in tensors(node.meta.get("val")))
        self.holds[node] = ()

    def add_tangent(self, node: fx.Node) -> None:
        """Add an incoming gradient: a storage of its own, whatever shares its id in the trace."""
        first = len(self.storages)
        for tensor in tensors(node.meta.get("val")):
            self._of_tangents.setdefault(storage_id(tensor), set()).add(len(self.storages))
            self.tangents.append(len(self.storages))
            nbytes, sized = gradient_bytes(tensor), symbolic_gradient_bytes(tensor)
            self.storages.append(Storage(node.name, nbytes, IN_BACKWARD, sized=sized))
        self.holds[node] = tuple(range(first, len(self.storages)))

    def alias(self, node: fx.Node, value: Any) -> None:
        """Let a node hold the storages that its value has among those of the table."""
        found: dict[int, None] = {}
        for sid in (storage_id(t) for t in tensors(value)):
            if sid in self._index:
                known: tuple[int, ...] = (self._index[sid],)
            elif sid in self._of_tangents:
                known = tuple(i for i in self.reads(node) if i in self._of_tangents[sid])
            else:
                known = self._inlined.get(sid, ())
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
            if sid in self._free or sid in self._index or sid in self._of_tangents:
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


class Geometry(NamedTuple):
    """How a tensor lies in its storage; equal for tensors of one layout at all sizes."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    storage_bytes: Any


@dataclass(frozen=True)
class Writable:
    """Storages of a graph that may be written into once nothing reads them."""

    storages: frozenset[int] = frozenset()
    """Their ids."""
    geometries: dict[fx.Node, Geometry | None] = field(default_factory=dict, compare=False)
    """Geometries of the nodes seen so far; None for those that do not fill a storage."""

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        mutated: Iterable[int],
        held: Mapping[fx.Node, tuple[int, ...]] | None = None,
    ) -> Writable:
        """Return those of a graph, without the ids of storages that the step writes itself.

        ``held`` has the storages of each node, where they are known (:func:`held_storages`).
        """
        if has_streams(graph):
            return cls()
        held = held_storages(graph) if held is None else held
        filled: set[int] = set()
        others = set(mutated)
        for node in graph.nodes:
            own = held[node]
            if node.op != "call_function":
                others.update(own)
                continue
            inputs = node.all_input_nodes
            read = [sid for arg in inputs for sid in held[arg]]
            (filled if fills_apart(node) else others).update(set(own).difference(read))
            if is_collective(node) or _crosses_devices(node, inputs):
                others.update(read)
        return cls(frozenset(filled - others))

    def operands(self, node: fx.Node) -> tuple[int, ...]:
        """Return the positions of the arguments of a node that its result may be written into."""
        form = in_place_form(node.target) if isinstance(node.target, OpOverload) else None
        if form is None or not self.storages:
            return ()
        return tuple(i for i in form.operands if self.allows(node, i))

    def allows(self, node: fx.Node, position: int) -> bool:
        """Return whether a node of an in-place form may write its result into an operand of it."""
        form = in_place_form(node.target)
        if form is None or position >= len(node.args):
            return False
        operand = node.args[position]
        if not isinstance(operand, fx.Node):
            return False
        geometry = self._geometry(node)
        # A sum over tiles promises no bits, so that its two forms may differ.
        devices = None if ACCUMULATES in node.meta else form.devices
        return (
            geometry is not None
            and not (devices and geometry.device.type not in devices)
            and self._geometry(operand) == geometry
            and storage_id(operand.meta["val"]) in self.storages
            and _is_read_apart(node, operand, is_elementwise=form.is_elementwise)
        )

    def _geometry(self, node: fx.Node) -> Geometry | None:
        if node not in self.geometries:
            self.geometries[node] = _geometry_of(node.meta.get("val"))
        return self.geometries[node]


def held_storages(graph: fx.Graph) -> dict[fx.Node, tuple[int, ...]]:
    """Return the ids of the storages that the value of each node has."""
    return {n: tuple(map(storage_id, tensors(n.meta.get("val")))) for n in graph.nodes}


def fills_apart(node: fx.Node) -> bool:
    """Return whether the storages that a node fills are surely apart from its arguments'.

    A kernel of a user may return its argument, whatever its schema says.
    """
    target = node.target
    if target in (run_with_rng_state, run_and_save_rng_state):
        target = next(arg for arg in node.args if isinstance(arg, OpOverload))
    return isinstance(target, OpOverload) and _makes_new(target)


@cache
def _makes_new(op: OpOverload) -> bool:
    """Return whether an op of torch, or ours, returns no argument and no view, by its schema."""
    return (op.namespace in ("aten", "prims") or op in OWN) and all(
        r.alias_info is None for r in op._schema.returns
    )


def _crosses_devices(node: fx.Node, inputs: Iterable[fx.Node]) -> bool:
    """Return whether an op may read its arguments when later ops already run."""
    devices = {t.device for t in tensors(node.meta.get("val"))}
    return any(
        t.device not in devices and t.dim()
        for arg in (inputs if devices else ())
        for t in tensors(arg.meta.get("val"))
    )


def _geometry_of(value: object) -> Geometry | None:
    """Return the geometry of a tensor that has each element of its storage once, else None.

    Whether it does is asked at the planned sizes; a result of an op does at all or at none.
    """
    if (
        not isinstance(value, torch.Tensor)
        or value.layout is not torch.strided
        or value.is_conj()
        or value.is_neg()
    ):
        return None
    span = 1
    dims = zip(map(size_hint, value.stride()), map(size_hint, value.shape), strict=True)
    for stride, size in sorted(dims):
        if size != 1 and stride != span:
            return None
        span *= size
    nbytes = value.untyped_storage().nbytes()
    if size_hint(nbytes) != span * value.element_size():
        return None
    return Geometry(
        value.dtype,
        value.device,
        tuple(map(size_key, value.shape)),
        tuple(map(size_key, value.stride())),
        size_key(nbytes),
    )


def _is_read_apart(node: fx.Node, operand: fx.Node, *, is_elementwise: bool) -> bool:
    """Return whether no argument shows the written elements at other places than the result."""
    written = storage_id(operand.meta["val"])
    for arg in node.all_input_nodes:
        if arg is not operand and any(
            storage_id(t) == written for t in tensors(arg.meta.get("val"))
        ):
            return False
    given = [a for a in (*node.args, *node.kwargs.values()) if a is operand]
    return is_elementwise or len(given) == 1
