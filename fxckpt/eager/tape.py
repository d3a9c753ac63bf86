"""Tape of a region of eager code: its ops, one by one, as they ran below autograd.

A region runs once. Each ATen op is recorded on the tape, and each tensor that autograd saves
becomes a :class:`Handle`, a tensor version on the tape. :mod:`fxckpt.eager.replay` recomputes the
tensor of a version from the tape, without any of the user's Python.

A :class:`TensorVersion` is one geometry (offset, sizes, strides, dtype) over one storage between
two writes to that storage. Views and writes through them thus keep their meaning: a call that
writes a storage ends all its versions and begins new ones, carried from the old.
:mod:`fxckpt.eager.recorder` does the recording.

References point backward only: a version holds the call that made it, a call the versions it reads.
When autograd frees a handle, all that only this handle could reach is freed at once, without the
garbage collector.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxckpt.eager.region_plan import RegionPlan

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Snapshot:
    """The bytes of an external storage from before the region wrote it."""

    __slots__ = ("bytes",)

    def __init__(self, bytes: Tensor) -> None:
        self.bytes = bytes


class TensorVersion:
    """A tensor on the tape, from one write of its storage to the next."""

    __slots__ = (
        "__weakref__",
        "call",
        "carried",
        "geometry",
        "is_chosen",
        "is_shared",
        "is_view",
        "kept",
        "memory",
        "needs_grad",
        "snapshot",
        "storage",
        "unpack",
        "version",
    )

    def __init__(
        self, memory: int, geometry: Any, call: Call | None, carried: TensorVersion | None = None
    ) -> None:
        self.memory = memory
        """Number of its storage."""
        self.geometry = geometry
        self.call = call
        """The call that made it, or wrote it last; None: it comes from outside, or is kept."""
        self.carried = carried
        """The same tensor from before that write."""
        self.kept: Any = None
        """The tensor itself, or what the hooks around the region gave for it."""
        self.unpack: Unpack | None = None
        self.is_shared = False
        """Whether others can write what is kept."""
        self.is_view = False
        """Whether its call made it over a storage that was there."""
        self.is_chosen = False
        """Whether it is kept by choice, not of necessity."""
        self.version: int | None = None
        """Of what is kept, which nobody may write; None: nobody looks."""
        self.storage: int | None = None
        """Of what is kept, if that is a parameter, which could be given another."""
        self.snapshot: Snapshot | None = None
        self.needs_grad = False
        """Whether what comes from outside requires a gradient."""

    def let_go(self) -> None:
        """Keep nothing."""
        self.kept = self.version = self.storage = None
        self.is_shared = self.is_chosen = False

    @property
    def is_leaf(self) -> bool:
        """Whether its tensor is there without running anything."""
        return self.kept is not None or self.call is None


@dataclass(frozen=True, slots=True)
class RngSnapshot:
    """Where a random op found its generator."""

    generator: torch.Generator
    state: Tensor


@dataclass(frozen=True, slots=True)
class Detail:
    """What only reports and plans ask of a call."""

    source: str
    """``"file.py:12"``, the line that called it."""
    module: str
    """Path of the module that called it, from the region's own."""
    paths: tuple[tuple[int, ...], ...]
    """Where each of its tensors is in what it returned."""
    device: torch.device | None
    """Of the first of them."""
    is_tracked: bool
    """Whether grad mode was on."""


@dataclass(frozen=True, slots=True)
class MetaArg:
    """An argument of which an op asks the geometry alone (``empty_like``): any memory does."""

    place: weakref.ref[TensorVersion]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Call:
    """One op call; its tensor arguments are :class:`TensorVersion` or :class:`MetaArg`."""

    __slots__ = (
        "__weakref__",
        "args",
        "detail",
        "draw",
        "kwargs",
        "number",
        "op",
        "outputs",
        "writes",
    )

    def __init__(
        self,
        number: int,
        op: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        draw: RngSnapshot | None,
    ) -> None:
        self.number = number
        """How many calls came before it."""
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.draw = draw
        self.outputs: tuple[weakref.ref[TensorVersion], ...] = ()
        self.writes: tuple[int, ...] = ()
        """Numbers of the storages that it writes."""
        self.detail: Detail | None = None

    def reads(self) -> Iterator[TensorVersion]:
        """Yield the places among the arguments."""
        yield from _places(self.args)
        if self.kwargs:
            yield from _places(self.kwargs.values())


def _places(given: Any) -> Iterator[TensorVersion]:
    for item in given:
        if type(item) is TensorVersion:
            yield item
        elif type(item) in (tuple, list):
            yield from _places(item)


class Handle:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "cached", "is_asked", "place", "tape", "time")

    def __init__(self, tape: Tape, place: TensorVersion, time: int) -> None:
        self.tape = tape
        self.place = place
        self.time = time
        """Number of calls before the version: a result of the last, or an argument of the next."""
        self.cached: Tensor | None = None
        self.is_asked = False
        """Whether the running backward has asked for it."""


class Tape:
    """What the handles of one region have in common."""

    __slots__ = ("__weakref__", "context", "fetched", "handles", "is_made", "lock", "replay", "run")

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self.context = context
        """What a replay runs under."""
        self.handles: list[weakref.ref[Handle]] = []
        self.lock = threading.RLock()
        self.run: Any = None
        """The backward that the cached tensors of the handles belong to."""
        self.is_made = False
        """Whether it has made them."""
        self.fetched: dict[TensorVersion, Tensor] = {}
        """What the hooks around the region gave back in that backward: some give only once."""
        self.replay: PlannedReplay | None = None
        """How a plan has it go; None: all is made at the first question."""

    def live(self) -> list[Handle]:
        """Return the handles that autograd still holds."""
        return [handle for ref in self.handles if (handle := ref()) is not None]


class PlannedReplay:
    """A replay that follows a plan, and the calls it has run so far.

    A handle is known by the call that filled its storage, and by the place where the backward asks
    for it. ``written`` holds the numbers of the storages that calls of the region write: their
    versions are recomputed whenever they are asked for.
    """

    __slots__ = ("calls", "course", "done", "held_until", "made", "positions", "roots", "written")

    def __init__(
        self,
        course: RegionPlan,
        handles: Sequence[Handle],
        calls: Iterable[Call],
        written: frozenset[int],
    ) -> None:
        self.course = course
        self.written = written
        due = {rerun.call for rerun in course.reruns}
        self.calls = {call.number: weakref.ref(call) for call in calls if call.number in due}
        self.roots: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self.positions: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        packed: set[tuple[int, int]] = set()
        for handle in handles:
            root = self.roots[handle] = root_of(handle.place)
            self.positions[handle] = course.position(
                handle.time, root, is_second=(handle.time, root) in packed
            )
            packed.add((handle.time, root))
        self.begin()

    def begin(self) -> None:
        """Forget what a backward has made."""
        self.done = 0
        """How many of the course's reruns it had."""
        self.made: dict[TensorVersion, Tensor] = {}
        """What later reruns read."""
        self.held_until: dict[TensorVersion, int] = {}
        """The last of them, for each."""


def base_of(place: TensorVersion) -> TensorVersion:
    """Return the place that a place is a view of, or a view of a view of."""
    while place.is_view and place.call is not None:
        base = next((read for read in place.call.reads() if read.memory == place.memory), None)
        if base is None:
            break
        place = base
    return place


def root_of(place: TensorVersion) -> int:
    """Return the number of the call that filled a version's storage; -1 if it is from outside."""
    call = base_of(place).call
    return -1 if call is None else call.number


def slice_of(
    wanted: Iterable[TensorVersion], available: Container[TensorVersion] = ()
) -> tuple[set[Call], Collection[TensorVersion]]:
    """Return the calls that compute ``wanted`` from ``available``, and the versions in between.

    The order is deterministic.
    """
    needed: set[Call] = set()
    seen: dict[TensorVersion, None] = {}
    stack = list(wanted)
    while stack:
        place = stack.pop()
        if place in seen:
            continue
        seen[place] = None
        call = place.call
        if place.kept is not None or call is None or place in available:
            continue
        if place.carried is not None:
            stack.append(place.carried)
        if call not in needed:
            needed.add(call)
            stack.extend(call.reads())
    return needed, seen.keys()


def flatten(out: Any) -> Iterator[Tensor]:
    """Yield the tensors among an op's arguments or results, in order."""
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for item in out:
            yield from flatten(item)


def paths(out: Any, at: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield where each tensor that :func:`flatten` yields is."""
    if isinstance(out, Tensor):
        yield at
    elif isinstance(out, (tuple, list)):
        for i, item in enumerate(out):
            yield from paths(item, (*at, i))
