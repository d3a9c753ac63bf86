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
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fxckpt.eager.region_plan import RegionPlan
from fxckpt.ops.traits import traits_of
from fxckpt.torch_private import storage_key

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
        "counter",
        "geometry",
        "has_history",
        "is_chosen",
        "is_shared",
        "is_view",
        "kept",
        "needs_grad",
        "original",
        "snapshot",
        "storage",
        "storage_key",
        "unpack",
    )

    def __init__(
        self, storage: int, geometry: Any, call: Call | None, carried: TensorVersion | None = None
    ) -> None:
        self.storage = storage
        """Number of its storage."""
        self.geometry = geometry
        self.call = call
        """The call that computed it, or wrote it last; None if it is external or kept."""
        self.carried = carried
        """Version before that write, of the same tensor."""
        self.kept: Any = None
        """The tensor, or the object that the enclosing hooks packed it into."""
        self.unpack: Unpack | None = None
        self.is_shared = False
        """Whether code outside the tape can write the kept tensor."""
        self.is_view = False
        """Whether its call returned it on an earlier storage."""
        self.is_chosen = False
        """Whether it is kept by choice, not of necessity."""
        self.counter: int | None = None
        """Version counter of the kept tensor, for which a write is an error; None: not checked."""
        self.storage_key: int | None = None
        """Key of the kept tensor's storage, which ``x.data = ...`` replaces; None: not checked."""
        self.snapshot: Snapshot | None = None
        self.original: weakref.ref[Tensor] | None = None
        """The external tensor that ``kept`` is an alias of, if it has no autograd history."""
        self.needs_grad = False
        """Whether an external tensor requires a gradient."""
        self.has_history = False
        """Whether autograd knows what an external tensor was computed from."""

    def free(self) -> None:
        """Free the kept tensor."""
        self.kept = self.counter = self.storage_key = None
        self.is_shared = self.is_chosen = False

    def as_given(self) -> Any:
        """Return the kept tensor: the object that the region was given, if it can be had again.

        A tensor written or rebound since is not that object any more.
        """
        given = None if self.original is None else self.original()
        kept = self.kept
        if (
            given is None
            or given.requires_grad
            or given.shape != kept.shape
            or given.stride() != kept.stride()
            or given.storage_offset() != kept.storage_offset()
            or given.dtype != kept.dtype
            or storage_key(given) != storage_key(kept)
        ):
            return kept
        return given

    @property
    def is_leaf(self) -> bool:
        """Whether its tensor needs no recompute."""
        return self.kept is not None or self.call is None


@dataclass(frozen=True, slots=True)
class RngSnapshot:
    """State of a generator before a random op."""

    generator: torch.Generator
    state: Tensor


@dataclass(frozen=True, slots=True)
class Detail:
    """Details of a call that only reports and plans need."""

    source: str
    """Line that called it, ``"file.py:12"``."""
    module: str
    """Path of the module that called it, relative to the region's."""
    paths: tuple[tuple[int, ...], ...]
    """Path of each result tensor in the returned object."""
    device: torch.device | None
    """Device of the first result; None without results."""
    is_tracked: bool
    """Whether grad mode was on."""


@dataclass(frozen=True, slots=True)
class MetaArg:
    """Metadata-only argument (``empty_like``): any tensor of the geometry replaces it."""

    version: weakref.ref[TensorVersion]
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
        """Number of calls before it."""
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.draw = draw
        self.outputs: tuple[weakref.ref[TensorVersion], ...] = ()
        self.writes: tuple[int, ...] = ()
        """Numbers of the storages it writes."""
        self.detail: Detail | None = None

    def reads(self) -> Iterator[TensorVersion]:
        """Yield the versions among the arguments."""
        yield from _versions(self.args)
        if self.kwargs:
            yield from _versions(self.kwargs.values())


def _versions(given: Any) -> Iterator[TensorVersion]:
    for item in given:
        if type(item) is TensorVersion:
            yield item
        elif type(item) in (tuple, list):
            yield from _versions(item)


@dataclass(frozen=True)
class ForwardHolds:
    """What the forward of a region holds beside what its ops read."""

    calls: frozenset[int] = frozenset()
    """Numbers of the calls whose results the recorder keeps of necessity."""
    results: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Number of the last call during which each result was live, -1 if it is not known, and its
    bytes; by its call and position."""


class Handle:
    """Object that autograd saves in place of a tensor."""

    __slots__ = ("__weakref__", "cached", "is_requested", "tape", "time", "version")

    def __init__(self, tape: Tape, version: TensorVersion, time: int) -> None:
        self.tape = tape
        self.version = version
        self.time = time
        """Number of calls before the version: a result of the last, or an argument of the next."""
        self.cached: Tensor | None = None
        self.is_requested = False
        """Whether the running backward has requested it."""


@dataclass(frozen=True, slots=True)
class WrapperHandle:
    """Object that autograd saves in place of a tensor that is made of other tensors."""

    parts: Mapping[str, Any]
    """Handles of the tensors by name, and the parts that are no tensors."""
    rest: Any
    """What else the tensor is rebuilt from."""


class Fetchable(Protocol):
    """A storage that was sent off the device."""

    def begin(self) -> None:
        """Take memory on the device, and begin to fetch."""

    def leave(self) -> None:
        """Let the bytes go that came back."""


class Tape:
    """State that the handles of one region share."""

    __slots__ = (
        "__weakref__",
        "away",
        "context",
        "fetched",
        "handles",
        "is_made",
        "lock",
        "replay",
        "run",
    )

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self.context = context
        """Context of each replay."""
        self.handles: list[weakref.ref[Handle]] = []
        self.lock = threading.RLock()
        self.run: Any = None
        """The backward that the cached tensors of the handles belong to."""
        self.is_made = False
        """Whether that backward has recomputed them."""
        self.fetched: dict[TensorVersion, Tensor] = {}
        """Tensors that enclosing hooks unpacked in that backward: some unpack only once."""
        self.away: Sequence[Fetchable] = ()
        """What is away between the forward and the backward."""
        self.replay: PlannedReplay | None = None
        """State of a planned replay; None: the first request recomputes every saved tensor."""

    def live(self) -> list[Handle]:
        """Return the handles that autograd still holds."""
        return [handle for ref in self.handles if (handle := ref()) is not None]


class PlannedReplay:
    """A replay that follows a plan, and the calls it has run so far.

    A handle is known by the call that filled its storage, and by the position in the backward that
    requests it. ``written`` holds the numbers of the storages that calls of the region write: their
    versions are recomputed at each request.
    """

    __slots__ = (
        "calls",
        "done",
        "held_until",
        "made",
        "positions",
        "region_plan",
        "roots",
        "written",
    )

    def __init__(
        self,
        region_plan: RegionPlan,
        handles: Sequence[Handle],
        calls: Iterable[Call],
        written: frozenset[int],
    ) -> None:
        self.region_plan = region_plan
        self.written = written
        due = {recompute.call for recompute in region_plan.recomputes}
        self.calls = {call.number: weakref.ref(call) for call in calls if call.number in due}
        self.roots: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self.positions: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        packed: set[tuple[int, int]] = set()
        for handle in handles:
            root = self.roots[handle] = root_of(handle.version)
            self.positions[handle] = region_plan.position(
                handle.time, root, is_second=(handle.time, root) in packed
            )
            packed.add((handle.time, root))
        self.begin()

    def begin(self) -> None:
        """Forget the recomputed tensors of the last backward."""
        self.done = 0
        """Number of recomputes so far."""
        self.made: dict[TensorVersion, Tensor] = {}
        """Recomputed tensors that later recomputes read."""
        self.held_until: dict[TensorVersion, int] = {}
        """Index of the last recompute that reads each of them."""


def base_of(version: TensorVersion) -> TensorVersion:
    """Return the version that a version is a view of, through any number of views."""
    while version.is_view and version.call is not None:
        base = next(
            (read for read in version.call.reads() if read.storage == version.storage), None
        )
        if base is None:
            break
        version = base
    return version


def root_of(version: TensorVersion) -> int:
    """Return the number of the call that filled a version's storage; -1 if it is from outside.

    What a wait lets arrive is filled by the collective.
    """
    base = base_of(version)
    while base.carried is not None and base.call is not None and traits_of(base.call.op).is_arrival:
        base = base_of(base.carried)
    return -1 if base.call is None else base.call.number


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
        version = stack.pop()
        if version in seen:
            continue
        seen[version] = None
        call = version.call
        if version.kept is not None or call is None or version in available:
            continue
        if version.carried is not None:
            stack.append(version.carried)
        if call not in needed:
            needed.add(call)
            stack.extend(call.reads())
    return needed, seen.keys()


def tensors_in(out: Any) -> Iterator[Tensor]:
    """Yield the tensors among an op's arguments or results, in order."""
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for item in out:
            yield from tensors_in(item)


def paths(out: Any, at: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the path of each tensor that :func:`tensors_in` yields."""
    if isinstance(out, Tensor):
        yield at
    elif isinstance(out, (tuple, list)):
        for i, item in enumerate(out):
            yield from paths(item, (*at, i))
