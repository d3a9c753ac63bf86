"""Replay: the tensors of a tape's places again, from its calls.

A backward that asks for the first saved tensor of a region makes all of them, in the order of the forward, each value freed after its last use.
Every handle gives its tensor away once; who asks again, in the same backward or later, has it made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxckpt.errors import CheckpointError
from fxckpt.tape import Call, Draw, Handle, Place, Snapshot, Tape, flatten, recorded, slice_of
from fxckpt.torch_private import after_backward, below_autograd, current_backward, laid_out, not_compiled, storage_key


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a program."""

    number: int
    call: Call
    carries: tuple[Place, ...]
    """Places that its write begins."""
    frees: tuple[Place, ...]
    """Places that nothing reads after it."""


@dataclass(frozen=True)
class Program:
    """The calls that make some places, in the order of the forward."""

    steps: tuple[Step, ...]
    last_write: dict[int, int]
    """For each storage that a step writes, by number, the last step to do so."""

    def is_written_after(self, place: Place) -> bool:
        """Return whether a step writes the storage of ``place`` after it was made."""
        return self.last_write.get(place.memory, -1) > (-1 if place.call is None else place.call)


def unpack(handle: Handle) -> Tensor:
    """Return the tensor that ``handle`` stands for.

    Raises :class:`CheckpointError` if what the region took from outside was written since.
    """
    tape = handle.tape
    if handle.place.kept is not None:
        return fetch(handle.place)
    with tape.lock:
        if handle.cached is not None:
            tensor, handle.cached = handle.cached, None
            return tensor
        run = current_backward()
        if run is None or run == tape.run:
            return replay(tape, [handle])[handle]
        tape.run = run
        made = replay(tape, [h for h in tape.live() if h.place.kept is None])
        for other, value in made.items():
            if other is not handle:
                other.cached = value
        after_backward(lambda: release(tape))
        return made[handle]


def release(tape: Tape) -> None:
    """Let go of what a backward had made and did not ask for."""
    with tape.lock:
        tape.run = None
        for handle in tape.live():
            handle.cached = None


def replay(tape: Tape, handles: Iterable[Handle]) -> dict[Handle, Tensor]:
    """Run what makes the tensors of ``handles``, below autograd, and return them."""
    wanted: dict[Place, list[Handle]] = {}
    for handle in handles:
        wanted.setdefault(handle.place, []).append(handle)
    todo = program(tape, wanted)
    values: dict[Place, Tensor] = {}
    copies: dict[Snapshot, Tensor] = {}
    made: dict[Handle, Tensor] = {}

    def tensor_of(place: Place) -> Tensor:
        found = values.get(place)
        if found is None:
            found = fetch(place, copies if place.memory in todo.last_write else None)
        return found

    def made_now(place: Place, tensor: Tensor) -> None:
        values[place] = tensor
        for handle in wanted.get(place, ()):
            made[handle] = tensor.clone() if todo.is_written_after(place) else tensor

    with tape.context, below_autograd(), _Generators() as generators:
        for place in wanted:
            if place.call is None:
                made_now(place, tensor_of(place))
        for step in todo.steps:
            call = step.call
            if call.draw is not None:
                generators.rewind(call.draw)
            out = call.op(*_filled(call.args, tensor_of), **_filled_kwargs(call.kwargs, tensor_of))
            results = tuple(flatten(out))
            if len(results) != len(call.outputs):
                raise CheckpointError(
                    f"{call.op} returned {len(call.outputs)} tensors in the forward and {len(results)} when it was replayed. "
                    "Keep what it returns: fxckpt.register_op(op, recompute=False), or run the region with engine='rerun'."
                )
            for place, result in zip(call.outputs, results, strict=True):
                if place is not None and place.call == step.number and place.carried is None:
                    made_now(place, result)
            for place in step.carries:
                assert place.carried is not None
                made_now(place, tensor_of(place.carried))
            for place in step.frees:
                values.pop(place, None)
    return made


def program(tape: Tape, wanted: Iterable[Place]) -> Program:
    """Return what makes ``wanted``."""
    needed, places = slice_of(tape, wanted)
    last_read: dict[Place, int] = {}
    carries: dict[int, list[Place]] = {}
    last_write: dict[int, int] = {}
    calls: dict[int, Call] = {}
    for number in sorted(needed):
        call = calls[number] = recorded(tape, number)
        for place in call.reads():
            last_read[place] = number
        for memory in call.writes:
            last_write[memory] = number
    for place in places:
        if place.is_leaf:
            continue
        assert place.call is not None
        last_read.setdefault(place, place.call)
        if place.carried is not None:
            carries.setdefault(place.call, []).append(place)
            last_read[place.carried] = max(last_read.get(place.carried, -1), place.call)
    frees: dict[int, list[Place]] = {}
    for place, number in last_read.items():
        frees.setdefault(number, []).append(place)
    steps = tuple(Step(n, call, tuple(carries.get(n, ())), tuple(frees.get(n, ()))) for n, call in calls.items())
    return Program(steps, last_write)


def fetch(place: Place, copies: dict[Snapshot, Tensor] | None = None) -> Tensor:
    """Return the tensor of a place that is there without running anything.

    ``copies`` is given where the storage is about to be written: of a snapshot, the one copy all its places share in this replay.
    Raises :class:`CheckpointError` if it was written since it was kept.
    """
    if place.kept is None:
        assert place.snapshot is not None
        data = place.snapshot.bytes
        if copies is not None:
            data = copies.setdefault(place.snapshot, data) if place.snapshot in copies else copies.setdefault(place.snapshot, data.clone())
        return laid_out(data, place.geometry)
    tensor: Tensor = place.kept if place.unpack is None else place.unpack(place.kept)
    if place.version is not None and place.unpack is None:
        is_rebound = place.storage is not None and place.storage != storage_key(tensor)
        if is_rebound or tensor._version != place.version:
            raise written_since(tensor, place.version, is_rebound=is_rebound)
    return tensor


def written_since(tensor: Tensor, version: int, *, is_rebound: bool) -> CheckpointError:
    """Return the error for a tensor that a region reads and somebody wrote after it."""
    how = "given other data (x.data = ...)" if is_rebound else f"written in place ({tensor._version - version} times)"
    return CheckpointError(
        f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}, which a checkpointed region keeps or took from outside, was {how} "
        "between the forward and the backward, so that what the region computed from it cannot be made again. "
        "Write to a copy (x = x + y in place of x += y), or run the backward first."
    )


class _Generators:
    """Generators as they were before a replay, put back after it."""

    def __init__(self) -> None:
        self._before: dict[torch.Generator, Tensor] = {}

    def __enter__(self) -> _Generators:
        return self

    def rewind(self, draw: Draw) -> None:
        """Set a generator to where an op found it in the forward."""
        if draw.generator not in self._before:
            self._before[draw.generator] = draw.generator.get_state()
        draw.generator.set_state(draw.state)

    def __exit__(self, *_: object) -> None:
        for generator, state in self._before.items():
            generator.set_state(state)


def _filled(given: Any, tensor_of: Callable[[Place], Tensor]) -> list[Any]:
    """Return arguments with tensors in place of places."""
    return [_filled_one(item, tensor_of) for item in given]


def _filled_one(item: Any, tensor_of: Callable[[Place], Tensor]) -> Any:
    if type(item) is Place:
        return tensor_of(item)
    return _filled(item, tensor_of) if type(item) is list else item


def _filled_kwargs(given: Mapping[str, Any] | None, tensor_of: Callable[[Place], Tensor]) -> dict[str, Any]:
    return {name: _filled_one(value, tensor_of) for name, value in given.items()} if given else {}


not_compiled(unpack)
