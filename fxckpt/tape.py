"""Tape: what a region of eager code did, op by op, below autograd.

A region runs once. Every ATen op that it comes down to is written on the tape, and what autograd would have saved becomes a :class:`Handle`: a
place on the tape. :mod:`fxckpt.replay` makes the tensor of a place again from the tape, without any of the user's Python.

A :class:`Place` is one tensor geometry (offset, sizes, strides, dtype) over one storage between two writes to that storage. So views, and writes
through them, mean on the tape what they meant to the user: a call that writes a storage ends all its places and begins new ones, carried from the
old. Storages are told apart by address, and a weak reference keeps a dead one's address from being given to another.

Nothing on the tape refers back to the tape, and places name the call that made them by number: a tape dies with its last handle, without the
garbage collector.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


Keep = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], Kept]
"""Where the results of an op stay: asked with the op, its arguments and its results after it ran."""
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
    """Position of an argument that is zero where nothing is drawn."""
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
        self.writes: list[int] = []
        """Numbers of the calls that wrote it."""
        self.snapshot: Snapshot | None = None


class Snapshot:
    """The bytes of an external storage from before the region wrote it."""

    __slots__ = ("bytes",)

    def __init__(self, bytes: Tensor) -> None:
        self.bytes = bytes


class Place:
    """A tensor on the tape, from one write of its storage to the next."""

    __slots__ = ("call", "carried", "geometry", "is_chosen", "is_shared", "kept", "memory", "snapshot", "storage", "unpack", "version")

    def __init__(self, memory: int, geometry: Any, call: int | None, carried: Place | None = None) -> None:
        self.memory = memory
        """Number of its storage."""
        self.geometry = geometry
        self.call = call
        """Number of the call that made it, or wrote it last; None: it comes from outside."""
        self.carried = carried
        """The same tensor from before that write."""
        self.kept: Any = None
        """The tensor itself, or what the hooks around the region gave for it."""
        self.unpack: Unpack | None = None
        self.is_shared = False
        """Whether others can write what is kept."""
        self.is_chosen = False
        """Whether it is kept by choice, not of necessity."""
        self.version: int | None = None
        """Of what is kept, which nobody may write; None: nobody looks."""
        self.storage: int | None = None
        """Of what is kept, if that is a parameter, which could be given another."""
        self.snapshot: Snapshot | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether its tensor is there without running anything."""
        return self.kept is not None or self.call is None


@dataclass(frozen=True, slots=True)
class Draw:
    """Where a random op found its generator."""

    generator: torch.Generator
    state: Tensor


class Call:
    """One op as it ran. Tensors among its arguments are :class:`Place`."""

    __slots__ = ("args", "draw", "kwargs", "op", "outputs", "source", "writes")

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, draw: Draw | None) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.draw = draw
        self.outputs: tuple[Place | None, ...] = ()
        self.writes: tuple[int, ...] = ()
        """Numbers of the storages that it writes."""
        self.source = ""

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

    __slots__ = ("__weakref__", "cached", "place", "tape")

    def __init__(self, tape: Tape, place: Place) -> None:
        self.tape = tape
        self.place = place
        self.cached: Tensor | None = None


class Tape:
    """What a region did. ``calls`` has None for what no backward can ask for."""

    __slots__ = ("__weakref__", "calls", "context", "handles", "lock", "run")

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self.context = context
        """What a replay runs under."""
        self.calls: list[Call | None] = []
        self.handles: list[weakref.ref[Handle]] = []
        self.lock = threading.RLock()
        self.run: Any = None
        """The backward that the cached tensors of the handles belong to."""

    def live(self) -> list[Handle]:
        """Return the handles that autograd still holds."""
        return [handle for ref in self.handles if (handle := ref()) is not None]


class Recorder(TorchDispatchMode):
    """Writes a tape while its region runs.

    ``keep`` says which results stay in memory; ``around`` are the hooks for saved tensors that were in force around the region: what the tape
    holds goes through them, so that offloading and an outer region see it. ``keep_draws`` keeps random results, in place of the generator's state.
    With ``check_versions``, a write to what the tape holds is an error at the replay. ``locate`` says where in the user's code an op runs.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        keep: Keep | None = None,
        around: Hooks | None = None,
        keep_draws: bool = False,
        check_versions: bool = True,
        locate: Callable[[], str] | None = None,
        replay_context: AbstractContextManager[Any] = NOTHING_AROUND,
    ) -> None:
        self.tape = Tape(replay_context)
        self._keep = keep
        self._around = around
        self._keep_draws = keep_draws
        self._check_versions = check_versions
        self._locate = locate
        self._memories: dict[int, Memory] = {}
        self._remembered: list[int] = []
        self._objects: list[Tensor] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code in the region run compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # at a price for every op; see not_compiled below

    def pack(self, tensor: Tensor) -> Handle:
        """Return what autograd is to hold in place of a tensor."""
        tape = self.tape
        handle = Handle(tape, self._place(tensor))
        tape.handles.append(weakref.ref(handle))
        return handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and write it down."""
        known = traits_of(func)
        if not known.is_plain or kwargs:
            return self._run(known, func, args, kwargs or {})
        # What follows is _run for ops that draw nothing, write nothing, and leave no doubt: nearly all there are.
        placed = tuple([self._place(a) if isinstance(a, Tensor) else self._placed(a) if type(a) is list else a for a in args])
        out = func(*args)
        tape = self.tape
        number = len(tape.calls)
        call = Call(func, placed, kwargs, None)
        tape.calls.append(call)
        if isinstance(out, Tensor):
            call.outputs = (self._made(out, number, CERTAIN),)
        else:
            call.outputs = tuple([self._made(t, number, CERTAIN) for t in flatten(out)])
        if self._keep is not None or self._locate is not None:
            self._ask(call, func, args, {}, out)
        return out

    def _run(self, known: Traits, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = known.reads
        placed = tuple([self._placed(a, reads and not (known.overwrites and i == 0)) for i, a in enumerate(args)])
        placed_kwargs = {name: self._placed(value, reads) for name, value in kwargs.items()}
        draw = None
        never_twice = known.never_twice
        if known.is_random and (known.dropout is None or len(args) <= known.dropout or args[known.dropout] != 0.0):
            if self._keep_draws:
                never_twice = True
            else:
                generator = _generator(known, args, kwargs)
                draw = Draw(generator, generator.get_state())
        written = self._before_writes(known, args, kwargs) if known.writes else ()
        out = op(*args, **kwargs)
        call = Call(op, placed, placed_kwargs, draw)
        number = len(self.tape.calls)
        self.tape.calls.append(call)
        if written:
            call.writes = tuple([memory.number for memory, _ in written])
            for memory, is_whole in written:
                doubt = OPAQUE if never_twice else _doubt_after(memory, is_whole=is_whole and known.overwrites)
                self._after_write(memory, number, doubt)
        doubt = OPAQUE if never_twice else known.doubt
        call.outputs = tuple([self._made(t, number, doubt) for t in flatten(out)])
        self._ask(call, op, args, kwargs, out)
        return out

    def _ask(self, call: Call, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Ask whether the results of an op are kept, and where it ran."""
        if self._locate is not None:
            call.source = self._locate()
        if self._keep is None or not traits_of(op).reads:
            return
        where = self._keep(op, args, kwargs, out)
        for place, tensor in zip(call.outputs, flatten(out), strict=True):
            if where and place is not None and place.kept is None:
                self._hold(place, tensor)
                place.is_chosen = True
                if where is Kept.ON_CPU:
                    offload(place)

    def finish(self) -> Tape:
        """End the recording: what no handle can ask for is dropped, and what stays goes through the hooks around the region."""
        tape = self.tape
        forget_storage(self._remembered)
        for memory in self._memories.values():
            memory.places.clear()
        self._memories.clear()
        self._objects.clear()
        needed, places = slice_of(tape, [handle.place for handle in tape.live()])
        for number, call in enumerate(tape.calls):
            if number not in needed:
                tape.calls[number] = None
            elif call is not None:
                call.outputs = tuple([place if place in places else None for place in call.outputs])
        if self._around is not None:
            pack, unpack = self._around
            for place in places:
                if place.kept is not None and place.unpack is None:
                    place.kept, place.unpack = pack(place.kept), unpack
        return tape

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
        geometry = (
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
            for number in memory.writes:
                place = Place(memory.number, geometry, number, carried=place)
        else:
            self._hold(place, tensor)
            if not memory.is_external:
                memory.doubt = OPAQUE
        memory.places[geometry] = place
        return place

    def _made(self, tensor: Tensor, call: int, doubt: int) -> Place:
        """Return the place of a result."""
        key = storage_key(tensor)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._add_memory(key, tensor, is_external=False, doubt=doubt)
        geometry = (
            (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()) if key > 0 else None
        )
        try:
            place = memory.places.get(geometry)
        except TypeError:  # symbolic sizes have no hash
            geometry = str(geometry)
            place = memory.places.get(geometry)
        if place is None:
            place = memory.places[geometry] = Place(memory.number, geometry, call)
        return place

    def _hold(self, place: Place, tensor: Tensor) -> None:
        """Keep a tensor as it is now: an alias, until a call on the tape writes it."""
        place.kept = share_version(tensor)
        place.is_shared = True
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
                place.kept, place.is_shared, place.version = place.kept.clone(), False, None

    def _after_write(self, memory: Memory, call: int, doubt: int) -> None:
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


def recorded(tape: Tape, number: int) -> Call:
    """Return a call of a tape."""
    call = tape.calls[number]
    assert call is not None, "dropped as nothing that a handle can ask for"
    return call


def slice_of(tape: Tape, wanted: Iterable[Place]) -> tuple[set[int], set[Place]]:
    """Return the numbers of the calls that make ``wanted``, and all the places on the way there."""
    needed: set[int] = set()
    seen: set[Place] = set()
    stack = list(wanted)
    while stack:
        place = stack.pop()
        if place in seen:
            continue
        seen.add(place)
        if place.is_leaf:
            continue
        number = place.call
        assert number is not None
        if place.carried is not None:
            stack.append(place.carried)
        if number not in needed:
            needed.add(number)
            stack.extend(recorded(tape, number).reads())
    return needed, seen


def flatten(out: Any) -> Iterator[Tensor]:
    """Yield the tensors among an op's arguments or results, in order."""
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for item in out:
            yield from flatten(item)


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
