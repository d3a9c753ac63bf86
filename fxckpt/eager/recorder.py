"""Recorder: writes the tape of a region while it runs.

A dispatch mode on top of all others sees every op of the region below autograd, and hooks for saved tensors give autograd handles in place of
tensors. Storages are told apart by address, and a weak reference keeps a dead one's address from being given to another.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt.eager.region_plan import RegionPlan
from fxckpt.eager.tape import (
    Call,
    Detail,
    Handle,
    MetaArg,
    Pack,
    PlannedReplay,
    RngSnapshot,
    Snapshot,
    Tape,
    TensorVersion,
    Unpack,
    base_of,
    flatten,
    paths,
    slice_of,
)
from fxckpt.errors import CheckpointError
from fxckpt.ops.traits import BLANK, CERTAIN, OPAQUE, SUSPECT, Traits, traits_of
from fxckpt.torch_private import (
    OpOverload,
    forget_storage,
    not_compiled,
    parts_of,
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
Hooks = tuple[Pack, Unpack]


class StorageState:
    """A storage, while it is recorded."""

    __slots__ = ("doubt", "is_external", "number", "places", "snapshot", "writes")

    def __init__(self, number: int, *, is_external: bool, doubt: int) -> None:
        self.number = number
        self.is_external = is_external
        self.doubt = doubt
        self.places: dict[Any, TensorVersion] = {}
        """The places that nothing has written since, by geometry."""
        self.writes: list[Call] = []
        """The calls that wrote it."""
        self.snapshot: Snapshot | None = None


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
        self._memories: dict[int, StorageState] = {}
        self._remembered: list[int] = []
        self._objects: list[Tensor] = []
        self._unsettled: list[TensorVersion] = []
        self._held: list[TensorVersion] = []
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
        if self._is_packing:
            return func(*args, **(kwargs or {}))
        known = traits_of(func)
        if not known.is_plain or kwargs:
            return self._run(known, func, args, kwargs or {})
        # What follows is _run for ops that draw nothing, write nothing, and leave no doubt: nearly all there are.
        placed = tuple(
            [
                self._place(a)
                if isinstance(a, Tensor)
                else self._placed(a)
                if type(a) is list
                else a
                for a in args
            ]
        )
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
        placed = tuple(
            [
                self._placed(a, reads and not (known.overwrites and i == 0))
                for i, a in enumerate(args)
            ]
        )
        if known.asks_geometry and type(args[0]) is Tensor and placed[0].geometry is not None:
            like = MetaArg(
                weakref.ref(placed[0]),
                tuple(args[0].shape),
                args[0].stride(),
                args[0].dtype,
                args[0].device,
            )
            placed = (like, *placed[1:])
        placed_kwargs = {
            name: self._placed(value, reads and name not in known.writes)
            for name, value in kwargs.items()
        }
        draw = None
        never_twice = known.never_twice
        if known.is_random and (
            known.dropout is None or (known.dropout < len(args) and args[known.dropout] != 0.0)
        ):
            if self._keep_draws:
                never_twice = True
            else:
                generator = _generator(known, args, kwargs)
                draw = RngSnapshot(generator, generator.get_state())
        written = self._before_writes(known, args, kwargs) if known.writes else ()
        out = op(*args, **kwargs)
        call = Call(self.count, op, placed, placed_kwargs, draw)
        self.count += 1
        if written:
            call.writes = tuple([memory.number for memory, _ in written])
            for memory, is_whole in written:
                doubt = (
                    OPAQUE
                    if never_twice
                    else _doubt_after(
                        memory, is_whole=is_whole and (known.overwrites or known.is_out)
                    )
                )
                self._after_write(memory, call, doubt)
        doubt = OPAQUE if never_twice else known.doubt
        places = [self._made(t, call, doubt) for t in flatten(out)]
        call.outputs = tuple([weakref.ref(place) for place in places])
        if known.fills is not None:
            self._move_handles(call, args[known.fills])
        if not isinstance(op, OpOverload):
            # Nothing says what a higher-order op writes.
            for tensor in flatten([*args, *kwargs.values()]):
                self._memories[storage_key(tensor)].doubt = OPAQUE
        if self._keep is not None or self._locate is not None:
            self._ask(call, places, args, kwargs, out)
        if written:
            self._unsettled.extend(
                place
                for memory, _ in written
                for place in memory.places.values()
                if place.is_shared
            )
        return out

    def _move_handles(self, call: Call, filled: Tensor) -> None:
        """Let handles of an argument that a call filled mean what it filled it with: autograd saved the argument before the call."""
        for ref in reversed(self.tape.handles):
            handle = ref()
            if handle is not None and handle.time != call.number:
                break
            place = self._place(filled)
            if handle is not None and handle.place.memory == place.memory:
                handle.place = place

    def _settle(self) -> None:
        """Read the versions of what calls wrote: autograd counts a write after it, which is after it was written down."""
        for place in self._unsettled:
            if place.version is not None and isinstance(place.kept, Tensor):
                place.version = place.kept._version
        self._unsettled.clear()

    def _ask(
        self,
        call: Call,
        places: list[TensorVersion],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """Ask whether the results of a call are kept, and where it ran."""
        self.calls.append(call)
        if self._locate is not None:
            first = next(flatten(out), None)
            call.detail = Detail(
                *self._locate(),
                tuple(paths(out)),
                None if first is None else first.device,
                torch.is_grad_enabled(),
            )
        if self._keep is None or not traits_of(call.op).reads:
            return
        where = self._keep(call.number, call.op, args, kwargs, out)
        if call.writes and any(
            memory.is_external and memory.number in call.writes
            for memory in self._memories.values()
        ):
            return  # others have it too, and it can be had from the snapshot
        for i, (place, tensor) in enumerate(zip(places, flatten(out), strict=True)):
            if (where if isinstance(where, Kept) else i in where) and place.kept is None:
                self._hold(place, tensor)
                place.is_chosen = True
                if where is Kept.ON_CPU:
                    offload(place)

    def places_of(self, tensors: Iterable[Tensor]) -> list[TensorVersion]:
        """Return the places of tensors that the region made or took."""
        return [self._place(tensor, reads=False) for tensor in tensors]

    def latest(self, kept: Mapping[int, frozenset[int]]) -> set[TensorVersion]:
        """Return the places of results, of each call by position; where they were written since, the places that this began."""
        self._settle()
        memories = {memory.number: memory for memory in self._memories.values()}
        found = {
            place
            for call in self.calls
            for i in kept.get(call.number, ())
            if (place := call.outputs[i]()) is not None
        }
        found = {place for place in found if not memories[place.memory].is_external}
        return {memories[place.memory].places[place.geometry] for place in found}

    def keep_only(self, made: Mapping[TensorVersion, Tensor]) -> None:
        """Keep by choice what was made again, and nothing else; nobody else has it."""
        for place in self._held:
            if place.is_chosen and place not in made:
                place.let_go()
        for place, tensor in made.items():
            if place.kept is None:
                place.kept = tensor
                self._held.append(place)

    def finish(self, course: RegionPlan | None = None) -> None:
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
        if isinstance(given, (tuple, list)) and any(
            isinstance(g, (Tensor, tuple, list)) for g in given
        ):
            return [self._placed(g, reads) for g in given]
        return given

    def _add_memory(
        self, key: int, tensor: Tensor, *, is_external: bool, doubt: int
    ) -> StorageState:
        if key > 0:
            self._remembered.append(remember_storage(tensor))
        else:
            self._objects.append(tensor)
        # Tensors without a storage of their own (subclasses, sparse ones) may share memory with others that the tape cannot tell.
        memory = self._memories[key] = StorageState(
            len(self._memories), is_external=is_external, doubt=doubt if key > 0 else OPAQUE
        )
        return memory

    def _place(self, tensor: Tensor, reads: bool = True) -> TensorVersion:
        """Return the place of a tensor; one that the tape has not seen comes from outside."""
        key = storage_key(tensor)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._add_memory(key, tensor, is_external=True, doubt=CERTAIN)
        geometry, place = _find(memory, key, tensor)
        if place is None:
            place = self._seen(memory, geometry, tensor)
        if memory.doubt and reads and place.kept is None:
            self._hold(place, tensor)
        return place

    def _seen(self, memory: StorageState, geometry: Any, tensor: Tensor) -> TensorVersion:
        """Return the place of a tensor that no call on the tape has made."""
        place = TensorVersion(memory.number, geometry, None)
        if memory.snapshot is not None:
            place.snapshot = memory.snapshot
            for call in memory.writes:
                place = TensorVersion(memory.number, geometry, call, carried=place)
        else:
            self._hold(place, tensor)
            place.needs_grad = tensor.requires_grad
            if not memory.is_external:
                memory.doubt = OPAQUE
        memory.places[geometry] = place
        return place

    def _made(self, tensor: Tensor, call: Call, doubt: int) -> TensorVersion:
        """Return the place of a result."""
        key = storage_key(tensor)
        memory = self._memories.get(key)
        is_view = memory is not None
        if memory is None:
            memory = self._add_memory(key, tensor, is_external=False, doubt=doubt)
        geometry, place = _find(memory, key, tensor)
        if place is None:
            place = memory.places[geometry] = TensorVersion(memory.number, geometry, call)
            place.is_view = is_view
        return place

    def _hold(self, place: TensorVersion, tensor: Tensor) -> None:
        """Keep a tensor as it is now: an alias, until a call on the tape writes it."""
        place.kept = share_version(tensor)
        place.is_shared = True
        if place.call is not None:
            self._held.append(place)
        if self._check_versions and not tensor.is_inference():
            place.version = tensor._version
            place.storage = storage_key(tensor) if place.kept is tensor else None

    def _before_writes(
        self, known: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[tuple[StorageState, bool]]:
        """Save what the tape holds of the storages that a call is about to write; return them, and whether it writes all of each."""
        found: dict[StorageState, bool] = {}
        for tensor in (t for where in known.writes for t in _written(args, kwargs, where)):
            for part in (tensor, *parts_of(tensor)):
                memory = self._memories.get(storage_key(part))
                if memory is None:
                    continue
                if memory not in found:
                    self._save_from_write(memory, part)
                found[memory] = found.get(memory, False) or _is_whole(part)
                if part is not tensor:
                    memory.doubt = OPAQUE
        return list(found.items())

    def _save_from_write(self, memory: StorageState, tensor: Tensor) -> None:
        if memory.is_external and not memory.writes and storage_key(tensor) > 0:
            memory.snapshot = Snapshot(_bytes_of(tensor).clone())
        for place in memory.places.values():
            if place.call is None and memory.snapshot is not None:
                place.let_go()
                place.snapshot = memory.snapshot
            elif place.is_shared and not place.is_chosen:
                # What the tape can make again is not held; what it cannot is held as it was.
                place.kept, place.is_shared, place.version = (
                    place.kept.clone() if memory.doubt else None,
                    False,
                    None,
                )

    def _after_write(self, memory: StorageState, call: Call, doubt: int) -> None:
        """End the places of a storage, and begin those that follow."""
        memory.writes.append(call)
        memory.doubt = doubt
        for geometry, place in memory.places.items():
            successor = memory.places[geometry] = TensorVersion(
                memory.number, geometry, call, carried=place
            )
            if place.is_chosen:
                # What was chosen to be kept is now the written value, and the old one can be had from the tape.
                is_here = place.unpack is None
                place.is_chosen = False
                if is_here:
                    self._hold(successor, place.kept)
                    successor.is_chosen = True
                    place.let_go()


def _find(memory: StorageState, key: int, tensor: Tensor) -> tuple[Any, TensorVersion | None]:
    """Return a tensor's geometry, and its place if that has one; tensors without a storage of their own have no geometry."""
    if key < 0:
        return None, memory.places.get(None)
    geometry = (
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    try:
        return geometry, memory.places.get(geometry)
    except TypeError:  # symbolic sizes have no hash
        return str(geometry), memory.places.get(str(geometry))


def _doubt_after(memory: StorageState, *, is_whole: bool) -> int:
    """Return what a tape does not know of a storage after a call on it wrote the storage."""
    if any(place.kept is not None and not place.is_chosen for place in memory.places.values()):
        return max(memory.doubt, BLANK) if memory.doubt else CERTAIN
    if memory.doubt == SUSPECT or (memory.doubt == BLANK and is_whole):
        return CERTAIN
    return memory.doubt


def offload(place: TensorVersion) -> None:
    """Move what is kept to the memory of the CPU."""
    device = place.kept.device
    place.kept, place.is_shared, place.version = place.kept.to("cpu", copy=True), False, None
    place.unpack = lambda tensor: tensor.to(device)


def _written(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], where: int | str
) -> Iterator[Tensor]:
    if isinstance(where, str):
        return flatten(kwargs.get(where))
    return flatten(args[where]) if where < len(args) else iter(())


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor covers its storage."""
    return bool(
        tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    )


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
        device = next(
            (t.device for t in flatten(list(args) + list(kwargs.values()))),
            torch.get_default_device(),
        )
    return default_generator(torch.device(device))


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator of a device that nobody named one for. Raises :class:`CheckpointError` for a device type without."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators is None:
        found = getattr(module, "_get_default_generator", None) or getattr(
            getattr(torch, device.type), "_get_default_mps_generator", None
        )
        if found is None:
            raise CheckpointError(
                f"an op drew random numbers on {device}, whose generator torch.{device.type} does not show. "
                "Keep the results of random ops in place of its state: preserve_rng_state=False."
            )
        return found() if device.type == "mps" else found(device)  # type: ignore[no-any-return]
    return generators[module.current_device() if device.index is None else device.index]  # type: ignore[no-any-return]


# Where Dynamo watches a thread, it would look into these too, and there is nothing in them to compile.
not_compiled(Recorder.__torch_dispatch__)
not_compiled(Recorder.pack)
