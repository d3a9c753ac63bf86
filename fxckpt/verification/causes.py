"""Causes: the first ops of a recompute that differ from the forward's.

An op that reads and gives the same as one of the forward is right; a reader of a wrong result is a
consequence. Of the rest, an op that reads the same and gives something else drew anew or is not
repeatable; one that reads what the forward read too, a parameter or another tensor from outside of
the region, with another value reads a tensor that was changed; and one that the forward did not run
is another path through the model. What a recompute makes for itself is no tensor from outside.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor

from fxckpt.verification.op_log import OpCall, OpLog, OpRead
from fxckpt.verification.verdict import Finding

WRITTEN = (
    "A region's inputs, and what its code reads, must stay unchanged until the backward: write to "
    "a copy, or save it inside the region."
)
"""Advice on tensors that were written too early."""


def causes(log: OpLog) -> list[Finding]:
    """Return the differences of a recompute from the forward, in the order of its ops."""
    judge = _Judge(log)
    for call in log.recompute:
        judge.judge(call)
    return [*judge.roots.values(), *judge.flips()]


class _Judge:
    def __init__(self, log: OpLog) -> None:
        self.gave: defaultdict[Any, set[tuple[str, ...]]] = defaultdict(set)
        self.read_by: defaultdict[str, set[str]] = defaultdict(set)
        self.settings_of: defaultdict[str, set[str]] = defaultdict(set)
        self.choices: defaultdict[tuple[str, str], list[OpCall]] = defaultdict(list)
        self.held: defaultdict[Any, set[str]] = defaultdict(set)
        self.readers: defaultdict[Any, set[str]] = defaultdict(set)
        self.first_read: dict[Any, int] = {}
        for index, call in enumerate(log.forward):
            self.gave[call.key].add(call.gives)
            self.settings_of[call.op].add(call.settings)
            for read in call.reads:
                self.read_by[call.op].add(read.digest)
                if read.holder is not None:
                    self.held[read.holder].add(read.digest)
                    self.readers[read.holder].add(call.op)
                    self.first_read.setdefault(read.holder, index)
            if call.choices:
                self.choices[call.op, call.module].append(call)
        self.known = {read.digest for call in log.forward for read in call.reads}
        self.known |= {given for call in log.forward for given in call.gives}
        self.wrong: set[str] = set()
        self.roots: dict[tuple[Any, ...], Finding] = {}
        self.flipped: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])

    def judge(self, call: OpCall) -> None:
        """Take one call of a recompute into account."""
        given = self.gave.get(call.key, set())
        if call.gives in given:
            return
        is_consequence = any(read.digest in self.wrong for read in call.reads)
        if call.is_view and not is_consequence:
            self._follow(call)
            return
        if not is_consequence:
            finding = self._root(call, bool(given))
            if finding is not None:
                self.roots.setdefault((finding.kind, finding.where, finding.text), finding)
                self.wrong.update(call.gives)
        # A value that the forward knew is right, whatever op gave it here.
        self.wrong.update(set(call.gives) - self.known)
        if call.choices:
            self._compare_choices(call)

    def _follow(self, call: OpCall) -> None:
        """Note the views of what the forward read: they are no other values."""
        for read in call.reads:
            if read.holder in self.held and read.digest in self.held[read.holder]:
                self.held[read.holder].update(call.gives)

    def _root(self, call: OpCall, reads_the_same: bool) -> Finding | None:
        """Return why a call of the recompute differs; None if its inputs or results do not."""
        if reads_the_same and call.is_random:
            return Finding(
                "random",
                call.module,
                f"{call.op} drew other numbers in the recompute",
                "Recompute with the generator's state of the forward: "
                "preserve_rng_state=True, or a library that keeps it.",
                1.0,
            )
        if reads_the_same:
            return Finding(
                "recompute",
                call.module,
                f"{call.op} gave other values in the recompute from the same inputs",
                "The op is not repeatable: save its result, with a selective policy, or call "
                "torch.use_deterministic_algorithms(True).",
                1.0,
            )
        changed = [read for read in call.reads if self._is_changed(read, call.op)]
        if changed:
            return self._changed(call, changed[0])
        if all(given in self.known for given in call.gives):
            return None
        was_run = call.settings in self.settings_of[call.op]
        how = " on other values than the forward" if was_run else ", which the forward did not run"
        return Finding(
            "recompute",
            call.module,
            f"the recompute runs {call.op}({call.settings}){how}",
            "The region's Python code took another path the second time: what it reads (flags, "
            "counters, autocast, random numbers of Python and NumPy) must be as in the forward.",
            1.0,
        )

    def _is_changed(self, read: OpRead, op: str) -> bool:
        """Return whether a tensor that the forward read, too, has another value now.

        It has one that the forward never read of it, or that this op did not.
        """
        if read.holder not in self.held or read.digest in self.read_by[op]:
            return False
        return read.digest not in self.held[read.holder] or op in self.readers[read.holder]

    def _changed(self, call: OpCall, read: OpRead) -> Finding:
        name = read.holder if isinstance(read.holder, str) else ""
        write, by = read.write, ""
        if write is not None and write.after >= self.first_read[read.holder]:
            by = f"; last written by {write.op}" + (f" at {write.line}" if write.line else "")
        return Finding(
            "write",
            name or call.module,
            f"{read.type} read by {call.op} in the recompute is not what the forward read{by}",
            WRITTEN,
            1.0,
        )

    def _compare_choices(self, call: OpCall) -> None:
        same = [
            other
            for other in self.choices[call.op, call.module]
            if [c.shape for c in other.choices] == [c.shape for c in call.choices]
        ]
        if not same:
            return
        changed = min(_differing(call.choices, other.choices) for other in same)
        counts = self.flipped[call.op, call.module]
        counts[0] += changed
        counts[1] += sum(c.numel() for c in call.choices)

    def flips(self) -> list[Finding]:
        """Return the ops that chose otherwise, with the share of choices."""
        return [
            Finding(
                "routing",
                module,
                f"{changed} of {total} choices of {op} differ in the recompute",
                "Save what the op chooses, with a selective policy; fxckpt never recomputes "
                "discrete choices.",
                changed / total,
            )
            for (op, module), (changed, total) in self.flipped.items()
            if changed
        ]


def _differing(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> int:
    return sum(int((a != b).sum()) for a, b in zip(some, others, strict=True))
