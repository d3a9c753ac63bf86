"""Tape: what a region of eager code did, op by op, below autograd.

A region runs once. Every ATen op that it comes down to is written on the tape, and what autograd would have saved becomes a :class:`Handle`: a
place on the tape. :mod:`fxckpt.replay` makes the tensor of a place again from the tape, without any of the user's Python.

A :class:`Place` is one tensor geometry (offset, sizes, strides, dtype) over one storage between two writes to that storage. So views, and writes
through them, mean on the tape what they meant to the user: a call that writes a storage ends all its places and begins new ones, carried from the
old. Storages are told apart by address, and a weak reference keeps a dead one's address from being given to another.

A place holds the call that made it, a call holds the places it reads, and nothing holds what comes after it: with the handles that autograd lets go
of dies all that only they could ask for, without the garbage collector.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt.course import Course
from fxckpt.errors import CheckpointError
from fxckpt.passes.decisions import CHOOSING
from fxckpt.passes.kinds import UNINITIALIZED
from fxckpt.registry import registered
from fxckpt.torch_private import (
    OpOverload,
    forget_storage,
    has_effect,
    not_compiled,
    remember_storage,
    share_version,
    storage_key,
)


class Kept(enum.IntEnum):
    """Where the results of an op stay."""

    NOWHERE = 0
    ON_DEVICE = 1
    ON_CPU = 2


Keep = Callable[[int, Any, tuple[Any, ...], Mapping[str, Any], Any], Kept | frozenset[int]]
"""Where the results of an op stay, or which of them do: asked, after it ran, with the number of its call, the op, its arguments and its results."""
NOTHING_AROUND: AbstractContextManager[None] = nullcontext()
Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
Hooks = tuple[Pack, Unpack]

ZEROS = frozenset(("zeros", "zeros_like", "new_zeros"))
"""Memory that extension kernels are given to fill, beside memory that is not initialized at all."""
HIDDEN_WRITES = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
"""Arguments that an op writes although its schema does not say so: running statistics."""
LOOKING_AT_GRAD = frozenset(("_sparse_mm_reduce_impl",))
"""Ops whose kernel makes less of tensors that need no gradient, as those of a replay do not."""
OVERWRITING = frozenset(
    ("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_", "uniform_", "zero_")
)
"""Ops that write all of their first argument without reading it."""
CERTAIN, SUSPECT, BLANK, OPAQUE = range(4)
"""What a tape knows of the content of a storage.

CERTAIN: all. SUSPECT: zeros, which a kernel behind the dispatcher may have been given to fill, until a call on the tape writes it. BLANK: not
initialized, so that a kernel must have filled it, until a call writes all of it. OPAQUE: nothing, ever. In doubt, what is read is kept as it is then.
"""
PURE = frozenset(("aten", "prims", "quantized", "inductor"))
"""Namespaces of ops of which a second run gives what the first gave."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What has to be known of an op to write it down."""

    is_random: bool
    dropout: int | None
    """Position of an argument that is zero where nothing is drawn, or is left out."""
    generator: int | None
    """Position of the generator, if it is not given by keyword."""
    writes: tuple[int | str, ...]
    """Arguments that it writes: positions, or names of those given by keyword only."""
    reads: bool
    """False for a view, which looks at no element."""
    doubt: int
    """What the tape does not know of its results: CERTAIN, SUSPECT, BLANK or OPAQUE."""
    never_twice: bool
    """Its results are kept, for a second run could differ or be seen."""
    overwrites: bool
    """Writes all of its first argument without reading it."""
    is_plain: bool
    """Draws nothing, writes nothing, and leaves no doubt."""


@cache
def traits_of(op: Any) -> Traits:
    """Return the traits of an op, from its schema, its tags and what its author said."""
    if not isinstance(op, OpOverload):
        return Traits(False, None, None, (), True, OPAQUE, True, False, False)
    arguments = op._schema.arguments
    declared = [a.name if a.kwarg_only else i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    name = op._opname if op.namespace == "aten" else ""
    aliases = any(r.alias_info is not None for r in op._schema.returns)
    # set_ takes the storage of another tensor, or of none on the tape.
    never_twice = name in CHOOSING or name in LOOKING_AT_GRAD or name == "set_" or not may_run_twice(op)
    positions = {a.name: i for i, a in enumerate(arguments) if not a.kwarg_only}
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    writes = (*declared, *HIDDEN_WRITES.get(name, ()))
    doubt = OPAQUE if never_twice else BLANK if name in UNINITIALIZED else SUSPECT if name in ZEROS else CERTAIN
    return Traits(
        is_random=is_random,
        dropout=positions.get("dropout_p"),
        generator=positions.get("generator"),
        writes=writes,
        reads=bool(declared) or not aliases,
        doubt=doubt,
        never_twice=never_twice,
        overwrites=name in OVERWRITING,
        is_plain=not (is_random or writes or doubt),
    )


def may_run_twice(op: OpOverload) -> bool:
    """Return whether a second run of an op gives what its first gave, and nobody sees it."""
    said = registered(op).recompute
    if said is not None:
        return said
    return op.namespace in PURE and not has_effect(op)


class Memory:
    """A storage, while it is recorded."""

    __slots__ = ("doubt", "is_external", "number", "places", "snapshot", "writes")

    def __init__(self, number: int, *, is_external: bool, doubt: int) -> None:
        self.number = number
        self.is_external = is_external
        self.doubt = doubt
        self.places: dict[Any, Place] = {}
        """The places that nothing has written since, by geometry."""
        self.writes: list[Call] = []
        """The calls that wrote it."""
        self.snapshot: Snapshot | None = None


class Snapshot:
    """The bytes of an external storage from before the region wrote it."""

    __slots__ = ("bytes",)

    def __init__(self, bytes: Tensor) -> None:
        self.bytes = bytes


class Place:
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

    def __init__(self, memory: int, geometry: Any, call: Call | None, carried: Place | None = None) -> None:
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

    @property
    def is_leaf(self) -> bool:
        """Whether its tensor is there without running anything."""
        return self.kept is not None or self.call is None


@dataclass(frozen=True, slots=True)
class Draw:
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


class Call:
    """One op as it ran. Tensors among its arguments are :class:`Place`."""

    __slots__ = ("__weakref__", "args", "detail", "draw", "kwargs", "number", "op", "outputs", "writes")

    def __init__(self, number: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, draw: Draw | None) -> None:
        self.number = number
        """How many calls came before it."""
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.draw = draw
        self.outputs: tuple[weakref.ref[Place], ...] = ()
        self.writes: tuple[int, ...] = ()
        """Numbers of the storages that it writes."""
        self.detail: Detail | None = None

    def reads(self) -> Iterator[Place]:
        """Yield the places among the arguments."""
        yield from _places(self.args)
        if self.kwargs:
            yield from _places(self.kwargs.values())


def _places(given: Any) -> Iterator[Place]:
    for item in given:
        if type(item) is Place:
            yield item
        elif type(item) in (tuple, list):
            yield from _places(item)


class Handle:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "cached", "place", "tape", "time")

    def __init__(self, tape: Tape, place: Place, time: int) -> None:
        self.tape = tape
        self.place = place
        self.time = time
        """How many calls came before: it is a result of the last of them, or an argument of the next."""
        self.cached: Tensor | None = None


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
        self.fetched: dict[Place, Tensor] = {}
        """What the hooks around the region gave back in that backward: some give only once."""
        self.replay: PlannedReplay | None = None
        """How a plan has it go; None: all is made at the first question."""

    def live(self) -> list[Handle]:
        """Return the handles that autograd still holds."""
        return [handle for ref in self.handles if (handle := ref()) is not None]


class PlannedReplay:
    """A replay that goes by a plan, as far as it went.

    Handles are told by the call that filled what they look at, and by where the backward asks for them. ``written`` are the numbers of the
    storages that calls of the region write: what is in those is made anew whenever it is asked for.
    """

    __slots__ = ("calls", "course", "done", "held_until", "made", "positions", "roots", "written")

    def __init__(self, course: Course, handles: Sequence[Handle], calls: Iterable[Call], written: frozenset[int]) -> None:
        self.course = course
        self.written = written
        due = {rerun.call for rerun in course.reruns}
        self.calls = {call.number: weakref.ref(call) for call in calls if call.number in due}
        self.roots: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self.positions: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        packed: set[tuple[int, int]] = set()
        for handle in handles:
            root = self.roots[handle] = root_of(handle.place)
            self.positions[handle] = course.position(handle.time, root, is_second=(handle.time, root) in packed)
            packed.add((handle.time, root))
        self.begin()

    def begin(self) -> None:
        """Forget what a backward has made."""
        self.done = 0
        """How many of the course's reruns it had."""
        self.made: dict[Place, Tensor] = {}
        """What later reruns read."""
        self.held_until: dict[Place, int] = {}
        """The last of them, for each."""


class Recorder(TorchDispatchMode):
    """Writes a tape while its region runs.

    ``keep`` says which results stay in memory; ``around`` are the hooks for saved tensors that were in force around the region: what the tape
    holds goes through them, so that offloading and an outer region see it. ``keep_draws`` keeps random results, in place of the generator's state.
    With ``check_versions``, a write to what the tape holds is an error at the replay. ``locate`` says in which line and module an op runs.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        keep: Keep | None = None,
        around: Hooks | None = None,
        keep_draws: bool = False,
        check_versions: bool = True,
        locate: Callable[[], tuple[str, str]] | None = None,
        replay_context: AbstractContextManager[Any] = NOTHING_AROUND,
    ) -> None:
        self.tape = Tape(replay_context)
        self.count = 0
        """Of the calls so far."""
        self.calls: list[Call] = []
        """The calls, where there is a ``keep`` or a ``locate``: they are about to be planned or shown."""
        self._keep = keep
        self._around = around
        self._keep_draws = keep_draws
        self._check_versions = check_versions
        self._locate = locate
        self._memories: dict[int, Memory] = {}
        self._remembered: list[int] = []
        self._objects: list[Tensor] = []
        self._unsettled: list[Place] = []
        self._held: list[Place] = []
        self._is_packing = False
        """Whether ops are the recorder's own, not the region's."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code in the region run compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # at a price for every op; see not_compiled below

    def pack(self, tensor: Tensor) -> Handle:
        """Return what autograd is to hold in place of a tensor."""
        if self._unsettled:
            self._settle()
        self._is_packing = True
        tape = self.tape
        place = self._place(tensor)
        if place.is_view and place.kept is None and base_of(place).kept is not None:
            # A view of what is held anyway costs nothing, and nothing has to make it again.
            self._hold(place, tensor)
        self._is_packing = False
        handle = Handle(tape, place, self.count)
        tape.handles.append(weakref.ref(handle))
        return handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and write it down."""
        if self._unsettled:
            self._settle()
        if self._is_packing:
            return func(*args, **(kwargs or {}))
        known = traits_of(func)
        if not known.is_plain or kwargs:
            return self._run(known, func, args, kwargs or {})
        # What follows is _run for ops that draw nothing, write nothing, and leave no doubt: nearly all there are.
        placed = tuple([self._place(a) if isinstance(a, Tensor) else self._placed(a) if type(a) is list else a for a in args])
        out = func(*args)
        call = Call(self.count, func, placed, kwargs, None)
        self.count += 1
        if isinstance(out, Tensor):
            places = [self._made(out, call, CERTAIN)]
        else:
            places = [self._made(t, call, CERTAIN) for t in flatten(out)]
        call.outputs = tuple([weakref.ref(place) for place in places])
        if self._keep is not None or self._locate is not None:
            self._ask(call, places, args, {}, out)
        return out

    def _run(self, known: Traits, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = known.reads
        placed = tuple([self._placed(a, reads and not (known.overwrites and i == 0)) for i, a in enumerate(args)])
        placed_kwargs = {name: self._placed(value, reads) for name, value in kwargs.items()}
        draw = None
        never_twice = known.never_twice
        if known.is_random and (known.dropout is None or (known.dropout < len(args) and args[known.dropout] != 0.0)):
            if self._keep_draws:
                never_twice = True
            else:
                generator = _generator(known, args, kwargs)
                draw = Draw(generator, generator.get_state())
        written = self._before_writes(known, args, kwargs) if known.writes else ()
        out = op(*args, **kwargs)
        call = Call(self.count, op, placed, placed_kwargs, draw)
        self.count += 1
        if written:
            call.writes = tuple([memory.number for memory, _ in written])
            for memory, is_whole in written:
                doubt = OPAQUE if never_twice else _doubt_after(memory, is_whole=is_whole and known.overwrites)
                self._after_write(memory, call, doubt)
        doubt = OPAQUE if never_twice else known.doubt
        places = [self._made(t, call, doubt) for t in flatten(out)]
        call.outputs = tuple([weakref.ref(place) for place in places])
        if self._keep is not None or self._locate is not None:
            self._ask(call, places, args, kwargs, out)
        if written:
            self._unsettled.extend(place for memory, _ in written for place in memory.places.values() if place.is_shared)
        return out

    def _settle(self) -> None:
        """Read the versions of what a call wrote: autograd counts a write after it, which is after it was written down."""
        for place in self._unsettled:
            if place.version is not None and isinstance(place.kept, Tensor):
                place.version = place.kept._version
        self._unsettled.clear()

    def _ask(self, call: Call, places: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Ask whether the results of a call are kept, and where it ran."""
        self.calls.append(call)
        if self._locate is not None:
            call.detail = Detail(*self._locate(), tuple(paths(out)))
        if self._keep is None or not traits_of(call.op).reads:
            return
        where = self._keep(call.number, call.op, args, kwargs, out)
        for i, (place, tensor) in enumerate(zip(places, flatten(out), strict=True)):
            if (where if isinstance(where, Kept) else i in where) and place.kept is None:
                self._hold(place, tensor)
                place.is_chosen = True
                if where is Kept.ON_CPU:
                    offload(place)

    def places_of(self, tensors: Iterable[Tensor]) -> list[Place]:
        """Return the places of tensors that the region made or took."""
        return [self._place(tensor, reads=False) for tensor in tensors]

    def latest(self, kept: Mapping[int, frozenset[int]]) -> set[Place]:
        """Return the places of results, of each call by position; where they were written since, the places that this began."""
        memories = {memory.number: memory for memory in self._memories.values()}
        found = {place for call in self.calls for i in kept.get(call.number, ()) if (place := call.outputs[i]()) is not None}
        return {memories[place.memory].places[place.geometry] for place in found}

    def keep_only(self, made: Mapping[Place, Tensor]) -> None:
        """Keep by choice what was made again, and nothing else; nobody else has it."""
        for place in self._held:
            if place.is_chosen and place not in made:
                place.kept, place.is_shared, place.is_chosen, place.version = None, False, False, None
        for place, tensor in made.items():
            if place.kept is None:
                place.kept = tensor
                self._held.append(place)

    def finish(self, course: Course | None = None) -> None:
        """End the recording: what no handle can ask for dies, and what stays goes through the hooks around the region."""
        tape = self.tape
        self._settle()
        if course is not None:
            written = frozenset(number for call in self.calls for number in call.writes)
            tape.replay = PlannedReplay(course, tape.live(), self.calls, written)
        for place in self._held:
            if place.kept is not None:
                place.call = place.carried = None
        self.calls.clear()
        self._held.clear()
        for memory in self._memories.values():
            memory.places.clear()
        self._memories.clear()
        self._objects.clear()
        forget_storage(self._remembered)
        if self._around is not None:
            pack, unpack = self._around
            for place in slice_of(handle.place for handle in tape.live())[1]:
                if place.kept is not None and place.unpack is None:
                    place.kept, place.unpack = pack(place.kept), unpack

    def _placed(self, given: Any, reads: bool = True) -> Any:
        """Return an argument with its tensors replaced by their places."""
        if isinstance(given, Tensor):
            return self._place(given, reads)
        if isinstance(given, (tuple, list)) and any(isinstance(g, (Tensor, tuple, list)) for g in given):
            return [self._placed(g, reads) for g in given]
        return given

    def _add_memory(self, key: int, tensor: Tensor, *, is_external: bool, doubt: int) -> Memory:
        if key > 0:
            self._remembered.append(remember_storage(tensor))
        else:
            self._objects.append(tensor)
        memory = self._memories[key] = Memory(len(self._memories), is_external=is_external, doubt=doubt)
        return memory

    def _place(self, tensor: Tensor, reads: bool = True) -> Place:
        """Return the place of a tensor; one that the tape has not seen comes from outside."""
        key = storage_key(tensor)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._add_memory(key, tensor, is_external=True, doubt=CERTAIN)
        geometry: Any = (
            (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()) if key > 0 else None
        )
        try:
            place = memory.places.get(geometry)
        except TypeError:  # symbolic sizes have no hash
            geometry = str(geometry)
            place = memory.places.get(geometry)
        if place is None:
            place = self._seen(memory, geometry, tensor)
        if memory.doubt and reads and place.kept is None:
            self._hold(place, tensor)
        return place

    def _seen(self, memory: Memory, geometry: Any, tensor: Tensor) -> Place:
        """Return the place of a tensor that no call on the tape has made."""
        place = Place(memory.number, geometry, None)
        if memory.snapshot is not None:
            place.snapshot = memory.snapshot
            for call in memory.writes:
                place = Place(memory.number, geometry, call, carried=place)
        else:
            self._hold(place, tensor)
            place.needs_grad = tensor.requires_grad
            if not memory.is_external:
                memory.doubt = OPAQUE
        memory.places[geometry] = place
        return place

    def _made(self, tensor: Tensor, call: Call, doubt: int) -> Place:
        """Return the place of a result."""
        key = storage_key(tensor)
        memory = self._memories.get(key)
        is_view = memory is not None
        if memory is None:
            memory = self._add_memory(key, tensor, is_external=False, doubt=doubt)
        geometry: Any = (
            (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()) if key > 0 else None
        )
        try:
            place = memory.places.get(geometry)
        except TypeError:  # symbolic sizes have no hash
            geometry = str(geometry)
            place = memory.places.get(geometry)
        if place is None:
            place = memory.places[geometry] = Place(memory.number, geometry, call)
            place.is_view = is_view
        return place

    def _hold(self, place: Place, tensor: Tensor) -> None:
        """Keep a tensor as it is now: an alias, until a call on the tape writes it."""
        place.kept = share_version(tensor)
        place.is_shared = True
        if place.call is not None:
            self._held.append(place)
        if self._check_versions and not tensor.is_inference():
            place.version = tensor._version
            place.storage = storage_key(tensor) if place.kept is tensor else None

    def _before_writes(self, known: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Memory, bool]]:
        """Save what the tape holds of the storages that a call is about to write; return them, and whether it writes all of each."""
        found: dict[Memory, bool] = {}
        for tensor in (t for where in known.writes for t in _written(args, kwargs, where)):
            memory = self._memories[storage_key(tensor)]
            if memory not in found:
                self._save_from_write(memory, tensor)
            found[memory] = found.get(memory, False) or _is_whole(tensor)
        return list(found.items())

    def _save_from_write(self, memory: Memory, tensor: Tensor) -> None:
        if memory.is_external and not memory.writes and storage_key(tensor) > 0:
            memory.snapshot = Snapshot(_bytes_of(tensor).clone())
        for place in memory.places.values():
            if place.call is None and memory.snapshot is not None:
                place.kept, place.is_shared, place.version = None, False, None
                place.snapshot = memory.snapshot
            elif place.is_shared and not place.is_chosen:
                # What the tape can make again is not held; what it cannot is held as it was.
                place.kept, place.is_shared, place.version = place.kept.clone() if memory.doubt else None, False, None

    def _after_write(self, memory: Memory, call: Call, doubt: int) -> None:
        """End the places of a storage, and begin those that follow."""
        memory.writes.append(call)
        memory.doubt = doubt
        for geometry, place in memory.places.items():
            successor = memory.places[geometry] = Place(memory.number, geometry, call, carried=place)
            if place.is_chosen:
                # What was chosen to be kept is now the written value, and the old one can be had from the tape.
                is_here = place.unpack is None
                place.is_chosen = False
                if is_here:
                    self._hold(successor, place.kept)
                    successor.is_chosen = True
                    place.kept, place.is_shared, place.version = None, False, None


def _doubt_after(memory: Memory, *, is_whole: bool) -> int:
    """Return what a tape does not know of a storage after a call on it wrote the storage."""
    if any(place.kept is not None and not place.is_chosen for place in memory.places.values()):
        return max(memory.doubt, BLANK) if memory.doubt else CERTAIN
    if memory.doubt == SUSPECT or (memory.doubt == BLANK and is_whole):
        return CERTAIN
    return memory.doubt


def offload(place: Place) -> None:
    """Move what is kept to the memory of the CPU."""
    device = place.kept.device
    place.kept, place.is_shared, place.version = place.kept.to("cpu", copy=True), False, None
    place.unpack = lambda tensor: tensor.to(device)


def base_of(place: Place) -> Place:
    """Return the place that a place is a view of, or a view of a view of."""
    while place.is_view and place.call is not None:
        base = next((read for read in place.call.reads() if read.memory == place.memory), None)
        if base is None:
            break
        place = base
    return place


def root_of(place: Place) -> int:
    """Return the number of the call that filled what a place looks at; -1 for what comes from outside."""
    call = base_of(place).call
    return -1 if call is None else call.number


def slice_of(wanted: Iterable[Place], available: Container[Place] = ()) -> tuple[set[Call], Collection[Place]]:
    """Return the calls that make ``wanted`` of what is ``available``, and all the places on the way there, in the same order every time."""
    needed: set[Call] = set()
    seen: dict[Place, None] = {}
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


def _written(args: tuple[Any, ...], kwargs: Mapping[str, Any], where: int | str) -> Iterator[Tensor]:
    if isinstance(where, str):
        return flatten(kwargs.get(where))
    return flatten(args[where]) if where < len(args) else iter(())


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor covers its storage."""
    return bool(tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _generator(known: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Generator:
    """Return the generator that a random op draws from."""
    given = kwargs.get("generator")
    if given is None and known.generator is not None and known.generator < len(args):
        given = args[known.generator]
    if given is not None:
        return given  # type: ignore[no-any-return]
    device = kwargs.get("device")
    if device is None:
        device = next((t.device for t in flatten(list(args) + list(kwargs.values()))), torch.get_default_device())
    return default_generator(torch.device(device))


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator of a device that nobody named one for. Raises :class:`CheckpointError` for a device type without."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators is None:
        found = getattr(module, "_get_default_generator", None) or getattr(getattr(torch, device.type), "_get_default_mps_generator", None)
        if found is None:
            raise CheckpointError(
                f"an op drew random numbers on {device}, whose generator torch.{device.type} does not show. "
                "Keep the results of random ops in place of its state: preserve_rng_state=False."
            )
        return found() if device.type == "mps" else found(device)  # type: ignore[no-any-return]
    return generators[module.current_device() if device.index is None else device.index]  # type: ignore[no-any-return]


def _draw(generator: torch.Generator) -> Draw:
    return Draw(generator, generator.get_state())


# Where Dynamo watches a thread, it would look into these too, and there is nothing in them to compile.
not_compiled(Recorder.__torch_dispatch__)
not_compiled(Recorder.pack)
