"""Unroll: a row region as a chain of tiles, one after the other, in ordinary nodes.

Each op of the region becomes one op a tile, on the rows of that tile alone, and the tiles of a half
follow one another: no wide value of one is live in the next, unless a plan saves it for the
backward. Values that leave the region are put together by ``cat``; sums over rows, gradients of
weights among them, are accumulated from tile to tile, in float32 if their type is smaller.

Expects a joint graph and one of its regions. Leaves a joint graph that computes the same values,
but for the order of the sums.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxckpt.errors import InvalidOption
from fxckpt.ops.kernels import accumulate_mm
from fxckpt.ops.properties import tensors
from fxckpt.passes.meta import ACCUMULATES
from fxckpt.passes.tiles.row_regions import RowRegion, is_size
from fxckpt.passes.tiles.row_rules import MEAN, SUM, SUMMED, Rows, row_rule
from fxckpt.torch_private import (
    OpOverload,
    Size,
    SizeNodes,
    fake_like,
    fake_view,
    is_laid_out_whole,
    is_surely_contiguous,
    is_surely_equal,
    plain_size,
    size_hint,
    storage_id,
    without_guards,
)

aten = torch.ops.aten

SMALL = (torch.float16, torch.bfloat16)
"""Types of which sums are accumulated in float32."""
FILLED = (aten.full.default, aten.ones.default, aten.zeros.default)
"""Ops that make a value of a size, which is their first argument."""
KEEPING = {
    aten.clone.default: 0,
    aten.slice.Tensor: 0,
    aten.slice_backward.default: 0,
    aten.slice_scatter.default: 1,
}
"""Ops that may change nothing of a tile, each with the position of the operand that is left."""
WHOLE = torch.contiguous_format
"""Memory format of a copy that is contiguous whatever it is one of."""


def unroll(graph: fx.Graph, regions: Sequence[RowRegion], count: int) -> None:
    """Unroll regions of a joint graph, which share no op, into ``count`` tiles each."""
    replaced: dict[fx.Node, fx.Node] = {}
    sizes = SizeNodes(graph)
    for region in regions:
        places = {replaced.get(node, node): place for node, place in region.places.items()}
        unroller = _Unroller(graph, replace(region, places=places), count, sizes)
        replaced.update(unroller.run())


@dataclass
class _Sum:
    """A sum over the tiles so far."""

    value: fx.Node
    dtype: torch.dtype
    """Type of the sum at the end."""


@dataclass
class _Unroller:
    """Unrolls one region."""

    graph: fx.Graph
    region: RowRegion
    count: int
    sizes: SizeNodes
    """Nodes of sizes that vary."""
    pieces: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    """Values by tile: results of members, and parts of what enters the region."""
    sums: dict[tuple[fx.Node, int], _Sum] = field(default_factory=dict)
    """Sums by member, and position in its tuple."""
    totals: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Sums over all tiles, by member."""

    def run(self) -> dict[fx.Node, fx.Node]:
        """Unroll both halves, and return the nodes that replace values which leave the region."""
        members = self.region.members
        self._compute_sizes()
        whole: dict[fx.Node, fx.Node] = {}
        for half in (self.region.forward, self.region.backward):
            if not half:
                continue
            before = self._make_room(half)
            with self.graph.inserting_before(before):
                for tile, (first, last) in enumerate(self.region.tiles(self.count)):
                    for node in half:
                        self._emit(node, tile, first, last)
                for node in half:
                    if self.region.places[node] is SUMMED:
                        whole[node] = self.totals[node] = self._total(node)
                    elif any(user not in members for user in node.users):
                        whole[node] = self._joined(node)
        for node, new in whole.items():
            replace_uses(node, new, apart_from=members)
        for node in reversed([*self.region.forward, *self.region.backward]):
            self.graph.erase_node(node)
        for piece in reversed(dict.fromkeys(self.pieces.values())):
            if not piece.users:
                self.graph.erase_node(piece)  # The zeros of rows that are not computed.
        return whole

    def _compute_sizes(self) -> None:
        """Compute sizes that are read from what depends on members from those of the inputs.

        Members that read them would wait for others of their half.
        """
        depends = set(self.region.members)
        for node in list(self.graph.nodes):
            if depends.isdisjoint(node.all_input_nodes):
                continue
            if not is_size(node):
                depends.add(node)
                continue
            given = {node: self.sizes.node_of(plain_size(node.meta["val"]))}
            for user in list(node.users):
                user.args = _with_sizes(user.args, given)
                user.kwargs = _with_sizes(user.kwargs, given)
            self.graph.erase_node(node)

    def _make_room(self, half: Sequence[fx.Node]) -> fx.Node:
        """Move what the members of a half read in front of the first one, and return that."""
        first, members = half[0], set(half)
        nodes = []
        for node in _following(first):
            nodes.append(node)
            if node is half[-1]:
                break
        needed: set[fx.Node] = set()
        for node in reversed(nodes):
            if node in members or node in needed:
                needed.update(node.all_input_nodes)
        for node in nodes:
            if node in needed and node not in members:
                first.prepend(node)
        return first

    def _emit(self, node: fx.Node, tile: int, first: Size, last: Size) -> None:
        """Emit a member for one tile."""
        place = self.region.places[node]
        if node.target is operator.getitem and place is SUMMED:
            return  # It is summed with its tuple.
        args = fx.map_arg(node.args, lambda arg: self._piece(node, arg, tile, first, last))
        kwargs = fx.map_arg(node.kwargs, lambda arg: self._piece(node, arg, tile, first, last))
        target: Any = node.target
        rule = None if target is operator.getitem else row_rule(node)
        if rule is not None and rule.adapt is not None:
            assert isinstance(place, Rows)
            read = node.args[rule.position] if node.args else None
            given = self.region.places.get(read) if isinstance(read, fx.Node) else None
            operand = given.part(first, last) if isinstance(given, Rows) else None
            args = rule.adapt(node, operand, place.part(first, last), tuple(args))
        if target is aten.nll_loss_forward.default and args[3] == MEAN:
            args = (*args[:3], SUM, *args[4:])
        if place is SUMMED:
            self._add_up(node, tile, target, args, kwargs)
            return
        if (same := self._unchanged(node, target, args, place, first, last)) is not None:
            self.pieces[node, tile] = same
            return
        value = self._value_of_tile(node, place, first, last)
        new = self._call(target, args, kwargs, node, f"{node.name}_tile_{tile}", value)
        self.pieces[node, tile] = new
        if isinstance(place, tuple):
            for position, item in enumerate(place):
                if item is SUMMED:
                    part = self._call(operator.getitem, (new, position), {}, node)
                    self._accumulate(node, position, part)

    def _value_of_tile(
        self, node: fx.Node, place: Any, first: Size, last: Size
    ) -> torch.Tensor | None:
        """Return the value of a member for a tile of rows that vary, unless it is a view."""
        whole = node.meta["val"]
        if not isinstance(place, Rows) or isinstance((part := place.part(first, last)).size, int):
            return None
        held = {storage_id(t) for n in node.all_input_nodes for t in tensors(n.meta.get("val"))}
        if storage_id(whole) in held or not is_surely_contiguous(whole):
            return None
        shape = list(whole.shape)
        shape[place.dim] = part.size
        return fake_like(whole, tuple(shape), whole.dtype)

    def _unchanged(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], place: Any, first: Size, last: Size
    ) -> fx.Node | None:
        """Return the operand of an op that, of the rows of a tile, changes nothing.

        Of a slice that keeps them all, of its gradient, and of a copy of what is contiguous.
        """
        if target not in KEEPING:
            return None
        at = KEEPING[target]
        value = args[at].meta["val"]
        shape = list(node.meta["val"].shape)
        shape[place.dim] = place.part(first, last).size
        layout = node.kwargs.get("memory_format", torch.contiguous_format)
        is_laid_out = layout in (torch.contiguous_format, torch.preserve_format)
        is_kept = _has_shape(value, shape) and is_surely_contiguous(value) and is_laid_out
        is_kept &= value.dtype == node.meta["val"].dtype
        return args[at] if is_kept and node.args[at] in self.region.members else None

    def _piece(self, reader: fx.Node, arg: fx.Node, tile: int, first: Size, last: Size) -> fx.Node:
        """Return what a member reads for one tile in place of an argument."""
        if (arg, tile) in self.pieces:
            return self.pieces[arg, tile]
        if arg in self.totals:
            return self.totals[arg]
        rows = self.region.places.get(arg)
        if not isinstance(rows, Rows):
            return arg
        part = rows.part(first, last)
        begin = plain_size((part.start - rows.start) * rows.inner)
        end = plain_size(begin + part.length * rows.inner)
        name = f"{arg.name}_tile_{tile}"
        if is_surely_equal(rows.outer, 1):
            piece = self._sliced(arg, (rows.dim, begin, end), part.size, arg, name)
        else:
            shape = tuple(arg.meta["val"].shape)
            apart = (rows.outer, plain_size(rows.length * rows.inner))
            split = self._viewed(arg, (*shape[: rows.dim], *apart, *shape[rows.dim + 1 :]), arg)
            length = plain_size(part.length * rows.inner)
            piece = self._sliced(split, (rows.dim + 1, begin, end), length, arg)
            size = (*shape[: rows.dim], part.size, *shape[rows.dim + 1 :])
            piece = self._viewed(piece, size, arg, name)
        self.pieces[arg, tile] = piece
        return piece

    def _sliced(
        self,
        whole: fx.Node,
        at: tuple[int, Size, Size],
        length: Size,
        like: fx.Node,
        name: str | None = None,
    ) -> fx.Node:
        """Return a slice of a value, of so many rows."""
        value, (dim, begin, _) = whole.meta["val"], at
        part = None
        if not isinstance(length, int):
            shape, strides = list(value.shape), value.stride()
            shape[dim] = length
            with without_guards(value):
                part = fake_view(
                    value, shape, strides, value.storage_offset() + begin * strides[dim]
                )
        return self._call(aten.slice.Tensor, (whole, *at), {}, like, name, part)

    def _add_up(
        self, node: fx.Node, tile: int, target: Any, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Emit a sum over the rows of one tile, added to the sum so far."""
        if target is aten.mm.default and self._add_product(node, tile, args):
            return
        part = self._call(target, args, kwargs, node, f"{node.name}_tile_{tile}")
        self._accumulate(node, 0, part)

    def _add_product(self, node: fx.Node, tile: int, args: tuple[Any, ...]) -> bool:
        """Emit a product that is added to the sum so far where it is computed.

        Return whether there is such an op: the first product in the type of the sum is the sum.
        """
        dtype = node.meta["val"].dtype
        known = self.sums.get((node, 0))
        if known is None and (dtype not in SMALL or len(self.region.tiles(self.count)) == 1):
            return False
        if known is None:
            known = self.sums[node, 0] = _Sum(self._zeros(node, dtype=torch.float32), dtype)
        op = accumulate_mm if dtype in SMALL else aten.addmm.default
        new = self._call(op, (known.value, *args), {}, node, f"{node.name}_tile_{tile}")
        new.meta[ACCUMULATES] = True
        known.value = new
        return True

    def _zeros(
        self, like: fx.Node, rows: Rows | None = None, dtype: torch.dtype | None = None
    ) -> fx.Node:
        """Emit zeros in place of a value, or of a part of its rows."""
        value = like.meta["val"]
        shape, dtype = list(value.shape), dtype or value.dtype
        if rows is not None:
            shape[rows.dim] = rows.size
        given = {"dtype": dtype, "device": value.device}
        made_of = self.sizes.in_place_of(shape)
        zeros = self.graph.call_function(aten.full.default, (made_of, 0), given)
        zeros.meta = {**like.meta, "val": fake_like(value, tuple(shape), dtype)}
        return zeros

    def _accumulate(self, node: fx.Node, position: int, part: fx.Node) -> None:
        """Add a value to a sum over tiles."""
        known = self.sums.get((node, position))
        if known is not None:
            known.value = self._call(aten.add.Tensor, (known.value, part), {}, node)
            return
        dtype = part.meta["val"].dtype
        if dtype in SMALL and len(self.region.tiles(self.count)) > 1:
            part = self._call(aten._to_copy.default, (part,), {"dtype": torch.float32}, node)
        self.sums[node, position] = _Sum(part, dtype)

    def _total(self, node: fx.Node) -> fx.Node:
        """Return the sum over all tiles of a member."""
        of, position = node, 0
        if node.target is operator.getitem:
            of, position = node.args  # type: ignore[assignment]
        found = self.sums[of, position]
        value = found.value
        is_mean = of.target is aten.nll_loss_forward.default and of.args[3] == MEAN
        if is_mean and position == 0:
            value = self._call(aten.div.Tensor, (value, self.sums[of, 1].value), {}, node)
        if value.meta["val"].dtype != found.dtype:
            value = self._call(aten._to_copy.default, (value,), {"dtype": found.dtype}, node)
        return value

    def _joined(self, node: fx.Node) -> fx.Node:
        """Return the rows of all tiles of a member in one value; unused rows are zero."""
        rows = self.region.places[node]
        assert isinstance(rows, Rows)
        tiles = self.region.tiles(self.count)
        pieces = [self.pieces[node, tile] for tile in range(len(tiles))]
        parts = [rows.part(*tile) for tile in tiles]
        first, last = self.region.used
        # The value need not have the first and the last rows of the region.
        end = plain_size(rows.start + rows.length)
        before, after = rows.part(rows.start, first), rows.part(last, end)
        if not is_surely_equal(before.length, 0):
            pieces.insert(0, self._zeros(node, before))
            parts.insert(0, before)
        if not is_surely_equal(after.length, 0):
            pieces.append(self._zeros(node, after))
            parts.append(after)
        if len(pieces) == 1:
            return pieces[0]
        if is_surely_equal(rows.outer, 1):
            return self._joined_in_order(node, pieces, rows)
        shape = tuple(node.meta["val"].shape)
        apart = []
        for piece, part in zip(pieces, parts, strict=True):
            size = plain_size(part.length * rows.inner)
            dims = (*shape[: rows.dim], rows.outer, size, *shape[rows.dim + 1 :])
            apart.append(self._viewed(piece, dims, node))
        joined = self._call(aten.cat.default, (apart, rows.dim + 1), {}, node)
        size = plain_size(rows.length * rows.inner)
        joined = self._all_of(joined, rows.dim + 1, size, rows.inner)
        return self._viewed(joined, shape, node, f"{node.name}_whole")

    def _joined_in_order(self, node: fx.Node, pieces: list[fx.Node], rows: Rows) -> fx.Node:
        """Return pieces in one value whose dimensions have the order in memory of a member's.

        What reads it is then laid out as it was.
        """
        order, dim = _order_in_memory(node.meta["val"]), rows.dim
        is_permuted = order != sorted(order)
        if is_permuted:
            dim = order.index(dim)
            pieces = [self._call(aten.permute.default, (p, order), {}, node) for p in pieces]
        name = f"{node.name}_whole"
        joined = self._call(
            aten.cat.default, (pieces, dim), {}, node, None if is_permuted else name
        )
        joined = self._all_of(joined, dim, rows.size, rows.inner)
        if is_permuted:
            back = [order.index(d) for d in range(len(order))]
            joined = self._call(aten.permute.default, (joined, back), {}, node, name)
        return joined

    def _all_of(self, joined: fx.Node, dim: int, size: Size, inner: Size) -> fx.Node:
        """Return joined rows, of a value that has as many as the tiles have together."""
        value = joined.meta["val"]
        if not isinstance(size, int):
            # Only for a given number can it be seen that the rows of the tiles add up to all.
            first, last = self.region.used
            tiled = sum(end - begin for begin, end in self.region.tiles(self.count))
            found = plain_size(value.shape[dim] + (last - first - tiled) * inner)
        else:
            found = value.shape[dim]
        assert is_surely_equal(found, size), f"{joined.name} has {found} rows in place of {size}"
        if not isinstance(size, int):
            shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
            joined.meta["val"] = fake_like(value, shape, value.dtype)
        return joined

    def _viewed(
        self, value: fx.Node, shape: Sequence[Size], like: fx.Node, name: str | None = None
    ) -> fx.Node:
        """Return a view of a value in another shape, of a copy if its strides allow none."""
        return self._call(aten.view.default, (value, list(shape)), {}, like, name)

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Any,
        like: fx.Node,
        name: str | None = None,
        value: torch.Tensor | None = None,
    ) -> fx.Node:
        """Add a call with the metadata of a node, and its own value."""
        given = self.sizes.in_place_of((args, dict(kwargs)))
        return emit_call(self.graph, target, given[0], given[1], like, name, value)


def emit_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Any,
    like: fx.Node,
    name: str | None = None,
    value: torch.Tensor | None = None,
) -> fx.Node:
    """Add a call with the metadata of a node, and a value of its own, if that is not given.

    A view that strides do not allow is one of a copy.
    """
    if target is aten.view.default and not _can_view(*args):
        whole = {"memory_format": torch.contiguous_format}
        args = (emit_call(graph, aten.clone.default, args[:1], whole, like), *args[1:])
    node = graph.create_node("call_function", target, args, dict(kwargs), name)
    node.meta = copy.copy(like.meta)
    node.meta["val"] = _computed(node) if value is None else value
    return node


def replace_uses(node: fx.Node, new: fx.Node, apart_from: Container[fx.Node] = ()) -> None:
    """Let the readers of a node, but for some, read another one.

    Views of the node become views of that: their values share its storage. Raises
    :class:`InvalidOption` where a reader would be laid out in another way than it was.
    """
    old = {storage_id(t) for t in tensors(node.meta.get("val"))}
    is_laid_out = _is_laid_out_as(new.meta["val"], node.meta["val"])
    node.replace_all_uses_with(
        new, delete_user_cb=lambda user: user is not new and user not in apart_from
    )
    viewed = [new]
    while viewed:
        for user in viewed.pop().users:
            known = user.meta.get("val")
            is_view = not old.isdisjoint(storage_id(t) for t in tensors(known))
            if not is_laid_out and isinstance(user.target, OpOverload):
                reads_storage = user.target.name().startswith("aten::as_strided")
                if reads_storage or not (is_view or _is_laid_out_as(_computed(user), known)):
                    raise InvalidOption(
                        f"no tiles: {user.name} reads how {node.name} lies in memory, which tiles "
                        "that are joined do not keep. Leave out tile= for this model."
                    )
            if is_view:
                user.meta["val"] = _computed(user)
                viewed.append(user)


def _order_in_memory(value: torch.Tensor) -> list[int]:
    """Return the dimensions of a value from the one of greatest stride on."""
    dims = range(value.dim())
    if is_surely_contiguous(value):
        return list(dims)
    return sorted(dims, key=lambda d: -size_hint(value.stride(d)))


def _is_laid_out_as(value: Any, other: Any) -> bool:
    """Return whether the strides of values are surely equal, but for dimensions of size 1."""
    return all(
        is_surely_equal(one, two)
        for v, o in zip(tensors(value), tensors(other), strict=True)
        for size, one, two in zip(v.shape, v.stride(), o.stride(), strict=True)
        if not is_surely_equal(size, 1)
    )


def _computed(node: fx.Node) -> Any:
    """Return the value of a node, of the metadata that it has or that of one like it."""
    with without_guards(next(tensors(node.meta.get("val")), None)):
        value = _known_value(node)
    return value_of(node) if value is None else value


def _known_value(node: fx.Node) -> Any:
    """Return the value of an op on sizes that vary where no sizes need be compared for it, or None.

    It is the one that :func:`value_of` returns: torch compares them for each view, which takes most
    of the time of an unrolling.
    """
    if not node.args or not _varies(node.args[0]):
        return None
    like = node.meta["val"]
    if node.target is aten.nll_loss_forward.default and all(item.dim() == 0 for item in like):
        return tuple(fake_like(item, (), item.dtype) for item in like)
    args: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
    value = args[0]
    if node.target is aten.clone.default and node.kwargs.get("memory_format") is WHOLE:
        return fake_like(value, tuple(value.shape), value.dtype)
    if node.target in (aten.view.default, aten._unsafe_view.default):
        return _known_view(value, args[1])
    if node.target is aten.transpose.int or (node.target is aten.t.default and value.dim() == 2):
        one, other = args[1:] or (0, 1)
        shape, strides = list(value.shape), list(value.stride())
        for sizes in (shape, strides):
            sizes[one], sizes[other] = sizes[other], sizes[one]
        return fake_view(value, shape, strides, value.storage_offset())
    return None


def _known_view(value: torch.Tensor, shape: Sequence[Size]) -> torch.Tensor | None:
    """Return a view of a contiguous value; None where torch may choose other strides for it."""
    if any(isinstance(size, int) and size <= 1 for size in (*shape, *value.shape)):
        return None
    strides = [*itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)][::-1]
    # Without elements there is no one size that others divide.
    is_same = all(isinstance(stride, int) for stride in strides) and is_laid_out_whole(value)
    if not is_same and not is_surely_contiguous(value):
        return None
    return fake_view(value, shape, strides, value.storage_offset())


def _varies(node: Any) -> bool:
    """Return whether an argument is a node of a tensor, of which a size varies."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and any(
        isinstance(size, torch.SymInt) for size in value.shape
    )


def value_of(node: fx.Node) -> Any:
    """Return the fake value of a node, computed from those of its arguments.

    Values of a size alone are fake as well, in the trace that the node's metadata is of.
    """
    known = node.meta.get("val")
    args: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = fx.map_arg(node.kwargs, lambda n: n.meta["val"])
    if node.target in FILLED and isinstance(known, torch.Tensor):
        return fake_like(known, tuple(args[0]), kwargs.get("dtype", known.dtype))
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    with torch.no_grad(), without_guards(next(tensors(known), None)):
        return target(*args, **kwargs)


def _with_sizes(args: Any, given: Mapping[fx.Node, fx.Node | int]) -> Any:
    """Return arguments with sizes in place of the nodes that read them."""
    return fx.map_arg(args, lambda arg: given.get(arg, arg))


def _has_shape(value: torch.Tensor, shape: Sequence[Size]) -> bool:
    return len(shape) == value.dim() and all(map(is_surely_equal, value.shape, shape))


def _following(node: fx.Node) -> Iterable[fx.Node]:
    while node.op != "root":
        yield node
        node = node.next


def _can_view(value: fx.Node, shape: Sequence[int]) -> bool:
    """Return whether a value may be viewed in another shape without a copy.

    If sizes vary, so do strides: only what is contiguous at all of them surely may.
    """
    whole = value.meta["val"]
    if any(isinstance(arg, fx.Node) for arg in shape):
        return is_surely_contiguous(whole)
    with torch.no_grad():
        try:
            whole.view(shape)
        except (RuntimeError, ValueError):  # which one depends on the strides
            return False
    return True
