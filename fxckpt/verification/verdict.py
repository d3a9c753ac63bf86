"""Verdicts: the findings of a verification, as data and as lines for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from fxckpt.budgets import format_bytes
from fxckpt.utils.tables import Column, Table

FindingKind = Literal[
    "error",
    "reference",
    "output",
    "gradient",
    "random",
    "statistics",
    "state",
    "write",
    "routing",
    "recompute",
    "leak",
]
"""Subject of a finding.

error
    One of the steps raised.
reference
    The plain step differs from run to run: a comparison with it is void.
output
    The forward gives other values.
gradient
    A gradient differs, or is missing.
random
    Random numbers were drawn anew, or a generator stands elsewhere after the step.
statistics
    A buffer, such as a running mean, differs after the step.
state
    A number that a module keeps in Python differs after the step.
write
    A tensor was changed between the forward and its recompute.
routing
    An op that chooses, such as ``topk``, chose otherwise in the recompute.
recompute
    The recompute ran other ops, or the same op gave other values.
leak
    Memory is held after the step.
"""
SHOWN = 5
"""Findings of one kind that are printed; the others are counted."""


@dataclass(frozen=True)
class Finding:
    """One difference between a checkpointed step and the plain one."""

    kind: FindingKind
    """Its subject."""
    where: str
    """Name of the parameter, buffer, input, output or module; empty where there is none."""
    text: str
    """The difference and its size."""
    advice: str
    """Remedy."""
    size: float = 0.0
    """Size of the difference: a share of the norm, a count, or for a leak bytes."""


@dataclass(frozen=True)
class Verdict:
    """The result of :func:`fxckpt.verify`. Printing shows the findings and the checks."""

    findings: tuple[Finding, ...]
    """The differences, causes first."""
    checks: tuple[str, ...]
    """Comparisons made, a sentence each."""
    peak_bytes: int | None
    """Peak of a checkpointed step above its start; None where it cannot be measured."""
    reference_peak_bytes: int | None
    """Peak of a plain step above its start; None where it cannot be measured."""

    @property
    def ok(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def of_kind(self, kind: FindingKind) -> tuple[Finding, ...]:
        """Return the findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def table(self) -> Table:
        """Return the findings as a table."""
        columns = [Column(name, name) for name in ("kind", "where", "text", "advice")]
        columns.append(Column("size", "size", lambda size: f"{size:.3g}", is_number=True))
        rows = ((f.kind, f.where, f.text, f.advice, f.size) for f in self.findings)
        return Table(tuple(columns), tuple(rows))

    def __str__(self) -> str:
        checked = [f"  checked: {text}" for text in self.checks]
        return "\n".join((self._heading(), *self._finding_lines(), *checked, *self._peak_lines()))

    def _heading(self) -> str:
        count = len(self.findings)
        if not count:
            return "no finding: the step is that of the reference"
        found = f"{count} finding{'s' if count > 1 else ''}"
        if all(finding.kind == "reference" for finding in self.findings):
            return f"{found}: the plain step differs from run to run, which voids the comparison"
        return f"{found}: the step is not that of the reference"

    def _finding_lines(self) -> list[str]:
        lines: list[str] = []
        total = Counter(finding.kind for finding in self.findings)
        seen: Counter[str] = Counter()
        advised: set[str] = set()
        for finding in self.findings:
            seen[finding.kind] += 1
            if seen[finding.kind] <= SHOWN:
                where = f"{finding.where}: " if finding.where else ""
                lines.append(f"  {finding.kind:<10}  {where}{finding.text}")
                if finding.advice not in advised:
                    lines.append(f"  {'':<10}    {finding.advice}")
                advised.add(finding.advice)
            elif seen[finding.kind] == total[finding.kind]:
                lines.append(f"  {finding.kind:<10}  ... and {total[finding.kind] - SHOWN} more")
        return lines

    def _peak_lines(self) -> list[str]:
        if self.peak_bytes is None or not self.reference_peak_bytes:
            return []
        share = self.peak_bytes / self.reference_peak_bytes
        return [
            f"  peak: {format_bytes(self.peak_bytes)}, {share:.2f} of the reference's "
            f"{format_bytes(self.reference_peak_bytes)}"
        ]
