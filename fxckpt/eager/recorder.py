"""Recorder of a region's tape.

A dispatch mode on top of all others sees every op of the region below autograd; saved-tensor hooks
give autograd handles in place of tensors. Storages are identified by address; a weak reference
keeps the address of a dead storage from being reused.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt.eager.away import can_leave, send_kept
from fxckpt.eager.region_plan import RegionPlan
from fxckpt.eager.replay import kept_tensor
from fxckpt.eager.tape import (
    Call,
    Detail,
    ForwardHolds,
    Handle,
    MetaArg,
    Pack,
    PlannedReplay,
    RngSnapshot,
    Snapshot,
    Tape,
    TensorVersion,
    Unpack,
    WrapperHandle,
    base_of,
    paths,
    slice_of,
    tensors_in,
)
from fxckpt.errors import CheckpointError
from fxckpt.ops.traits import Opacity, Traits, traits_of
from fxckpt.tiers import Tier
from fxckpt.torch_private import (
    FakeTensor,
    OpOverload,
    forget_storage,
    holds_wrapper,
    is_faking,
    is_freed,
    is_wrapper,
    not_compiled,
    only_waits,
    parts_of,
    remember_storage,
    share_version,
    storage_key,
    taken_apart,
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
"""Hooks around a region that is in none."""
Hooks = tuple[Pack, Unpack]
DETACH = torch.ops.aten.detach.default
TRANSPARENT = Opacity.TRANSPARENT
"""A global, as every op looks it up."""


class StorageState:
    """State of a storage during the recording."""

    __slots__ = ("is_external", "nbytes", "number", "opacity", "snapshot", "versions", "writes")

    def __init__(self, number: int, *, is_external: bool, opacity: Opacity) -> None:
        self.number = number
        self.is_external = is_external
        self.opacity = opacity
        self.versions: dict[Any, TensorVersion] = {}
        """Current versions of its tensors, by geometry."""
        self.writes: list[Call] = []
        """Calls that wrote the storage."""
        self.snapshot: Snapshot | None = None
        self.nbytes = 0
        """Its bytes when it was made, in a region that is planned."""


class Recorder(TorchDispatchMode):
    """Dispatch mode that writes a tape while its region runs.

    ``keep`` selects the results to keep. ``around`` are the saved-tensor hooks that enclose the
    region: tensors held by the tape go through them, so that offloading and an outer region see
    them; without ``hooks_see_chosen``, results kept by choice do not. ``keep_draws`` keeps random
    results in place of the generator's state. With ``check_versions``, a write to a tensor that the
    tape holds is an error at the replay. ``locate`` returns the line and module of an op. What is
    kept is sent to the ``tier`` when the region ends. ``is_unplanned`` returns whether the region
    will be planned, for which the lifetimes of its storages are noted.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        keep: Keep | None = None,
        around: Hooks | None = None,
        hooks_see_chosen: bool = True,
        keep_draws: bool = False,
        check_versions: bool = True,
        locate: Callable[[], tuple[str, str]] | None = None,
        tier: Tier | None = None,
        is_unplanned: Callable[[], bool] | None = None,
        replay_context: AbstractContextManager[Any] = NOTHING_AROUND,
    ) -> None:
        self.tape = Tape(replay_context)
        self.count = 0
        """Number of calls so far."""
        self.calls: list[Call] = []
        """Calls to be planned or shown; empty without ``keep`` and ``locate``."""
        self._keep = keep
        self._around = around
        self._hooks_see_chosen = hooks_see_chosen
        self._keep_draws = keep_draws
        self._check_versions = check_versions
        self._locate = locate
        self._tier = tier
        self._is_unplanned = is_unplanned
        self._alive: dict[int, int] = {}
        """Numbers of the storages that the region made and that are not known to be freed, by
        address."""
        self._is_noting = False
        """Whether calls since the last one have noted what was freed."""
        self._freed: dict[int, int] = {}
        """Number of the last call during which each storage was alive, of those freed since."""
        self._named: dict[int, frozenset[int]] = {}
        """Positions of the results that a policy sends away, by the numbers of their calls."""
        self._storages: dict[int, StorageState] = {}
        self._remembered: list[int] = []
        self._objects: list[Tensor] = []
        self._unsettled: list[TensorVersion] = []
        self._held: list[TensorVersion] = []
        self.has_wrappers = False
        """Whether ops ran on tensors that are made of other tensors."""
        self._was_faking = is_faking()
        """Whether the region itself runs on fake tensors."""
        self._is_packing = False
        """Whether current ops are the recorder's own, not the region's."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code in the region run compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # costs time in every op; see not_compiled below

    def pack(self, tensor: Tensor) -> Handle | WrapperHandle:
        """Return the handle that autograd saves in place of a tensor."""
        if is_wrapper(tensor):
            parts, rest = taken_apart(tensor)
            return WrapperHandle(
                {
                    name: self.pack(part) if isinstance(part, Tensor) else part
                    for name, part in parts.items()
                },
                rest,
            )
        self._is_packing = True
        tape = self.tape
        version = self._version_of(tensor)
        if version.is_view and version.kept is None and base_of(version).kept is not None:
            # A view of a held tensor costs no memory; holding it saves its recompute.
            self._hold(version, tensor)
        self._is_packing = False
        handle = Handle(tape, version, self.count)
        tape.handles.append(weakref.ref(handle))
        return handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and record its call."""
        if self._is_packing:
            return func(*args, **(kwargs or {}))
        if types and not self._is_of_tape(types):
            if holds_wrapper(types):
                # The subclass calls ops on the tensors that it is made of, which are recorded.
                self.has_wrappers |= not only_waits(types)
                return NotImplemented
            return func(*args, **(kwargs or {}))
        if self._is_unplanned is not None and self._is_unplanned():
            self._note_freed()
        if func is DETACH and not args[0].requires_grad:
            # Torch detaches what a factory returns where something shares it, such as a kept value.
            return func(*args)
        known = traits_of(func)
        if not known.is_plain or kwargs:
            return self._run(known, func, args, kwargs or {})
        # Fast path of _run for most ops: not random, no writes, transparent results.
        versioned = tuple(
            [
                self._version_of(a)
                if isinstance(a, Tensor)
                else self._with_versions(a)
                if type(a) is list
                else a
                for a in args
            ]
        )
        out = func(*args)
        if is_wrapper(out):
            return out  # It is made of tensors of the tape, or of ones from outside.
        call = Call(self.count, func, versioned, kwargs, None)
        self.count += 1
        if isinstance(out, Tensor):
            versions = [self._made(out, call, TRANSPARENT)]
        else:
            versions = [self._made(t, call, TRANSPARENT) for t in tensors_in(out)]
        call.outputs = tuple([weakref.ref(version) for version in versions])
        if self._keep is not None or self._locate is not None:
            self._ask(call, versions, args, {}, out)
        return out

    def _run(self, known: Traits, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of any traits and record its call."""
        if not self._was_faking and is_faking():
            return op(*args, **kwargs)  # Such as a question of DTensor's about shapes.
        versioned, versioned_kwargs = self._versioned(known, args, kwargs)
        is_random = _draws(known, args)
        never_twice = known.never_twice or (is_random and self._keep_draws)
        draw = _state_before(known, args, kwargs) if is_random and not self._keep_draws else None
        written = self._before_writes(known, args, kwargs) if known.writes else ()
        out = op(*args, **kwargs)
        if is_wrapper(out):
            return out  # It is made of tensors of the tape, or of ones from outside.
        call = Call(self.count, op, versioned, versioned_kwargs, draw)
        self.count += 1
        if written:
            self._record_writes(known, call, written, never_twice=never_twice)
        opacity = Opacity.OPAQUE if never_twice else known.opacity
        versions = [self._made(t, call, opacity) for t in tensors_in(out)]
        call.outputs = tuple([weakref.ref(version) for version in versions])
        if known.fills is not None:
            self._move_handles(args[known.fills], since=call.number)
        elif known.is_arrival and written:
            self._move_handles(args[0], since=0)
        if not isinstance(op, OpOverload):
            # The writes of a higher-order op are unknown.
            for tensor in tensors_in([*args, *kwargs.values()]):
                self._storages[storage_key(tensor)].opacity = Opacity.OPAQUE
        if self._keep is not None or self._locate is not None:
            self._ask(call, versions, args, kwargs, out)
        if written:
            self._unsettled.extend(
                version
                for storage, _ in written
                for version in storage.versions.values()
                if version.is_shared
            )
        return out

    def _record_writes(
        self,
        known: Traits,
        call: Call,
        written: Sequence[tuple[StorageState, bool]],
        *,
        never_twice: bool,
    ) -> None:
        """Record the storages that a call wrote, and whether it wrote each as a whole."""
        call.writes = tuple([storage.number for storage, _ in written])
        covers = known.overwrites or known.is_out
        for storage, is_whole in written:
            opacity = _opacity_after(storage, is_whole=is_whole and covers)
            self._after_write(storage, call, Opacity.OPAQUE if never_twice else opacity)

    def _versioned(
        self, known: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return an op's arguments, with the versions that it reads in place of tensors."""
        reads = known.reads
        versioned = tuple(
            [
                self._with_versions(a, reads and not (known.overwrites and i == 0))
                for i, a in enumerate(args)
            ]
        )
        if known.asks_geometry and type(args[0]) is Tensor and versioned[0].geometry is not None:
            versioned = (_meta_arg(versioned[0], args[0]), *versioned[1:])
        versioned_kwargs = {
            name: self._with_versions(value, reads and name not in known.writes)
            for name, value in kwargs.items()
        }
        return versioned, versioned_kwargs

    def _is_of_tape(self, types: Iterable[type]) -> bool:
        """Return whether tensors of some classes are recorded as they are."""
        if holds_wrapper(types):
            return False
        return self._was_faking or not any(issubclass(kind, FakeTensor) for kind in types)

    def _note_freed(self) -> None:
        """Note the storages that were freed since the last call."""
        for key in [key for key in self._alive if is_freed(key)]:
            number = self._alive.pop(key)
            if self._is_noting:
                self._freed[number] = self.count - 1
        self._is_noting = True

    def _move_handles(self, filled: Tensor, *, since: int) -> None:
        """Point handles of a tensor's storage to its new versions.

        Autograd saved them before the values were there, none of them before call ``since``.
        """
        storage = self._storages[storage_key(filled)]
        for ref in reversed(self.tape.handles):
            handle = ref()
            if handle is not None and handle.time < since:
                break
            if handle is not None and handle.version.storage == storage.number:
                handle.version = storage.versions[handle.version.geometry]

    def _settle(self) -> None:
        """Update versions of written tensors: autograd bumps them after the write is recorded."""
        for version in self._unsettled:
            if version.counter is not None and isinstance(version.kept, Tensor):
                version.counter = version.kept._version
        self._unsettled.clear()

    def _ask(
        self,
        call: Call,
        versions: list[TensorVersion],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """Ask ``keep`` for the results of a call, and ``locate`` for its line and module."""
        self.calls.append(call)
        if self._locate is not None:
            first = next(tensors_in(out), None)
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
            storage.is_external and storage.number in call.writes
            for storage in self._storages.values()
        ):
            return  # the storage is shared with code outside; the snapshot restores it
        for i, (version, tensor) in enumerate(zip(versions, tensors_in(out), strict=True)):
            if (where if isinstance(where, Kept) else i in where) and version.kept is None:
                self._hold(version, tensor)
                # The tape could not recompute a result of an op that must not run twice.
                storage = self._storages[storage_key(tensor)]
                version.is_chosen = storage.opacity < Opacity.OPAQUE
                if where is Kept.ON_CPU and self._tier is None:
                    keep_on_cpu(version)
                elif where is Kept.ON_CPU:
                    self._named[call.number] = frozenset(range(len(versions)))

    def versions_of(self, tensors: Iterable[Tensor]) -> list[TensorVersion]:
        """Return the versions of tensors that the region computed or read."""
        return [self._version_of(tensor, reads=False) for tensor in tensors]

    def held(self) -> ForwardHolds:
        """Return what the forward held: of necessity, and by references of the region's Python."""
        own = {s.number: s for s in self._storages.values() if not s.is_external}
        kept = [version for version in self._held if version.kept is not None]
        calls = frozenset(
            version.call.number
            for version in kept
            if version.call is not None
            and not (version.is_chosen or version.is_view or version.storage not in own)
        )
        chosen = {version.storage for version in kept if version.is_chosen}
        ends = dict.fromkeys(self._alive.values() if self._is_noting else (), self.count)
        ends |= self._freed
        results: dict[tuple[int, int], tuple[int, int]] = {}
        for call in self.calls:
            for i, ref in enumerate(call.outputs):
                version = ref()
                if version is None or version.storage not in own:
                    continue
                # What several calls write is the result of the last of them.
                writes = own[version.storage].writes
                if call is writes[-1] if writes else not version.is_view:
                    last = -1 if version.storage in chosen else ends.get(version.storage, -1)
                    results[call.number, i] = (last, own[version.storage].nbytes)
        return ForwardHolds(calls, results)

    def latest(self, kept: Mapping[int, frozenset[int]]) -> set[TensorVersion]:
        """Return the latest versions of the kept results, given by call and position."""
        self._settle()
        storages = {storage.number: storage for storage in self._storages.values()}
        found = {
            version
            for call in self.calls
            for i in kept.get(call.number, ())
            if (version := call.outputs[i]()) is not None
        }
        found = {version for version in found if not storages[version.storage].is_external}
        return {storages[version.storage].versions[version.geometry] for version in found}

    def keep_only(self, made: Mapping[TensorVersion, Tensor]) -> None:
        """Keep the recomputed tensors ``made``, and free all other results kept by choice."""
        for version in self._held:
            if version.is_chosen and version not in made:
                version.free()
        for version, tensor in made.items():
            if version.kept is None:
                version.kept = tensor
                version.is_chosen = True
                self._held.append(version)

    def leaving(self, region_plan: RegionPlan | None) -> list[TensorVersion]:
        """Return the versions that are sent away.

        They are the inputs that autograd computed, and the results that are kept; where a policy
        says which of these, only those.
        """
        self._settle()
        away = self._named if region_plan is None else {**self._named, **region_plan.away}
        named = self.latest(away)

        def leaves(version: TensorVersion) -> bool:
            base = base_of(version)
            if base.call is None:
                return base.has_history
            return not away or not version.is_chosen or not named.isdisjoint((version, base))

        reached = slice_of(handle.version for handle in self.tape.live())[1]
        return [version for version in reached if can_leave(version) and leaves(version)]

    def send(self, region_plan: RegionPlan | None) -> None:
        """Send away what is to leave; raise the errors of the tier."""
        if self._tier is not None:
            self.tape.away = send_kept(self.leaving(region_plan), self._tier, kept_tensor)

    def finish(self, region_plan: RegionPlan | None = None) -> None:
        """Finish recording: free values no handle can reach, pass others to the enclosing hooks."""
        tape = self.tape
        self._settle()
        if region_plan is not None:
            written = frozenset(number for call in self.calls for number in call.writes)
            tape.replay = PlannedReplay(region_plan, tape.live(), self.calls, written)
        last_uses = {} if region_plan is None else region_plan.last_uses
        for version in self._held:
            if version.kept is None:
                continue
            base = base_of(version)
            if base.call is None or base.call.number not in last_uses:
                version.call = version.carried = None
            elif version.is_view:
                version.free()  # It would hold its base, which is freed before it is recomputed.
        self.calls.clear()
        self._held.clear()
        for storage in self._storages.values():
            storage.versions.clear()
        self._storages.clear()
        self._objects.clear()
        forget_storage(self._remembered)
        if self._around is not None:
            pack, unpack = self._around
            for version in slice_of(handle.version for handle in tape.live())[1]:
                if version.kept is None or version.unpack is not None:
                    continue
                if self._hooks_see_chosen or not version.is_chosen:
                    version.kept, version.unpack = pack(version.as_given()), unpack

    def _with_versions(self, given: Any, reads: bool = True) -> Any:
        """Return an argument with its tensors replaced by their versions."""
        if isinstance(given, Tensor):
            return self._version_of(given, reads)
        if isinstance(given, (tuple, list)) and any(
            isinstance(g, (Tensor, tuple, list)) for g in given
        ):
            return [self._with_versions(g, reads) for g in given]
        return given

    def _add_storage(
        self, key: int, tensor: Tensor, *, is_external: bool, opacity: Opacity
    ) -> StorageState:
        if key > 0:
            self._remembered.append(remember_storage(tensor))
        else:
            self._objects.append(tensor)
        # Tensors without a storage of their own (subclasses, sparse tensors) may share memory with
        # tensors unknown to the tape.
        storage = self._storages[key] = StorageState(
            len(self._storages),
            is_external=is_external,
            opacity=opacity if key > 0 else Opacity.OPAQUE,
        )
        if self._is_unplanned is not None and key > 0 and not is_external:
            self._alive[key] = storage.number
            storage.nbytes = int(tensor.untyped_storage().nbytes())
        return storage

    def _version_of(self, tensor: Tensor, reads: bool = True) -> TensorVersion:
        """Return the version of a tensor; a tensor new to the tape is external."""
        key = storage_key(tensor)
        storage = self._storages.get(key)
        if storage is None:
            storage = self._add_storage(key, tensor, is_external=True, opacity=TRANSPARENT)
        geometry, version = _find(storage, key, tensor)
        if version is None:
            version = self._seen(storage, geometry, tensor)
        if storage.opacity and reads and version.kept is None:
            self._hold(version, tensor)
        return version

    def _seen(self, storage: StorageState, geometry: Any, tensor: Tensor) -> TensorVersion:
        """Return the version of a tensor that no recorded call returned."""
        version = TensorVersion(storage.number, geometry, None)
        if storage.snapshot is not None:
            version.snapshot = storage.snapshot
            for call in storage.writes:
                version = TensorVersion(storage.number, geometry, call, carried=version)
        else:
            self._hold(version, tensor)
            version.needs_grad = tensor.requires_grad
            version.has_history = tensor.grad_fn is not None
            if not storage.is_external:
                storage.opacity = Opacity.OPAQUE
        storage.versions[geometry] = version
        return version

    def _made(self, tensor: Tensor, call: Call, opacity: Opacity) -> TensorVersion:
        """Return the version of a call's result."""
        key = storage_key(tensor)
        storage = self._storages.get(key)
        is_view = storage is not None
        if storage is None:
            storage = self._add_storage(key, tensor, is_external=False, opacity=opacity)
        geometry, version = _find(storage, key, tensor)
        if version is None:
            version = storage.versions[geometry] = TensorVersion(storage.number, geometry, call)
            version.is_view = is_view
        return version

    def _hold(self, version: TensorVersion, tensor: Tensor) -> None:
        """Keep a tensor's current value: an alias, until a recorded call writes it."""
        version.kept = share_version(tensor)
        version.is_shared = True
        if version.call is not None:
            self._held.append(version)
        elif version.geometry and version.kept is not tensor and not tensor.requires_grad:
            version.original = weakref.ref(tensor)
        if self._check_versions and not tensor.is_inference():
            version.counter = tensor._version
            version.storage_key = storage_key(tensor) if version.kept is tensor else None

    def _before_writes(
        self, known: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[tuple[StorageState, bool]]:
        """Save held tensors of the storages that a call will write.

        Returns these storages, each with whether the call writes all of it.
        """
        found: dict[StorageState, bool] = {}
        for tensor in (t for where in known.writes for t in _written(args, kwargs, where)):
            for part in (tensor, *parts_of(tensor)):
                storage = self._storages.get(storage_key(part))
                if storage is None:
                    continue
                if known.is_arrival and (storage.is_external or storage.opacity):
                    continue  # The tape holds the storage itself, and its values arrive there.
                if storage not in found:
                    self._save_from_write(storage, part)
                found[storage] = found.get(storage, False) or _is_whole(part)
                if part is not tensor:
                    storage.opacity = Opacity.OPAQUE
        return list(found.items())

    def _save_from_write(self, storage: StorageState, tensor: Tensor) -> None:
        if storage.is_external and not storage.writes and storage_key(tensor) > 0:
            storage.snapshot = Snapshot(_bytes_of(tensor).clone())
        for version in storage.versions.values():
            if version.call is None and storage.snapshot is not None:
                version.free()
                version.snapshot = storage.snapshot
            elif version.is_shared and not version.is_chosen:
                # Free a value that the tape can recompute; copy one that it cannot.
                version.kept, version.is_shared, version.counter = (
                    version.kept.clone() if storage.opacity else None,
                    False,
                    None,
                )

    def _after_write(self, storage: StorageState, call: Call, opacity: Opacity) -> None:
        """End the versions of a storage, and begin their successors."""
        storage.writes.append(call)
        storage.opacity = opacity
        for geometry, version in storage.versions.items():
            successor = storage.versions[geometry] = TensorVersion(
                storage.number, geometry, call, carried=version
            )
            if version.is_chosen:
                # The choice passes to the written value; the tape can recompute the old one.
                is_here = version.unpack is None
                version.is_chosen = False
                if is_here:
                    self._hold(successor, version.kept)
                    successor.is_chosen = True
                    version.free()


def _find(storage: StorageState, key: int, tensor: Tensor) -> tuple[Any, TensorVersion | None]:
    """Return a tensor's geometry (None without a storage of its own) and its version, if any."""
    if key < 0:
        return None, storage.versions.get(None)
    geometry = (
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    try:
        return geometry, storage.versions.get(geometry)
    except TypeError:  # symbolic sizes have no hash
        return str(geometry), storage.versions.get(str(geometry))


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


def _opacity_after(storage: StorageState, *, is_whole: bool) -> Opacity:
    """Return the opacity of a storage after a recorded call wrote it."""
    if any(
        version.kept is not None and not version.is_chosen for version in storage.versions.values()
    ):
        return max(storage.opacity, Opacity.UNINITIALIZED) if storage.opacity else TRANSPARENT
    if storage.opacity == Opacity.ZEROED or (storage.opacity == Opacity.UNINITIALIZED and is_whole):
        return TRANSPARENT
    return storage.opacity


def keep_on_cpu(version: TensorVersion) -> None:
    """Move a kept tensor to CPU memory."""
    device = version.kept.device
    version.kept, version.is_shared, version.counter = (
        version.kept.to("cpu", copy=True),
        False,
        None,
    )
    version.unpack = lambda tensor: tensor.to(device)


def _written(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], where: int | str
) -> Iterator[Tensor]:
    if isinstance(where, str):
        return tensors_in(kwargs.get(where))
    return tensors_in(args[where]) if where < len(args) else iter(())


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor covers its storage."""
    return bool(
        tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _state_before(known: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RngSnapshot:
    """Return the state of the generator before a random op draws from it."""
    generator = _generator(known, args, kwargs)
    return RngSnapshot(generator, generator.get_state())


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
            (t.device for t in tensors_in(list(args) + list(kwargs.values()))),
            torch.get_default_device(),
        )
    return generator_of(torch.device(device))


def generator_of(device: torch.device) -> torch.Generator:
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
