"""Policies that select values one by one: by class of op, by op, by module path, by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.errors import PolicyMatchesNothing
from fxckpt.policies.base import Policy, TilePattern, Value
from fxckpt.utils.globs import fits


@dataclass(frozen=True)
class ConstantPolicy(Policy):
    """One answer for all values."""

    label: str
    answer: CheckpointPolicy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the answer."""
        return self.answer

    def __repr__(self) -> str:
        return self.label


@dataclass(frozen=True)
class OpClassPolicy(Policy):
    """One answer for the ops of a class, another for the rest."""

    label: str
    selects: Callable[[Any], bool]
    answer: CheckpointPolicy
    rest: CheckpointPolicy
    expects: str = ""
    """Words for the error about a graph without such ops; empty if that is no error."""

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the answer for the value's op."""
        return self.answer if self.selects(value.op) else self.rest

    def bind(self, values: Sequence[Value]) -> Policy:
        """Return self; raise :class:`PolicyMatchesNothing` if no op is of the class."""
        if self.expects and not any(self.selects(value.op) for value in values):
            raise PolicyMatchesNothing(
                f"{self!r} finds {self.expects}. The graph's ops: {_listed(op_labels(values))}."
            )
        return self

    def __repr__(self) -> str:
        return self.label


@dataclass(frozen=True)
class OpsPolicy(Policy):
    """The outputs of some ops are saved, the rest is recomputed."""

    names: tuple[str, ...]
    """Ops by name: ``"aten::mm"`` for all overloads, ``"aten::mm.default"`` for one."""
    is_strict: bool = True
    """Whether a graph without any of the ops is an error."""

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return MUST_SAVE for the ops, PREFER_RECOMPUTE for the rest."""
        return (
            CheckpointPolicy.MUST_SAVE
            if self._selects(value.op)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def bind(self, values: Sequence[Value]) -> Policy:
        """Return self; raise :class:`PolicyMatchesNothing` if the graph has none of the ops."""
        if self.is_strict and not any(self._selects(value.op) for value in values):
            known = op_labels(values)
            raise PolicyMatchesNothing(
                f"{self!r} matches no op of the graph. {did_you_mean(self.labels, known)}"
            )
        return self

    @property
    def labels(self) -> list[str]:
        """Names of the ops as ``torch.ops`` spells them."""
        return [name.replace("::", ".") for name in self.names]

    def _selects(self, op: Any) -> bool:
        full = overload_name(op)
        return full in self.names or full.rpartition(".")[0] in self.names

    def __repr__(self) -> str:
        return f"save_ops({', '.join(self.labels)})"


@dataclass(frozen=True)
class ModulesPolicy(Policy):
    """One answer for the values made in some modules and their submodules."""

    label: str
    patterns: tuple[str, ...]
    answer: CheckpointPolicy

    @property
    def needs_graph(self) -> bool:
        """True: the answers depend on modules."""
        return True

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the answer for a value of these modules, None for others."""
        return (
            self.answer
            if any(matched_module(value.module, p) is not None for p in self.patterns)
            else None
        )

    def bind(self, values: Sequence[Value]) -> Policy:
        """Return self; raise :class:`PolicyMatchesNothing` for a pattern that no module matches."""
        refuse_unmatched_modules(self, self.patterns, values)
        return self

    def __repr__(self) -> str:
        return f"{self.label}({', '.join(map(repr, self.patterns))})"


@dataclass(frozen=True)
class TilePolicy(Policy):
    """All values are open; regions that begin in some modules may be unrolled into tiles."""

    patterns: tuple[str, ...]

    @property
    def needs_graph(self) -> bool:
        """True: regions are found in a graph."""
        return True

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return None: tiles decide about no value."""
        return None

    def tiles(self) -> tuple[TilePattern, ...]:
        """Return the modules."""
        return tuple(map(TilePattern, self.patterns))

    def __repr__(self) -> str:
        return f"tile({', '.join(map(repr, self.patterns))})"


@dataclass(frozen=True)
class NamesPolicy(Policy):
    """One answer for the values of some names (:func:`fxckpt.name`), another for the rest."""

    label: str
    patterns: tuple[str, ...]
    answer: CheckpointPolicy
    rest: CheckpointPolicy

    @property
    def needs_graph(self) -> bool:
        """True: the answers depend on names."""
        return True

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the answer for the value's names."""
        return (
            self.answer
            if any(fits(name, p) for name in value.names for p in self.patterns)
            else self.rest
        )

    def bind(self, values: Sequence[Value]) -> Policy:
        """Return self; raise :class:`PolicyMatchesNothing` for a name that no value has."""
        known = sorted({name for value in values for name in value.names})
        inputs = sorted({name for value in values for name in value.input_names})
        for pattern in self.patterns:
            if any(fits(name, pattern) for name in known):
                continue
            if any(fits(name, pattern) for name in inputs):
                raise PolicyMatchesNothing(
                    f"{self!r}: {pattern!r} names an input of the graph (an argument, a parameter "
                    "or a buffer, or a view of one). It is alive whatever is planned: there is "
                    "nothing to save and nothing to recompute. Leave the name out."
                )
            hint = (
                did_you_mean([pattern], known)
                if known
                else "No value has a name: call fxckpt.name(t, 'attn_out') in the model."
            )
            raise PolicyMatchesNothing(f"{self!r}: no value is named {pattern!r}. {hint}")
        return self

    def __repr__(self) -> str:
        return f"{self.label}({', '.join(map(repr, self.patterns))})"


def overload_name(op: Any) -> str:
    """Return an op's full name: ``"aten::mm.default"``, or a higher-order op's plain name."""
    name = op.name() if callable(getattr(op, "name", None)) else str(op)
    return name if "." in name or "::" not in name else f"{name}.default"


def op_labels(values: Iterable[Value]) -> list[str]:
    """Return the graph's ops as ``torch.ops`` spells them, without overloads, sorted."""
    return sorted(
        {
            overload_name(value.op).rpartition(".")[0].replace("::", ".") or str(value.op)
            for value in values
        }
    )


def matched_module(path: str, pattern: str) -> str | None:
    """Return the outermost module on a path that matches a glob; None if none does.

    ``*``, ``?`` and ``[...]`` stand for text within one part, ``**`` for any number of parts.

    >>> matched_module("layers.3.attn.out", "layers.*.attn")
    'layers.3.attn'
    >>> matched_module("layers.3.mlp", "layers.*.attn") is None
    True
    >>> matched_module("decoder.blocks.0.mlp.up", "decoder.**.mlp")
    'decoder.blocks.0.mlp'
    """
    parts, wanted = path.split(".") if path else [], pattern.split(".")
    return next(
        (".".join(parts[:n]) for n in range(1, len(parts) + 1) if _fits(parts[:n], wanted)), None
    )


def _fits(parts: list[str], wanted: list[str]) -> bool:
    if not wanted:
        return not parts
    head, *rest = wanted
    if head == "**":
        return any(_fits(parts[n:], rest) for n in range(len(parts) + 1))
    return bool(parts) and fits(parts[0], head) and _fits(parts[1:], rest)


def refuse_unmatched_modules(
    policy: Policy, patterns: Sequence[str], values: Sequence[Value]
) -> None:
    """Raise :class:`PolicyMatchesNothing` for a pattern that no module of the values matches."""
    paths = {value.module for value in values}
    for pattern in patterns:
        if any(matched_module(path, pattern) is not None for path in paths):
            continue
        raise PolicyMatchesNothing(
            f"{policy!r}: no module that computes fits {pattern!r}. "
            f"{nearest_modules(pattern, paths)}"
        )


def nearest_modules(pattern: str, paths: set[str]) -> str:
    """Return a sentence that suggests the known modules nearest to a pattern."""
    known = {
        ".".join(parts[:n])
        for path in paths
        if path
        for parts in [path.split(".")]
        for n in range(1, len(parts) + 1)
    }
    if not known:
        return (
            "The graph says of no op which module made it. Give the module itself, "
            "or a graph of symbolic_trace, export or Dynamo, or select by op or by name."
        )
    if any(matched_module(path, f"**.{pattern}") is not None for path in paths):
        return f"Paths begin at the model: did you mean '**.{pattern}'?"
    # Layers differ only in their number: one pattern stands for all of them.
    return did_you_mean(
        [pattern], sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path in known})
    )


def did_you_mean(asked: Sequence[str], known: Sequence[str]) -> str:
    """Return a sentence that suggests the nearest known names.

    >>> did_you_mean(["layers.*.atn"], ["layers.*.attn", "layers.*.mlp", "head"])
    "Did you mean 'layers.*.attn', 'layers.*.mlp'?"
    """
    close = dict.fromkeys(
        match for name in asked for match in difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    )
    if close:
        return f"Did you mean {', '.join(map(repr, close))}?"
    return f"There are {_listed(known)}." if known else "There are none at all."


def _listed(known: Sequence[str], most: int = 12) -> str:
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(map(repr, known[:most])) + more
