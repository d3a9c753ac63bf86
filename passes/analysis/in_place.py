"""In place: the operands whose memory the result of an op may have.

An op may write into an operand of the very geometry of its result, in a storage of its own that
nothing reads later. The first is a property of the graph, read here; when a storage dies depends on
the plan. Never written are inputs, constants and incoming gradients, storages that the step writes
itself, those that ops other than torch's fill (they may alias an input unseen), and those that a
collective or a copy between devices may still be reading.

Expects a graph with ``meta["val"]``. Leaves it alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from fxckpt.ops.in_place import in_place_form
from fxckpt.ops.properties import is_collective, tensors
from fxckpt.passes.analysis.placement import has_streams
from fxckpt.torch_private import (
    OpOverload,
    run_and_save_rng_state,
    run_with_rng_state,
    size_hint,
    size_key,
    storage_id,
)


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
    def of(cls, graph: fx.Graph, mutated: Iterable[int]) -> Writable:
        """Return those of a graph, without the ids of storages that the step writes itself."""
        if has_streams(graph):
            return cls()
        held: dict[fx.Node, tuple[int, ...]] = {}
        filled: set[int] = set()
        others = set(mutated)
        for node in graph.nodes:
            values = list(tensors(node.meta.get("val")))
            held[node] = tuple(map(storage_id, values))
            if node.op != "call_function":
                others.update(held[node])
                continue
            read = {sid for arg in node.all_input_nodes for sid in held[arg]}
            (filled if fills_apart(node) else others).update(set(held[node]) - read)
            if is_collective(node) or _crosses_devices(node, values):
                others |= read
        return cls(frozenset(filled - others))

    def operands(self, node: fx.Node) -> tuple[int, ...]:
        """Return the positions of the arguments of a node that its result may be written into."""
        form = in_place_form(node.target) if isinstance(node.target, OpOverload) else None
        if form is None or not self.storages:
            return ()
        geometry = self._geometry(node)
        if geometry is None or (form.devices and geometry.device.type not in form.devices):
            return ()
        return tuple(
            i
            for i in form.operands
            if i < len(node.args)
            and isinstance(operand := node.args[i], fx.Node)
            and self._geometry(operand) == geometry
            and storage_id(operand.meta["val"]) in self.storages
            and _is_read_apart(node, operand, is_elementwise=form.is_elementwise)
        )

    def _geometry(self, node: fx.Node) -> Geometry | None:
        if node not in self.geometries:
            self.geometries[node] = _geometry_of(node.meta.get("val"))
        return self.geometries[node]


def fills_apart(node: fx.Node) -> bool:
    """Return whether the storages that a node fills are surely apart from its arguments'.

    A kernel of a user may return its argument, whatever its schema says.
    """
    target = node.target
    if target in (run_with_rng_state, run_and_save_rng_state):
        target = next(arg for arg in node.args if isinstance(arg, OpOverload))
    return (
        isinstance(target, OpOverload)
        and target.namespace in ("aten", "prims")
        and all(r.alias_info is None for r in target._schema.returns)
    )


def _crosses_devices(node: fx.Node, values: list[torch.Tensor]) -> bool:
    """Return whether an op may read its arguments when later ops already run."""
    devices = {t.device for t in values}
    return any(
        t.device not in devices and t.dim()
        for arg in (node.all_input_nodes if devices else ())
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
