"""Replay of a tape: recompute saved tensors from its calls.

The first request of a backward recomputes all saved tensors of a region, in the order of the
forward, and frees each value after its last use. A handle gives its tensor away once; a second
request, in the same backward or later, recomputes it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fxckpt.eager.away import AwayValue
from fxckpt.eager.region_plan import RegionRecompute
from fxckpt.eager.tape import (
    Call,
    Handle,
    MetaArg,
    PlannedReplay,
    RngSnapshot,
    Snapshot,
    Tape,
    TensorVersion,
    WrapperHandle,
    slice_of,
    tensors_in,
)
from fxckpt.errors import CheckpointError
from fxckpt.torch_private import (
    after_backward,
    below_autograd,
    current_backward,
    keeps_graph,
    laid_out,
    not_compiled,
    put_together,
    storage_key,
)

NOTHING: Mapping[TensorVersion, Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One call of a replay program."""

    call: Call
    carries: tuple[TensorVersion, ...]
    """Versions that its write begins."""
    frees: tuple[TensorVersion, ...]
    """Versions that nothing reads after it."""


@dataclass(frozen=True)
class ReplayProgram:
    """The calls that compute the wanted versions, in the order of the forward."""

    steps: tuple[ReplayStep, ...]
    last_write: dict[int, int]
    """Number of the last call that writes each storage, by storage number."""
    versions: Container[TensorVersion]
    """All versions computed or read."""

    def is_written_after(self, version: TensorVersion) -> bool:
        """Return whether a step writes the storage of ``version`` after its definition."""
        return self.last_write.get(version.storage, -1) > (
            -1 if version.call is None else version.call.number
        )


def unpack(handle: Handle | WrapperHandle) -> Tensor:
    """Return the tensor that ``handle`` stands for; recompute it if it is not kept.

    Raises :class:`CheckpointError` if an external tensor it depends on was written since.
    """
    if isinstance(handle, WrapperHandle):
        return _unpack_wrapper(handle)
    tape, version = handle.tape, handle.version
    if version.kept is not None and version.unpack is None:
        tensor = kept_tensor(version)
        return tensor if version.original is None else version.as_given()  # type: ignore[no-any-return]
    with tape.lock:
        tensor = _requested(tape, handle)
        handle.is_requested = True
        _leave_when_read(tape)
        return tensor


def _requested(tape: Tape, handle: Handle) -> Tensor:
    """Return the tensor of a handle that is not kept as it is; the tape's lock is held."""
    if handle.cached is not None:
        tensor = handle.cached
        handle.cached = tensor if handle.is_requested else None
        return tensor
    version, run = handle.version, current_backward()
    if run is not None and run != tape.run:
        release(tape)
        tape.run = run
        after_backward(lambda: release(tape))
        for storage in tape.away:
            storage.begin()
    if version.kept is not None:
        return unpacked_by_hooks(tape, version)
    plan = tape.replay
    if run is not None:
        _recompute_due(tape, plan, handle)
    found, handle.cached = handle.cached, None
    if found is None:
        found = recomputed(tape, (version,), {} if plan is None else plan.made)[version]
        # After two requests in one backward, more are likely (ctx.saved_tensors[0],
        # ctx.saved_tensors[1], ...).
        handle.cached = found if handle.is_requested and run is not None else None
    return found


def _leave_when_read(tape: Tape) -> None:
    """Let go what came back to the device once each saved tensor was requested."""
    if not tape.away:
        return
    is_done = tape.run is None or all(
        h.is_requested or (h.version.kept is not None and h.version.unpack is None)
        for h in tape.live()
    )
    for storage in tape.away if is_done else ():
        storage.leave()


def _unpack_wrapper(handle: WrapperHandle) -> Tensor:
    """Return the subclass instance that ``handle`` stands for, made of its unpacked tensors."""
    parts = {
        name: unpack(part) if isinstance(part, (Handle, WrapperHandle)) else part
        for name, part in handle.parts.items()
    }
    return put_together(parts, handle.rest)


def _recompute_due(tape: Tape, plan: PlannedReplay | None, handle: Handle) -> None:
    """Recompute what is due when a backward requests ``handle``.

    That is all saved tensors at its first request, or what the plan has up to this one.
    """
    if plan is not None:
        advance(tape, plan, plan.positions[handle])
    elif not tape.is_made:
        tape.is_made = True
        wanted = [h for h in tape.live() if h.version.kept is None]
        cache_in_handles(wanted, recomputed(tape, {h.version for h in wanted}))


def cache_in_handles(handles: Iterable[Handle], made: Mapping[TensorVersion, Tensor]) -> None:
    """Cache recomputed tensors in their handles."""
    for handle in handles:
        tensor = made.get(handle.version)
        if tensor is not None:
            handle.cached = tensor


def advance(tape: Tape, plan: PlannedReplay, here: int) -> None:
    """Run the planned recomputes up to position ``here`` of the backward."""
    recomputes = plan.region_plan.recomputes
    first = plan.done
    while plan.done < len(recomputes) and recomputes[plan.done].position <= here:
        plan.done += 1
    if plan.done == first:
        return
    due = {recompute.call: recompute for recompute in recomputes[first : plan.done]}
    asked = [
        h
        for h in tape.live()
        if h.version.kept is None
        and (recompute := due.get(plan.roots[h])) is not None
        and recompute.position <= plan.positions[h] < recompute.until
    ]
    held = _read_later(plan, due.values())
    is_last = not keeps_graph()
    ending = {version for version, last in plan.held_until.items() if last < plan.done}
    freed = _freed(plan, here) if is_last else set()
    wanted = {*held, *(h.version for h in asked)}
    made = recomputed(tape, wanted, plan.made, spent=ending | freed)
    for version in freed:
        version.free()
    for version in ending:
        plan.made.pop(version, None)
        del plan.held_until[version]
    cache_in_handles(asked, made)
    for handle in asked if is_last else ():
        # Its node ends with this request. Nothing holds what the tensor was computed from.
        handle.version = _leaf(handle.version, made[handle.version])
    plan.held_until.update(held)
    plan.made.update((version, made[version]) for version in held)


def _freed(plan: PlannedReplay, here: int) -> set[TensorVersion]:
    """Return the results kept by choice that the plan frees here, and recomputes later."""
    found = set()
    for number, last in plan.region_plan.last_uses.items():
        call = plan.calls[number]() if last.recompute < plan.done and last.position < here else None
        for ref in () if call is None else call.outputs:
            version = ref()
            if version is not None and version.is_chosen and version.unpack is None:
                found.add(version)
    return found


def _leaf(version: TensorVersion, tensor: Tensor) -> TensorVersion:
    """Return a version that holds its recomputed tensor."""
    leaf = TensorVersion(version.storage, version.geometry, None)
    leaf.kept = tensor
    return leaf


def _read_later(plan: PlannedReplay, due: Iterable[RegionRecompute]) -> dict[TensorVersion, int]:
    """Return the results that later recomputes read, each with its last reader."""
    held: dict[TensorVersion, int] = {}
    for recompute in due:
        call = plan.calls[recompute.call]() if recompute.call in plan.calls else None
        if call is not None and recompute.last_reader >= plan.done:
            held |= {
                version: recompute.last_reader
                for ref in call.outputs
                if (version := ref()) is not None and version.storage not in plan.written
            }
    return held


def release(tape: Tape) -> None:
    """Free the tensors that a backward recomputed and did not request."""
    with tape.lock:
        tape.run = None
        tape.is_made = False
        tape.fetched.clear()
        for storage in tape.away:
            storage.leave()
        if tape.replay is not None:
            tape.replay.begin()
        for handle in tape.live():
            handle.cached = None
            handle.is_requested = False


def recomputed(
    tape: Tape,
    wanted: Iterable[TensorVersion],
    available: dict[TensorVersion, Tensor] | None = None,
    *,
    later: Container[Call] | None = None,
    spent: Container[TensorVersion] = (),
) -> dict[TensorVersion, Tensor]:
    """Return the tensors of ``wanted``; recompute those not ``available``, below autograd.

    Where the calls of ``later`` replays are known, generator states that no other call draws from
    are freed one by one. So are the versions ``spent``, kept or available.
    """
    available = {} if available is None else available
    todo = replay_program(wanted, available)
    values: dict[TensorVersion, Tensor] = {}
    copies: dict[Snapshot, Tensor] = {}
    made: dict[TensorVersion, Tensor] = {}
    wanted = frozenset(wanted)

    def tensor_of(version: TensorVersion) -> Tensor:
        found = values.get(version)
        if found is None:
            found = available.get(version)
        if found is None:
            found = (
                unpacked_by_hooks(tape, version)
                if version.unpack
                else kept_tensor(version, copies if version.storage in todo.last_write else None)
            )
        return found

    def made_now(version: TensorVersion, tensor: Tensor) -> None:
        values[version] = tensor
        if version in wanted:
            made[version] = tensor.clone() if todo.is_written_after(version) else tensor

    with tape.context, below_autograd(), _Generators() as generators:
        for version in wanted:
            if version.is_leaf or version in available:
                made_now(version, tensor_of(version))
        for step in todo.steps:
            call = step.call
            if call.draw is not None:
                generators.rewind(call.draw)
            results = _run_call(call, tensor_of)
            result: Tensor | None
            for ref, result in zip(call.outputs, results, strict=True):
                asked = ref()
                if (
                    asked is not None
                    and asked in todo.versions
                    and asked.call is call
                    and asked.carried is None
                ):
                    made_now(asked, result)
            if later is not None and call not in later:
                call.draw = None
            # Otherwise the last result would stay live during the next call.
            result = None
            results = ()
            for version in step.carries:
                assert version.carried is not None
                made_now(version, tensor_of(version.carried))
            _free(step.frees, values, available, spent)
    return made


def _free(
    versions: Iterable[TensorVersion],
    values: dict[TensorVersion, Tensor],
    available: dict[TensorVersion, Tensor],
    spent: Container[TensorVersion],
) -> None:
    """Free versions that a replay has read for the last time; of others than its own, the spent."""
    for version in versions:
        values.pop(version, None)
        if version in spent:
            available.pop(version, None)
            if version.kept is not None:
                version.free()


def _run_call(call: Call, tensor_of: Callable[[TensorVersion], Tensor]) -> tuple[Tensor, ...]:
    """Return the results of a call; raise :class:`CheckpointError` if their number has changed."""
    try:
        args, kwargs = _filled(call.args, tensor_of), _filled_kwargs(call.kwargs, tensor_of)
    except CheckpointError as error:
        where = f" in {call.detail.source}" if call.detail is not None else ""
        raise CheckpointError(
            f"{error}\nIt is read by {call.op}{where}, which the backward recomputes."
        ) from error
    results = tuple(tensors_in(call.op(*args, **kwargs)))
    if len(results) != len(call.outputs):
        raise CheckpointError(
            f"{call.op} returned {len(call.outputs)} tensors in the forward and {len(results)} "
            "when it was replayed. Keep what it returns: fxckpt.register_op(op, recompute=False), "
            "or run the region with engine='rerun'."
        )
    return results


def replay_program(
    wanted: Iterable[TensorVersion], available: Mapping[TensorVersion, Tensor] = NOTHING
) -> ReplayProgram:
    """Return the program that computes ``wanted`` from ``available``."""
    needed, versions = slice_of(wanted, available)
    last_read: dict[TensorVersion, Call] = {}
    carries: dict[Call, list[TensorVersion]] = {}
    last_write: dict[int, int] = {}
    calls = sorted(needed, key=lambda call: call.number)
    for call in calls:
        for version in call.reads():
            last_read[version] = call
        for storage in call.writes:
            last_write[storage] = call.number
    for version in versions:
        if version.call is None or version.kept is not None or version in available:
            continue
        last_read.setdefault(version, version.call)
        if version.carried is not None:
            carries.setdefault(version.call, []).append(version)
            if (
                version.carried not in last_read
                or last_read[version.carried].number < version.call.number
            ):
                last_read[version.carried] = version.call
    frees: dict[Call, list[TensorVersion]] = {}
    for version, call in last_read.items():
        frees.setdefault(call, []).append(version)
    steps = tuple(
        ReplayStep(call, tuple(carries.get(call, ())), tuple(frees.get(call, ()))) for call in calls
    )
    return ReplayProgram(steps, last_write, versions)


def kept_tensor(version: TensorVersion, copies: dict[Snapshot, Tensor] | None = None) -> Tensor:
    """Return the tensor of a version that is kept or snapshotted, without running a call.

    ``copies`` is given if the replay writes the storage: it holds one copy of each snapshot, which
    all versions share. Raises :class:`CheckpointError` if the tensor was written since it was kept.
    """
    if version.kept is None:
        assert version.snapshot is not None
        data = version.snapshot.bytes
        if copies is not None:
            data = (
                copies.setdefault(version.snapshot, data)
                if version.snapshot in copies
                else copies.setdefault(version.snapshot, data.clone())
            )
        return laid_out(data, version.geometry)
    tensor: Tensor = version.kept
    if version.counter is not None:
        is_rebound = version.storage_key is not None and version.storage_key != storage_key(tensor)
        if is_rebound or tensor._version != version.counter:
            raise written_since(tensor, version.counter, is_rebound=is_rebound)
    return tensor


def unpacked_by_hooks(tape: Tape, version: TensorVersion) -> Tensor:
    """Return the tensor that the enclosing hooks unpack for a version, once per backward."""
    if isinstance(version.kept, AwayValue):
        return version.kept.tensor()
    tensor = tape.fetched.get(version)
    if tensor is None:
        assert version.unpack is not None
        tensor = version.unpack(version.kept)
        if tape.run is not None:
            tape.fetched[version] = tensor
    return tensor


def written_since(tensor: Tensor, counter: int, *, is_rebound: bool) -> CheckpointError:
    """Return the error for a tensor that was written after the region read it."""
    how = (
        "given other data (x.data = ...)"
        if is_rebound
        else f"written in place ({tensor._version - counter} times)"
    )
    return CheckpointError(
        f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}, which a checkpointed "
        f"region keeps or took from outside, was {how} between the forward and the backward, so "
        "that what the region computed from it cannot be recomputed. "
        "Write to a copy (x = x + y in place of x += y), or run the backward first."
    )


class _Generators:
    """Context that restores the states of the generators a replay rewinds."""

    def __init__(self) -> None:
        self._before: dict[torch.Generator, Tensor] = {}

    def __enter__(self) -> _Generators:
        return self

    def rewind(self, draw: RngSnapshot) -> None:
        """Set a generator to its state before an op of the forward."""
        if draw.generator not in self._before:
            self._before[draw.generator] = draw.generator.get_state()
        draw.generator.set_state(draw.state)

    def __exit__(self, *_: object) -> None:
        for generator, state in self._before.items():
            generator.set_state(state)


def _filled(given: Any, tensor_of: Callable[[TensorVersion], Tensor]) -> list[Any]:
    """Return arguments with versions replaced by tensors."""
    return [_filled_one(item, tensor_of) for item in given]


def _filled_one(item: Any, tensor_of: Callable[[TensorVersion], Tensor]) -> Any:
    if type(item) is TensorVersion:
        return tensor_of(item)
    if type(item) is MetaArg:
        return torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device=item.device)
    return _filled(item, tensor_of) if type(item) is list else item


def _filled_kwargs(
    given: Mapping[str, Any] | None, tensor_of: Callable[[TensorVersion], Tensor]
) -> dict[str, Any]:
    return {name: _filled_one(value, tensor_of) for name, value in given.items()} if given else {}


not_compiled(unpack)
