"""What a policy is: an answer per forward value, given before planning.

A policy says of each value that it must or should be saved or run again, or leaves it open. It sees a :class:`Value`, which is the same
whichever door the model came through, and is asked once per value. This file holds the parts; :mod:`fxckpt.policies` is what users read.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.errors import PolicyConflict, PolicyMatchesNothing

log = logging.getLogger("fxckpt")

Coercion = TypeVar("Coercion", bound="Callable[[Any], Policy]")

MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)

SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

OPPOSITE = {
    CheckpointPolicy.MUST_SAVE: CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_SAVE: CheckpointPolicy.PREFER_RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: CheckpointPolicy.PREFER_SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: CheckpointPolicy.MUST_SAVE,
}


@dataclass(frozen=True, eq=False)
class Value:
    """What one op of the forward makes, as policies see it. Views are no values: they go with what they view."""

    op: Any
    """The ``OpOverload`` (or higher-order op) that makes it."""
    module: str = ""
    """Path of the module that made it, as ``named_modules()`` spells it; empty for the model itself, or where a trace has no modules."""
    names: tuple[str, ...] = ()
    """What :func:`fxckpt.name` called it."""
    shape: tuple[int, ...] = ()
    """Of the first tensor, if the op makes several."""
    dtype: torch.dtype | None = None
    bytes: int = 0
    """Of all storages that the op fills."""
    flops: int = 0
    """Of one run."""
    occurrence: int = 0
    """How many times this op came before."""
    source: str = ""
    """``"file.py:12"``, the line that called the op; empty where a trace has none."""
    args: tuple[Any, ...] = ()
    """Arguments of the op, tensors as fake tensors."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None
    """What the op gives, tensors as fake tensors."""
    position: int = 0
    """Place in the forward's sequence of values, from 0."""
    reads: tuple[int, ...] = ()
    """Positions of the values it reads, be it through views."""
    input_names: tuple[str, ...] = ()
    """What :func:`fxckpt.name` called the inputs of the graph that it reads, be it through views."""
    node: str = ""
    """Name in the graph, as plans print it."""

    def __str__(self) -> str:
        label = f"{self.node or self.op} ({self.op}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)})"
        place = f"in module {self.module!r}" if self.module else "in no module"
        return f"{label} {place}"


class Policy(ABC):
    """An answer per value. Final subclasses are small frozen dataclasses, so that they compare, hash, print and pickle.

    ``a | b`` applies both: where one leaves open, the other decides; MUST goes before PREFER; of two that only prefer, saving wins.
    ``a & b`` saves what both save: it leaves open what either leaves open, and of two different answers takes the one that saves less.
    ``~a`` says the opposite of ``a``. In ``|`` and ``&``, two MUSTs that clash raise :class:`~fxckpt.errors.PolicyConflict`. One side may be a
    function or a list of ops in torch's form; a function that returns None leaves the value open.
    """

    @property
    def needs_graph(self) -> bool:
        """Whether an answer depends on more than an op and its arguments: on modules, names, or the sequence of values."""
        return False

    @abstractmethod
    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return what is to happen to ``value``; None leaves it open."""

    def bind(self, values: Sequence[Value]) -> Policy:
        """Return the policy for one graph, whose values are given in order; called once a graph, before :meth:`decide`.

        Raises :class:`~fxckpt.errors.PolicyMatchesNothing` for a pattern that no value fits.
        """
        return self

    def lenient(self) -> Policy:
        """Return the policy for one graph of several: what it names may be in another one, so that no match is no error."""
        return LenientPolicy(self)

    def without_match(self, values: Sequence[Value]) -> Policy:
        """Return the policy for a graph that has nothing of what it names."""
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
    """Register the function that makes a policy of either side of ``|`` and ``&``; it knows forms that this file does not."""
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
    """``a | b``."""

    a: Policy
    b: Policy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """What either says; MUST before PREFER, then saving before running again."""
        a, b = self.a.decide(value), self.b.decide(value)
        if a is None or b is None:
            return a if b is None else b
        refuse_clash((self.a, a), (self.b, b), value)
        return max(a, b, key=lambda p: (p in MUST, p in SAVE))

    @property
    def needs_graph(self) -> bool:
        """Whether a part of it does."""
        return self.a.needs_graph or self.b.needs_graph

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind both."""
        return Disjunction(self.a.bind(values), self.b.bind(values))

    def lenient(self) -> Policy:
        """Make each part lenient."""
        return Disjunction(self.a.lenient(), self.b.lenient())

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"


@dataclass(frozen=True)
class Conjunction(Policy):
    """``a & b``."""

    a: Policy
    b: Policy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """The answer that saves less; open if either leaves it open."""
        a, b = self.a.decide(value), self.b.decide(value)
        if a is None or b is None:
            return None
        refuse_clash((self.a, a), (self.b, b), value)
        return min(a, b, key=list(OPPOSITE)[::-1].index)

    @property
    def needs_graph(self) -> bool:
        """Whether a part of it does."""
        return self.a.needs_graph or self.b.needs_graph

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind both."""
        return Conjunction(self.a.bind(values), self.b.bind(values))

    def lenient(self) -> Policy:
        """Make each part lenient."""
        return Conjunction(self.a.lenient(), self.b.lenient())

    def __repr__(self) -> str:
        return f"({self.a!r} & {self.b!r})"


@dataclass(frozen=True)
class Negation(Policy):
    """``~a``."""

    a: Policy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """What ``a`` says, turned round."""
        answer = self.a.decide(value)
        return None if answer is None else OPPOSITE[answer]

    @property
    def needs_graph(self) -> bool:
        """Whether a part of it does."""
        return self.a.needs_graph

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind ``a``."""
        return Negation(self.a.bind(values))

    def lenient(self) -> Policy:
        """Make each part lenient."""
        return Negation(self.a.lenient())

    def __repr__(self) -> str:
        return f"~{self.a!r}"


@dataclass(frozen=True)
class FirstMatch(Policy):
    """Policies in order: the first that does not leave a value open decides it."""

    policies: tuple[Policy, ...]

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """The first answer there is."""
        return next(
            (answer for p in self.policies if (answer := p.decide(value)) is not None), None
        )

    @property
    def needs_graph(self) -> bool:
        """Whether a part of it does."""
        return any(p.needs_graph for p in self.policies)

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind all."""
        return FirstMatch(tuple(p.bind(values) for p in self.policies))

    def lenient(self) -> Policy:
        """Make each part lenient."""
        return FirstMatch(tuple(p.lenient() for p in self.policies))

    def __repr__(self) -> str:
        return f"first_match({', '.join(map(repr, self.policies))})"


@dataclass(frozen=True)
class LenientPolicy(Policy):
    """A policy that need not find what it names."""

    policy: Policy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """What the policy says."""
        return self.policy.decide(value)

    @property
    def needs_graph(self) -> bool:
        """Whether the policy does."""
        return self.policy.needs_graph

    def bind(self, values: Sequence[Value]) -> Policy:
        """Bind the policy, if what it names is here."""
        try:
            return self.policy.bind(values)
        except PolicyMatchesNothing as error:
            log.info("in one graph of several: %s", error)
            return self.policy.without_match(values)

    def __repr__(self) -> str:
        return repr(self.policy)


@dataclass(frozen=True)
class BoundPolicy(Policy):
    """What a policy that looks at the whole sequence decided, by position."""

    policy: Policy
    answers: tuple[CheckpointPolicy | None, ...]

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """The answer for the value's position."""
        return self.answers[value.position]

    def __repr__(self) -> str:
        return repr(self.policy)


def refuse_clash(
    first: tuple[Policy, CheckpointPolicy], second: tuple[Policy, CheckpointPolicy], value: Value
) -> None:
    """Raise :class:`PolicyConflict` for two MUSTs that oppose each other."""
    (a, answer), (b, other) = first, second
    if answer in MUST and other in MUST and answer is not other:
        raise PolicyConflict(
            f"two policies clash over {value}: {a!r} says {answer.name}, {b!r} says {other.name}. "
            f"Put the one that is to win first: first_match({a!r}, {b!r})."
        )
