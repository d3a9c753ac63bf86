"""Ranks of a process group, as they decide together.

Messages are plain objects in the store of the group's processes: no tensor is made and no
collective runs, so that ranks may decide while a graph is traced, on any backend.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from fxckpt.errors import FxckptError, InvalidOption, PlanningFailed, RanksDisagree
from fxckpt.torch_private import compile_group, default_store

Value = TypeVar("Value")
Result = TypeVar("Result")

SECONDS = 600.0
"""Seconds that a rank waits for the others before it raises."""
FIRST = 0
"""Rank of the group that decides."""


@dataclass(frozen=True)
class Message:
    """Message of one rank to the first, or of the first to all."""

    subject: str
    """Subject of the decision, for people."""
    value: Any = None
    error: FxckptError | None = None
    """Why the rank cannot go on, or why none can."""


@dataclass
class Ranks:
    """The ranks of a process group, this one among them.

    All of them must ask for the same decisions in the same order, as they run the same program.
    """

    store: Any
    """Store that all of them read and write, such as that of ``init_process_group``."""
    rank: int
    """Number of this rank in the group."""
    size: int
    """Number of ranks."""
    name: str
    """Name of the decisions of one backend, the same on all ranks."""
    seconds: float = field(default_factory=lambda: SECONDS)
    """Seconds to wait for the others."""
    count: int = 0
    """Number of decisions so far."""
    latest: FxckptError | None = None
    """Error that the latest decision raised on all ranks."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, name: str) -> Ranks | None:
        """Return the ranks of a process group, or None if it is this rank alone."""
        if group.size() == 1:
            return None
        return cls(default_store(), group.rank(), group.size(), f"{group.group_name} {name}")

    def decide(
        self, subject: str, value: Value, choose: Callable[[Sequence[Value]], Result]
    ) -> Result:
        """Return the first rank's choice from the values of all ranks, in their order.

        Every rank raises the same error if ``choose`` raises one, or if a rank says that it cannot
        go on, is about another subject, or is not heard of.
        """
        return self._exchange(Message(subject, value), choose)  # type: ignore[no-any-return]

    def fail(self, error: Exception) -> None:
        """Report that this rank cannot go on: the others raise the error when they next decide.

        It is no news if all ranks raised it together.
        """
        if error is self.latest:
            return
        told = error if isinstance(error, FxckptError) else _failed(error)
        self._put(f"{self.count} {self.rank}", Message("", error=told))
        self.count += 1

    def confirm(self, subject: str) -> None:
        """Return once every rank has come this far; raise on all of them if one cannot."""
        self.decide(subject, None, lambda _: None)

    def _exchange(self, message: Message, choose: Callable[[Sequence[Any]], Any]) -> Any:
        number, self.latest = self.count, None
        self.count += 1
        if self.rank == FIRST:
            told = self._chosen(number, message, choose)
            self._put(f"{number} told", told)
        else:
            self._put(f"{number} {self.rank}", message)
            told = self._told(number, message)
        if told.error is not None:
            self.latest = told.error
            raise told.error
        return told.value

    def _chosen(
        self, number: int, message: Message, choose: Callable[[Sequence[Any]], Any]
    ) -> Message:
        """Return the first rank's message to all, itself included."""
        said, deadline = {FIRST: message}, time.monotonic() + self.seconds
        for rank in range(self.size):
            if rank != FIRST:
                found = self._get(f"{number} {rank}", deadline)
                if found is not None:
                    said[rank] = found
        if number:
            # All ranks were heard of, so that all have read what they were told before.
            self._drop(f"{number - 1} told")
        subject = message.subject
        if missing := [rank for rank in range(self.size) if rank not in said]:
            return Message(subject, error=self._missing(missing, subject))
        for rank, each in said.items():
            if each.error is not None:
                return Message(subject, error=each.error.on_rank(rank))
        if other := {rank: each for rank, each in said.items() if each.subject != subject}:
            rank, each = next(iter(other.items()))
            return Message(
                subject,
                error=RanksDisagree(
                    f"rank {FIRST} decides on {subject}, and rank {rank} on {each.subject}: ranks "
                    "of one group must compile and run the same graphs in the same order. Give "
                    "each its own group (fxckpt.Backend(group=...)), or none."
                ),
            )
        try:
            return Message(subject, choose([said[rank].value for rank in range(self.size)]))
        except FxckptError as error:
            return Message(subject, error=error)
        except Exception as error:
            return Message(subject, error=_failed(error).on_rank(FIRST))

    def _told(self, number: int, message: Message) -> Message:
        """Return the first rank's message."""
        # It waits for every rank itself before it tells of one that is missing.
        found = self._get(
            f"{number} told", time.monotonic() + 2 * self.seconds, f"{number} {FIRST}"
        )
        if found is None:
            return Message("", error=self._missing([FIRST], message.subject))
        if found.error is not None and not found.subject:
            return Message("", error=found.error.on_rank(FIRST))
        return found

    def _missing(self, missing: Sequence[int], subject: str) -> RanksDisagree:
        ranks = ", ".join(map(str, missing))
        return RanksDisagree(
            f"rank {ranks} did not come to decide on {subject} within {self.seconds:.0f} s: all "
            "ranks of a group must compile and run the same graphs in the same order. Look for an "
            "error on that rank, or leave it out of the group: fxckpt.Backend(group=...)."
        )

    def _key(self, key: str) -> str:
        return f"fxckpt {self.name} {key}"

    def _put(self, key: str, message: Message) -> None:
        self.store.set(self._key(key), pickle.dumps(message))

    def _get(self, key: str, deadline: float, other: str | None = None) -> Message | None:
        """Return a message once it is there, or that of another key; None at the deadline."""
        keys = [key] if other is None else [key, other]
        pause = 0.0005
        while True:
            for each in keys:
                if self.store.check([self._key(each)]):
                    return pickle.loads(self.store.get(self._key(each)))  # type: ignore[no-any-return]
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _drop(self, key: str) -> None:
        # Not every store can forget a key.
        with suppress(NotImplementedError, RuntimeError):
            self.store.delete_key(self._key(key))


def _failed(error: Exception) -> PlanningFailed:
    return PlanningFailed(f"{type(error).__name__}: {error}")


def group_of(group: object) -> dist.ProcessGroup | None:
    """Return the process group that an option names, once there is one; None for none.

    Without one it is torch's own for compiles, if ``torch._dynamo.config`` asks for it
    (``enable_compiler_collectives``).

    Raises
    ------
    InvalidOption
        The option is no process group, or ``torch.distributed`` was not initialized.
    """
    if group is None:
        return compile_group()
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidOption(
            f"group={group!r}: torch.distributed is not initialized. Call "
            "torch.distributed.init_process_group() before the compiled model."
        )
    if group == "world":
        return dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidOption(
            f"group={group!r}: rank {dist.get_rank()} is no member of the group that new_group() "
            "made. Give each rank a group that it is in, or none."
        )
    raise InvalidOption(
        f"group={group!r} is a {type(group).__name__}, and no process group. Give one, such as "
        "torch.distributed.group.WORLD or device_mesh.get_group(), or 'world'."
    )


@dataclass
class Neighbour:
    """The next rank of all, whose plans should be those of this one, where each plans by itself."""

    store: Any
    rank: int
    size: int
    name: str
    """Name of the plans of one backend, the same on all ranks."""
    posted: int = 0
    """Number of plans that the others may see."""
    compared: int = 0
    """Number of plans that were compared."""
    patience: int = 100
    """Most times that a plan is looked for: the next rank may run another program."""

    @classmethod
    def of_world(cls, name: str) -> Neighbour | None:
        """Return the next rank of the default group, or None if there is none."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        store = default_store()  # MPI has none.
        return None if store is None else cls(store, dist.get_rank(), dist.get_world_size(), name)

    def differing(self, plans: Sequence[tuple[str, str]]) -> tuple[int, int] | None:
        """Return the index of a plan that is another there, and that rank; None if there is none.

        ``plans`` are hashes of the program and of the decisions about it. Nothing is waited for.
        """
        for i in range(self.posted, len(plans)):
            self.store.set(self._key(i, self.rank), " ".join(plans[i]))
        self.posted = len(plans)
        following = (self.rank + 1) % self.size
        while self.compared < self.posted and self.patience:
            key = self._key(self.compared, following)
            if not self.store.check([key]):
                self.patience -= 1
                return None
            program, decisions = self.store.get(key).decode().split()
            mine = plans[self.compared]
            self.compared += 1
            if program == mine[0] and decisions != mine[1]:
                return self.compared - 1, following
        return None

    def _key(self, plan: int, rank: int) -> str:
        return f"fxckpt plans {self.name} {plan} {rank}"
