"""Row regions: parts of a joint graph whose wide values need not exist whole.

A region begins at a matmul of rows with a weight whose result is wide: a head over a vocabulary,
the first matmul of an MLP. It grows over every op that makes or reads a wide value, of the forward
and of the backward, as long as each is row-wise or sums over rows (:mod:`.row_rules`). Values that
enter or leave it are narrow, or sums. If an op on a wide value is neither, as in attention, or if a
wide value is an output, there is no region.

Sizes may vary: a place is one for all of them. A region of which one is not known before it runs is
left alone.

Expects a normalized joint graph. Leaves the graph alone.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.placement import backward_closure
from fxckpt.passes.tiles.row_rules import SUMMED, Place, RowCall, Rows, row_rule
from fxckpt.passes.tiles.used_rows import used_rows
from fxckpt.torch_private import (
    Size,
    is_computed,
    is_surely_at_most,
    is_surely_equal,
    is_symbolic,
    plain_size,
    size_hint,
    size_key,
    traced_size,
)

aten = torch.ops.aten

WIDE = 1.5
"""Elements of a wide value, in those of the rows that enter the region, are more than this."""


@dataclass(frozen=True)
class RowRegion:
    """One region, for one way to number its rows."""

    name: str
    """Module of the matmul that it begins at, or the name of that node."""
    length: Size
    """Number of its rows."""
    forward: tuple[fx.Node, ...]
    """Its ops that read no incoming gradient, in the order of the graph."""
    backward: tuple[fx.Node, ...]
    """Its other ops, in the order of the graph."""
    places: Mapping[fx.Node, Place | tuple[Place, ...]]
    """Where the rows of its values, and of those that it reads row by row, lie."""
    wide_bytes: int
    """Bytes of its widest value."""
    seed: fx.Node
    """The matmul that it begins at."""
    used: tuple[Size, Size]
    """First and last of the rows that anything outside depends on, the last one excluded."""

    @property
    def members(self) -> frozenset[fx.Node]:
        """All its ops."""
        return frozenset((*self.forward, *self.backward))

    @property
    def has_unused(self) -> bool:
        """Whether nothing outside depends on some of its rows."""
        return not all(map(is_surely_equal, self.used, (0, self.length)))

    def tiles(self, count: int) -> tuple[tuple[Size, Size], ...]:
        """Return the rows of each of at most ``count`` tiles; the last one may be smaller.

        If their number varies, there are ``count``, of which the first ones may have a row more
        than the last ones; where there are fewer rows than tiles, the last ones have none.
        """
        first, last = self.used
        if isinstance(first, int) and isinstance(last, int):
            size = math.ceil((last - first) / count)
            return tuple((i, min(i + size, last)) for i in range(first, last, size))
        rows = plain_size(last - first)
        if count == 1:
            return (self.used,)
        # Of this form each size has its greatest value at the greatest number of rows.
        sizes = [(rows + (count - 1 - i)) // count for i in range(count)]
        ends = [plain_size(end) for end in itertools.accumulate(sizes, initial=first)]
        return tuple(itertools.pairwise(ends))

    def moved_to(self, graph: fx.Graph) -> RowRegion:
        """Return the same region of a copy of the graph."""
        by_name = {node.name: node for node in graph.nodes}
        return replace(
            self,
            forward=tuple(by_name[n.name] for n in self.forward),
            backward=tuple(by_name[n.name] for n in self.backward),
            places={by_name[n.name]: place for n, place in self.places.items()},
            seed=by_name[self.seed.name],
        )

    def at_planned_sizes(self) -> RowRegion:
        """Return the same region with numbers for its sizes, those that it is planned for."""
        first, last = self.used

        def fixed(place: Place) -> Place:
            return place.at_planned_sizes() if isinstance(place, Rows) else place

        return replace(
            self,
            length=size_hint(self.length),
            places={
                node: tuple(map(fixed, place)) if isinstance(place, tuple) else fixed(place)
                for node, place in self.places.items()
            },
            used=(size_hint(first), size_hint(last)),
        )

    def grown_again(self) -> RowRegion | None:
        """Return the region at the same matmul in its graph as it is now, or None."""
        rows = self.places[self.seed]
        assert isinstance(rows, Rows)
        graph = self.seed.graph
        order = {node: i for i, node in enumerate(graph.nodes)}
        return _Growth(order, backward_closure(graph), self.seed).grown(rows)

    def divides(self, count: int) -> bool:
        """Return whether each value has rows in each of ``count`` tiles.

        One tile is none, but where it leaves out rows. Of a number that varies each tile must have
        two rows when it is traced: torch takes a size of one for a dimension that is broadcast.
        Each value must have all rows then: those that a slice leaves out are in no tile.
        """
        least, most = 1 if self.has_unused else 2, traced_size(self.used[1] - self.used[0])
        if not least <= count <= most:
            return False
        rows = {p for place in self.places.values() for p in _each(place) if isinstance(p, Rows)}
        if all(isinstance(size, int) for size in self.used) and all(r.is_fixed for r in rows):
            return all(r.part(*tile).length for r in rows for tile in self.tiles(count))
        return all(traced_size(last - first) >= 2 for first, last in self.tiles(count)) and all(
            is_surely_at_most(r.start, self.used[0])
            and is_surely_at_most(self.used[1], plain_size(r.start + r.length))
            for r in rows
        )


def row_regions(graph: fx.Graph) -> tuple[tuple[RowRegion, ...], ...]:
    """Return the regions of a joint graph in its order, each with the ways to number its rows.

    First are ways by which rows are left out.
    """
    closure = backward_closure(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: list[tuple[RowRegion, ...]] = []
    covered: set[fx.Node] = set()
    for seed in sorted(_seeds(graph, closure), key=_elements, reverse=True):
        if seed in covered:
            continue
        ways = tuple(
            region
            for rows in _numberings(seed)
            if (region := _Growth(order, closure, seed).grown(rows))
        )
        ways = tuple(way for way in ways if covered.isdisjoint(way.members))
        ways = tuple(sorted(ways, key=lambda way: not way.has_unused))
        if ways:
            found.append(ways)
            covered |= ways[0].members
    return tuple(sorted(found, key=lambda ways: order[ways[0].forward[0]]))


def _seeds(graph: fx.Graph, closure: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield matmuls of the forward whose result is wide."""
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and node not in closure:
            left = _left(node)
            if _is_known(node) and _elements(node) > WIDE * _elements(left):
                yield node


def _left(matmul: fx.Node) -> fx.Node:
    left = matmul.args[-2]
    assert isinstance(left, fx.Node)
    return left


def _is_known(node: fx.Node) -> bool:
    """Return whether the sizes of a node's value are known before it runs."""
    return all(is_computed(size) for t in tensors(node.meta.get("val")) for size in t.shape)


def is_size(node: fx.Node) -> bool:
    """Return whether a node computes a size that is known without it."""
    value = node.meta.get("val")
    is_number = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    return is_number and is_computed(value)


def _elements(node: fx.Node) -> int:
    """Return the elements of the largest tensor of a node, as planned."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return max((size_hint(v.numel()) for v in values if isinstance(v, torch.Tensor)), default=0)


def _numberings(seed: fx.Node) -> Iterator[Rows]:
    """Yield ways to number the rows of a matmul's result, the finest one first.

    Rows that come from several dimensions, such as batch and position, may be numbered by each.
    """
    count = seed.meta["val"].shape[0]
    yield Rows(0, 1, 0, count, 1)
    near = [*seed.users, *_left(seed).all_input_nodes]
    shapes = (n.meta["val"].shape[:-1] for n in near if isinstance(n.meta.get("val"), torch.Tensor))
    factors = (s for s in shapes if len(s) > 1 and is_surely_equal(math.prod(s), count))
    for dims in {tuple(map(size_key, s)): tuple(s) for s in factors}.values():
        for at, length in enumerate(dims):
            if 1 < size_hint(length) < size_hint(count):
                yield Rows(0, math.prod(dims[:at]), 0, length, math.prod(dims[at + 1 :]))


def _each(place: Place | tuple[Place, ...]) -> tuple[Place, ...]:
    return place if isinstance(place, tuple) else (place,)


def obstacles(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the matmuls of wide results that are in no region, each with what keeps it whole."""
    closure = backward_closure(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    covered = {node for ways in row_regions(graph) for node in ways[0].members}
    found = {}
    for seed in _seeds(graph, closure):
        if seed not in covered:
            growths = []
            for rows in _numberings(seed):
                growths.append(_Growth(order, closure, seed))
                growths[-1].grown(rows)
            found[seed] = max(growths, key=lambda growth: len(growth.members)).obstacle
    return found


class _Refused(Exception):
    """An op on a wide value is not row-wise."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"{node.name} ({node.target})" if node.op == "call_function" else node.op)


@dataclass
class _Growth:
    """Growth of one region from its first matmul."""

    order: Mapping[fx.Node, int]
    closure: set[fx.Node]
    seed: fx.Node
    places: dict[fx.Node, Place | tuple[Place, ...]] = field(default_factory=dict)
    members: set[fx.Node] = field(default_factory=set)
    waiting: dict[fx.Node, None] = field(default_factory=dict)
    """Members whose rule needs to know more."""
    obstacle: str = "no gradient"
    """What makes it no region."""

    def grown(self, rows: Rows) -> RowRegion | None:
        """Return the region for one numbering of the first matmul's rows, or None."""
        self.places[self.seed] = rows
        self.limit = WIDE * _elements(_left(self.seed))
        try:
            self._add(self.seed)
            self._spread()
            while between := [*self._between(backward=False), *self._between(backward=True)]:
                for node in between:
                    self._add(node)
                self._spread()
            self._check_sums()
        except _Refused as refused:
            self.obstacle = str(refused)
            return None
        order = sorted(self.members, key=self.order.__getitem__)
        if not any(self._is_sum(n) or (n in self.closure and self._is_wide(n)) for n in order):
            return None  # Of the wide values no gradient is computed.
        stack = list((self.seed.meta.get("nn_module_stack") or {}).values())
        return RowRegion(
            str(stack[-1][0]) if stack else self.seed.name,
            rows.length,
            tuple(n for n in order if n not in self.closure),
            tuple(n for n in order if n in self.closure),
            self.places,
            max(
                _elements(n) * n.meta["val"].element_size()
                for n in order
                if self._is_wide(n) and not self._is_sum(n)
            ),
            self.seed,
            used_rows(order, self.places, rows.length),
        )

    def _is_wide(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.Tensor) and _elements(node) > self.limit

    def _is_sum(self, node: fx.Node) -> bool:
        return self.places[node] is SUMMED and node.meta["val"].dim() > 0

    def _add(self, node: fx.Node) -> None:
        if node in self.members:
            return
        is_item = node.target is operator.getitem
        is_ruled = node.op == "call_function" and (is_item or row_rule(node) is not None)
        if not is_ruled or is_symbolic(node) or not _is_known(node):
            raise _Refused(node)
        self.members.add(node)
        self.waiting[node] = None
        if is_item:
            self._add(node.all_input_nodes[0])

    def _spread(self) -> None:
        """Find the places of all members, and add what makes or reads their wide values."""
        while self.waiting:
            solved = [node for node in list(self.waiting) if self._solve(node)]
            if not solved:
                raise _Refused(next(iter(self.waiting)))
            for node in solved:
                self.waiting.pop(node, None)

    def _solve(self, node: fx.Node) -> bool:
        """Find the places of a member's operands and result; return whether they are known."""
        if node.target is operator.getitem:
            parent, position = node.args
            assert isinstance(parent, fx.Node) and isinstance(position, int)
            items = self.places.get(parent)
            if not isinstance(items, tuple):
                return False
            self._place(node, items[position])
            self._follow(node)
            return True
        rule, known = row_rule(node), self.places.get(node)
        assert rule is not None
        operands = {n: p for n in node.all_input_nodes if isinstance(p := self.places.get(n), Rows)}
        found = rule.places(RowCall(node, operands, known if isinstance(known, Rows) else None))
        if found is None:
            return False
        for operand, rows in found.operands.items():
            if rows is None:
                if operand in operands:
                    raise _Refused(node)
                continue
            self._place(operand, rows)
            if self._is_wide(operand) and operand.op == "call_function":
                self._add(operand)
        self._place(node, found.result)
        self._follow(node)
        return True

    def _place(self, node: fx.Node, place: Place | tuple[Place, ...]) -> None:
        if self.places.setdefault(node, place) != place:
            raise _Refused(node)

    def _follow(self, node: fx.Node) -> None:
        """Add the readers of a member's result that is wide, or a tuple."""
        place = self.places[node]
        if isinstance(place, tuple) or (isinstance(place, Rows) and self._is_wide(node)):
            for user in node.users:
                if not is_size(user):
                    self._add(user)

    def _between(self, *, backward: bool) -> list[fx.Node]:
        """Return the nodes of a half that are no members and lie on a path between members."""
        members = {n for n in self.members if (n in self.closure) == backward}
        first = min((self.order[n] for n in members), default=0)
        before: set[fx.Node] = set()
        stack = list(members)
        while stack:
            for arg in stack.pop().all_input_nodes:
                is_near = self.order[arg] > first and (arg in self.closure) == backward
                if is_near and not is_size(arg) and arg not in members and arg not in before:
                    before.add(arg)
                    stack.append(arg)
        after: set[fx.Node] = set()
        for node in sorted(before, key=self.order.__getitem__):
            if any(n in members or n in after for n in node.all_input_nodes):
                after.add(node)
        return [n for n in after if n not in self.members]

    def _check_sums(self) -> None:
        """Refuse a region that reads, in one half, what it sums over its rows there."""
        for node in self.members:
            for arg in _read_whole(node):
                is_near = arg in self.members and (arg in self.closure) == (node in self.closure)
                if is_near and self.places[arg] is SUMMED:
                    raise _Refused(node)


def _read_whole(node: fx.Node) -> Iterable[fx.Node]:
    return () if node.target is operator.getitem else node.all_input_nodes
