"""The interface of policies and their composition.

A policy answers once per forward value, before planning: the value must or should be saved or
recomputed, or is left open. It sees a :class:`Value`, the same from every entry point.
Users import from :mod:`fxckpt.policies`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.errors import InvalidOption, PolicyConflict, PolicyMatchesNothing

log = logging.getLogger("fxckpt")

Coercion = TypeVar("Coercion", bound="Callable[[Any], Policy]")

MUST = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.MUST_CPU_OFFLOAD,
    CheckpointPolicy.MUST_RECOMPUTE,
)
"""Answers that bind at any budget."""

OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
"""Answers that send a value away."""

SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, *OFFLOAD)
"""Answers that keep a value, on the device or away."""

OPPOSITE = {
    CheckpointPolicy.MUST_SAVE: CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_SAVE: CheckpointPolicy.PREFER_RECOMPUTE,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: CheckpointPolicy.PREFER_RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: CheckpointPolicy.PREFER_SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: CheckpointPolicy.MUST_SAVE,
}


@dataclass(frozen=True, eq=False)
class Value:
    """The output of one forward op, as policies see it. A view is no value of its own."""

    op: Any
    """The ``OpOverload`` or higher-order op that makes the value."""
    module: str = ""
    """Path of the module that made the value, as ``named_modules()`` spells it.

    Empty for the model itself, or if the trace has no modules.
    """
    names: tuple[str, ...] = ()
    """Names given to the value by :func:`fxckpt.name`."""
    shape: tuple[int, ...] = ()
    """Shape of the op's first output tensor."""
    dtype: torch.dtype | None = None
    """Dtype of the op's first output tensor; None if it has none."""
    bytes: int = 0
    """Bytes of all storages that the op fills."""
    flops: int = 0
    """FLOPs of one run of the op."""
    occurrence: int = 0
    """Number of earlier values made by the same op."""
    source: str = ""
    """Line that called the op, as ``"file.py:12"``; empty if the trace has none."""
    args: tuple[Any, ...] = ()
    """Positional arguments of the op, tensors as fake tensors."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the op, tensors as fake tensors."""
    output: Any = None
    """Output of the op, tensors as fake tensors."""
    position: int = 0
    """Position in the forward's sequence of values, from 0."""
    reads: tuple[int, ...] = ()
    """Positions of the values that the op reads, directly or through views."""
    input_names: tuple[str, ...] = ()
    """Names of the graph inputs that the op reads, directly or through views."""
    node: str = ""
    """Name of the graph node, as plans print it."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        label = f"{self.node or self.op} ({self.op}, {dtype}{list(self.shape)})"
        place = f"in module {self.module!r}" if self.module else "in no module"
        return f"{label} {place}"


@dataclass(frozen=True)
class TilePattern:
    """A glob of module paths of which regions may be unrolled into tiles."""

    pattern: str
    """The glob."""
    may_miss: bool = False
    """Whether a graph may have no such region: it is one of several."""


class Policy(ABC):
    """An answer per value. Final subclasses are frozen dataclasses, hashable and picklable.

    ``a | b`` applies both. If one leaves a value open, the other decides; MUST beats PREFER;
    between two preferences, saving wins.
    ``a & b`` saves the values that both save. It leaves open a value that either leaves open, and
    of two different answers takes the one that saves less.
    ``~a`` answers the opposite of ``a``.
    In ``|`` and ``&``, opposite MUSTs raise :class:`~fxckpt.errors.PolicyConflict`, and one side
    may be a function or a list of ops in torch's form; a function that returns None leaves the
    value open.
    """

    @property
    def needs_graph(self) -> bool:
        """Whether answers depend on modules, names or other values, beyond the op's call."""
        return False

    @abstractmethod
    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the decision about ``value``; None leaves it open."""

    def bind(self, values: Sequence[Value]) -> Policy:
        """Return the policy for one graph, given its values in order.

        Called once a graph, before :meth:`decide`.
        Raises :class:`~fxckpt.errors.PolicyMatchesNothing` for a pattern that no value matches.
        """
        return self

    def tiles(self) -> tuple[TilePattern, ...]:
        """Return the modules of which regions may be unrolled into tiles; none by default."""
        return ()

    def lenient(self) -> Policy:
        """Return the policy for one graph of several, in which a pattern may match nothing."""
        return LenientPolicy(self)

    def without_match(self, values: Sequence[Value]) -> Policy:
        """Return the policy for a graph in which its patterns match nothing."""
        return self

    def __or__(self, other: Any) -> Policy:
        return Disjunction(self, _part(other))

    def __ror__(self, other: Any) -> Policy:
        return Disjunction(_part(other), self)

    def __and__(self, other: Any) -> Policy:
        return Conjunction(self, _part(other))

    def __rand__(self, other: Any) -> Policy:
        return Conjunction(_part(other), self)

    def __invert__(self) -> Policy:
        return Negation(self)


_coercions: list[Callable[[Any], Policy]] = []


def coerces(function: Coercion) -> Coercion:
    """Register the function that converts an operand of ``|`` or ``&`` to a policy.

    The forms it accepts are defined outside this module, which may not import them.
    """
    _coercions[:] = [function]
    return function


def _part(policy: Any) -> Policy:
    return _coercions[0](policy)


def decide_all(policy: Policy, values: Sequence[Value]) -> list[CheckpointPolicy | None]:
    """Return a policy's answer to each value of one graph, in order, each asked once."""
    bound = policy.bind(values)
    return [bound.decide(value) for value in values]


@dataclass(frozen=True)
class Disjunction(Policy):
    """The policy ``a | b``."""

    a: Policy
    b: Policy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return either answer; MUST beats PREFER, then saving beats recomputing."""
        a, b = self.a.decide(value), self.b.decide(value)
        if a is None or b is None:
            return a if b is None else b
        refuse_clash((self.a, a), (self.b, b), value)
        return max(a, b, key=lambda p: (p in MUST, p in SAVE))

    @property
    def needs_graph(self) -> bool:
        """Whether a part needs the graph."""
        return self.a.needs_graph or self.b.needs_graph

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind both parts."""
        return Disjunction(self.a.bind(values), self.b.bind(values))

    def lenient(self) -> Policy:
        """Make each part lenient."""
        return Disjunction(self.a.lenient(), self.b.lenient())

    def tiles(self) -> tuple[TilePattern, ...]:
        """Return the modules that either part tiles."""
        return (*self.a.tiles(), *self.b.tiles())

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"


@dataclass(frozen=True)
class Conjunction(Policy):
    """The policy ``a & b``."""

    a: Policy
    b: Policy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the answer that saves less; None if either leaves the value open."""
        a, b = self.a.decide(value), self.b.decide(value)
        if a is None or b is None:
            return None
        refuse_clash((self.a, a), (self.b, b), value)
        return min(a, b, key=list(OPPOSITE)[::-1].index)

    @property
    def needs_graph(self) -> bool:
        """Whether a part needs the graph."""
        return self.a.needs_graph or self.b.needs_graph

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind both parts."""
        return Conjunction(self.a.bind(values), self.b.bind(values))

    def lenient(self) -> Policy:
        """Make each part lenient."""
        return Conjunction(self.a.lenient(), self.b.lenient())

    def tiles(self) -> tuple[TilePattern, ...]:
        """Return none; raise :class:`InvalidOption` where a part tiles."""
        return _refuse_tiles(self, *self.a.tiles(), *self.b.tiles())

    def __repr__(self) -> str:
        return f"({self.a!r} & {self.b!r})"


@dataclass(frozen=True)
class Negation(Policy):
    """The policy ``~a``."""

    a: Policy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the opposite of the answer of ``a``."""
        answer = self.a.decide(value)
        return None if answer is None else OPPOSITE[answer]

    @property
    def needs_graph(self) -> bool:
        """Whether a part needs the graph."""
        return self.a.needs_graph

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind ``a``."""
        return Negation(self.a.bind(values))

    def lenient(self) -> Policy:
        """Make each part lenient."""
        return Negation(self.a.lenient())

    def tiles(self) -> tuple[TilePattern, ...]:
        """Return none; raise :class:`InvalidOption` where the policy tiles."""
        return _refuse_tiles(self, *self.a.tiles())

    def __repr__(self) -> str:
        return f"~{self.a!r}"


@dataclass(frozen=True)
class FirstMatch(Policy):
    """Policies in order: the first that does not leave a value open decides it."""

    policies: tuple[Policy, ...]

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the first answer; None if all leave the value open."""
        return next(
            (answer for p in self.policies if (answer := p.decide(value)) is not None), None
        )

    @property
    def needs_graph(self) -> bool:
        """Whether a part needs the graph."""
        return any(p.needs_graph for p in self.policies)

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind all parts."""
        return FirstMatch(tuple(p.bind(values) for p in self.policies))

    def lenient(self) -> Policy:
        """Make each part lenient."""
        return FirstMatch(tuple(p.lenient() for p in self.policies))

    def tiles(self) -> tuple[TilePattern, ...]:
        """Return the modules that any part tiles."""
        return tuple(tile for policy in self.policies for tile in policy.tiles())

    def __repr__(self) -> str:
        return f"first_match({', '.join(map(repr, self.policies))})"


@dataclass(frozen=True)
class LenientPolicy(Policy):
    """A policy whose patterns may match nothing."""

    policy: Policy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the policy's answer."""
        return self.policy.decide(value)

    @property
    def needs_graph(self) -> bool:
        """Whether the policy needs the graph."""
        return self.policy.needs_graph

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind the policy, or fall back to :meth:`without_match`."""
        try:
            return self.policy.bind(values)
        except PolicyMatchesNothing as error:
            log.info("in one graph of several: %s", error)
            return self.policy.without_match(values)

    def tiles(self) -> tuple[TilePattern, ...]:
        """Return the modules that the policy tiles, each of which may be missing."""
        return tuple(replace(tile, may_miss=True) for tile in self.policy.tiles())

    def __repr__(self) -> str:
        return repr(self.policy)


class OpenWithoutMatch(Policy):
    """A policy that leaves a graph open in which its patterns match nothing."""

    def without_match(self, values: Sequence[Value]) -> Policy:
        """Leave all values open."""
        return BoundPolicy(self, (None,) * len(values))


@dataclass(frozen=True)
class BoundPolicy(Policy):
    """Decisions of a policy about one graph, by position of the value."""

    policy: Policy
    answers: tuple[CheckpointPolicy | None, ...]

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the answer for the value's position."""
        return self.answers[value.position]

    def __repr__(self) -> str:
        return repr(self.policy)


def _refuse_tiles(policy: Policy, *tiles: TilePattern) -> tuple[()]:
    """Raise :class:`InvalidOption` for a policy in which tiles mean nothing."""
    if tiles:
        raise InvalidOption(
            f"{policy!r}: tile({tiles[0].pattern!r}) says how ops run, not what is saved: it has "
            "no opposite and no common part. Add it by |, as in save_matmuls | tile('lm_head')."
        )
    return ()


def refuse_clash(
    first: tuple[Policy, CheckpointPolicy], second: tuple[Policy, CheckpointPolicy], value: Value
) -> None:
    """Raise :class:`PolicyConflict` for two opposite MUSTs."""
    (a, answer), (b, other) = first, second
    if answer in MUST and other in MUST and answer is not other:
        raise PolicyConflict(
            f"two policies clash over {value}: {a!r} says {answer.name}, {b!r} says {other.name}. "
            f"Put the one that is to win first: first_match({a!r}, {b!r})."
        )
