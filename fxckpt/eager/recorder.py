"""Recorder of a region's tape.

A dispatch mode on top of all others sees every op of the region below autograd; saved-tensor hooks
give autograd handles in place of tensors. Storages are identified by address; a weak reference
keeps the address of a dead storage from being reused.
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
    """Location of an op's kept results."""

    NOWHERE = 0
    ON_DEVICE = 1
    ON_CPU = 2


Keep = Callable[[int, Any, tuple[Any, ...], Mapping[str, Any], Any], Kept | frozenset[int]]
"""Selects the results of an op to keep, or their location.

Called after the op, with the number of its call, the op, its arguments and its results."""
NOTHING_AROUND: AbstractContextManager[None] = nullcontext()
Hooks = tuple[Pack, Unpack]


class StorageState:
    """State of a storage during the recording."""

    __slots__ = ("doubt", "is_external", "number", "places", "snapshot", "writes")

    def __init__(self, number: int, *, is_external: bool, doubt: int) -> None:
        self.number = number
        self.is_external = is_external
        self.doubt = doubt
        self.places: dict[Any, TensorVersion] = {}
        """Current versions of its tensors, by geometry."""
        self.writes: list[Call] = []
        """Calls that wrote the storage."""
        self.snapshot: Snapshot | None = None


class Recorder(TorchDispatchMode):
    """Dispatch mode that writes a tape while its region runs.

    ``keep`` selects the results to keep. ``around`` are the saved-tensor hooks that enclose the
    region: tensors held by the tape go through them, so that offloading and an outer region see
    them. ``keep_draws`` keeps random results in place of the generator's state. With
    ``check_versions``, a write to a tensor that the tape holds is an error at the replay.
    ``locate`` returns the line and module of an op.
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
        """Number of calls so far."""
        self.calls: list[Call] = []
        """Calls to be planned or shown; empty without ``keep`` and ``locate``."""
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
        """Whether current ops are the recorder's own, not the region's."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code in the region run compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # costs time in every op; see not_compiled below

    def pack(self, tensor: Tensor) -> Handle:
        """Return the handle that autograd saves in place of a tensor."""
        self._is_packing = True
        tape = self.tape
        place = self._place(tensor)
        if place.is_view and place.kept is None and base_of(place).kept is not None:
            # A view of a held tensor costs no memory; holding it saves its recompute.
            self._hold(place, tensor)
        self._is_packing = False
        handle = Handle(tape, place, self.count)
        tape.handles.append(weakref.ref(handle))
        return handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and record its call."""
        if self._is_packing:
            return func(*args, **(kwargs or {}))
        known = traits_of(func)
        if not known.is_plain or kwargs:
            return self._run(known, func, args, kwargs or {})
        # Fast path of _run for most ops: not random, no writes, transparent results.
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
        """Run an op of any traits and record its call."""
        reads = known.reads
        placed = tuple(
            [
                self._placed(a, reads and not (known.overwrites and i == 0))
                for i, a in enumerate(args)
            ]
        )
        if known.asks_geometry and type(args[0]) is Tensor and placed[0].geometry is not None:
            placed = (_meta_arg(placed[0], args[0]), *placed[1:])
        placed_kwargs = {
            name: self._placed(value, reads and name not in known.writes)
            for name, value in kwargs.items()
        }
        draw = None
        never_twice = known.never_twice
        if _draws(known, args):
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
            covers = known.overwrites or known.is_out
            for memory, is_whole in written:
                doubt = _doubt_after(memory, is_whole=is_whole and covers)
                self._after_write(memory, call, OPAQUE if never_twice else doubt)
        doubt = OPAQUE if never_twice else known.doubt
        places = [self._made(t, call, doubt) for t in flatten(out)]
        call.outputs = tuple([weakref.ref(place) for place in places])
        if known.fills is not None:
            self._move_handles(call, args[known.fills])
        if not isinstance(op, OpOverload):
            # The writes of a higher-order op are unknown.
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
        """Point handles of an argument that a call filled to its new version.

        Autograd saved the argument before the call.
        """
        for ref in reversed(self.tape.handles):
            handle = ref()
            if handle is not None and handle.time != call.number:
                break
            place = self._place(filled)
            if handle is not None and handle.place.memory == place.memory:
                handle.place = place

    def _settle(self) -> None:
        """Update versions of written tensors: autograd bumps them after the write is recorded."""
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
        """Ask ``keep`` for the results of a call, and ``locate`` for its place."""
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
            return  # the storage is shared with code outside; the snapshot restores it
        for i, (place, tensor) in enumerate(zip(places, flatten(out), strict=True)):
            if (where if isinstance(where, Kept) else i in where) and place.kept is None:
                self._hold(place, tensor)
                place.is_chosen = True
                if where is Kept.ON_CPU:
                    offload(place)

    def places_of(self, tensors: Iterable[Tensor]) -> list[TensorVersion]:
        """Return the versions of tensors that the region computed or read."""
        return [self._place(tensor, reads=False) for tensor in tensors]

    def latest(self, kept: Mapping[int, frozenset[int]]) -> set[TensorVersion]:
        """Return the latest versions of the kept results, given by call and position."""
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
        """Keep the recomputed tensors ``made``, and free all other results kept by choice."""
        for place in self._held:
            if place.is_chosen and place not in made:
                place.let_go()
        for place, tensor in made.items():
            if place.kept is None:
                place.kept = tensor
                self._held.append(place)

    def finish(self, course: RegionPlan | None = None) -> None:
        """Finish recording: free values no handle can reach, pass others to the enclosing hooks."""
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
        """Return an argument with its tensors replaced by their versions."""
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
        # Tensors without a storage of their own (subclasses, sparse tensors) may share memory with
        # tensors unknown to the tape.
        memory = self._memories[key] = StorageState(
            len(self._memories), is_external=is_external, doubt=doubt if key > 0 else OPAQUE
        )
        return memory

    def _place(self, tensor: Tensor, reads: bool = True) -> TensorVersion:
        """Return the version of a tensor; a tensor new to the tape is external."""
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
        """Return the version of a tensor that no recorded call returned."""
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
        """Return the version of a call's result."""
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
        """Keep a tensor's current value: an alias, until a recorded call writes it."""
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
        """Save held tensors of the storages that a call will write.

        Returns these storages, each with whether the call writes all of it.
        """
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
                # Free a value that the tape can recompute; copy one that it cannot.
                place.kept, place.is_shared, place.version = (
                    place.kept.clone() if memory.doubt else None,
                    False,
                    None,
                )

    def _after_write(self, memory: StorageState, call: Call, doubt: int) -> None:
        """End the versions of a storage, and begin their successors."""
        memory.writes.append(call)
        memory.doubt = doubt
        for geometry, place in memory.places.items():
            successor = memory.places[geometry] = TensorVersion(
                memory.number, geometry, call, carried=place
            )
            if place.is_chosen:
                # The choice passes to the written value; the tape can recompute the old one.
                is_here = place.unpack is None
                place.is_chosen = False
                if is_here:
                    self._hold(successor, place.kept)
                    successor.is_chosen = True
                    place.let_go()


def _find(memory: StorageState, key: int, tensor: Tensor) -> tuple[Any, TensorVersion | None]:
    """Return a tensor's geometry (None without a storage of its own) and its version, if any."""
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


def _meta_arg(version: TensorVersion, tensor: Tensor) -> MetaArg:
    """Return the metadata-only argument for a tensor whose values an op does not read."""
    return MetaArg(
        weakref.ref(version), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    )


def _draws(known: Traits, args: tuple[Any, ...]) -> bool:
    """Return whether a call draws random numbers; dropout with probability 0 does not."""
    if not known.is_random or known.dropout is None:
        return known.is_random
    return bool(known.dropout < len(args) and args[known.dropout] != 0.0)


def _doubt_after(memory: StorageState, *, is_whole: bool) -> int:
    """Return the opacity of a storage after a recorded call wrote it."""
    if any(place.kept is not None and not place.is_chosen for place in memory.places.values()):
        return max(memory.doubt, BLANK) if memory.doubt else CERTAIN
    if memory.doubt == SUSPECT or (memory.doubt == BLANK and is_whole):
        return CERTAIN
    return memory.doubt


def offload(place: TensorVersion) -> None:
    """Move a kept tensor to CPU memory."""
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
    """Return a device's default generator; raise :class:`CheckpointError` if it has none."""
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
                f"an op drew random numbers on {device}, whose generator torch.{device.type} does "
                "not show. Keep the results of random ops in place of its state: "
                "preserve_rng_state=False."
            )
        return found() if device.type == "mps" else found(device)  # type: ignore[no-any-return]
    index = module.current_device() if device.index is None else device.index
    return generators[index]  # type: ignore[no-any-return]


# Dynamo would trace these functions too; they hold nothing to compile.
not_compiled(Recorder.__torch_dispatch__)
not_compiled(Recorder.pack)
