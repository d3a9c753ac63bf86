"""The decisions of a plan, one row a value: filter, sort, group and print them."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tabulate import tabulate

from fxckpt.budgets import format_bytes
from fxckpt.errors import InvalidOption
from fxckpt.plans.snapshot import NodeLabel
from fxckpt.plans.types import Plan, Row
from fxckpt.reason import Decision, Reason
from fxckpt.reports.difference import Difference, diff
from fxckpt.reports.memory_bar import memory_bar
from fxckpt.reports.narrate import Narrator, Readers
from fxckpt.reports.saved_values import SavedValues, list_saved_values
from fxckpt.utils.globs import fits, is_inside
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_flops, format_seconds, shorten

KEYS: dict[str, Callable[[Row], Any]] = {
    "bytes": lambda row: -row.bytes,
    "seconds": lambda row: -(row.recompute_seconds * max(row.runs, 1)),
    "flops": lambda row: -(row.recompute_flops * max(row.runs, 1)),
    "runs": lambda row: -row.runs,
    "name": lambda row: row.name,
    "module": lambda row: row.module,
    "op": lambda row: row.op,
    "decision": lambda row: row.decision.value,
}
"""Sort keys of the rows: numbers from large to small, words from A to Z."""


@dataclass(frozen=True)
class Explanation:
    """The rows of a plan, with the reason for each decision.

    Made by :meth:`fxckpt.Plan.explain`. Immutable: :meth:`filter`, :meth:`sort` and :meth:`top`
    return a new explanation of the same plan. Printing shows the plan's figures, its memory
    profile and the rows.

    >>> import torch, fxckpt
    >>> from torch import nn
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    >>> plan = fxckpt.plan(model, torch.empty(512, 64, device="meta"), budget=0.7)
    >>> explanation = plan.explain()
    >>> print(explanation.filter(op="addmm").top(1).rows[0].reason)
    cheaper to save than to recompute at this budget
    >>> explanation.why("addmm")[:36]
    'saved: recomputing it needs 0.addmm '
    """

    plan: Plan
    rows: tuple[Row, ...]
    """The values that the backward needs, largest first."""
    inputs: tuple[NodeLabel, ...] = ()
    """The graph inputs that the backward reads; empty if the plan carries no graph snapshot."""

    @cached_property
    def _narrator(self) -> Narrator:
        return Narrator(self.plan)

    def top(self, count: int) -> Explanation:
        """Return the explanation with its first ``count`` rows, the largest unless sorted."""
        return replace(
            self,
            rows=self.rows[: max(0, count)],
            inputs=self.inputs if count >= len(self.rows) else (),
        )

    def sort(self, key: str) -> Explanation:
        """Return the explanation with its rows sorted by ``key``.

        ``key`` is ``"bytes"``, ``"seconds"``, ``"flops"`` or ``"runs"`` (largest first), or
        ``"name"``, ``"module"``, ``"op"`` or ``"decision"`` (alphabetical). Raises
        :class:`fxckpt.InvalidOption` for any other.
        """
        if key not in KEYS:
            raise InvalidOption(f"sort({key!r}): rows are sorted by {', '.join(map(repr, KEYS))}.")
        return replace(self, rows=tuple(sorted(self.rows, key=KEYS[key])))

    def filter(
        self,
        *,
        decision: Decision | str | None = None,
        module: str | None = None,
        op: str | None = None,
        name: str | None = None,
        reason: Reason | str | None = None,
        least_bytes: int = 0,
    ) -> Explanation:
        """Return the explanation with the rows that match every given criterion.

        ``module``, ``op`` and ``name`` are globs (``"*.attn"``, ``"*soft*"``); submodules of a
        matching module match too. ``decision`` and ``reason`` are enum members or their texts,
        and ``least_bytes`` is the size of the smallest value to keep. Graph inputs have a name
        but no module, op, reason or bytes, so a filter on any of these drops them.

        Raises :class:`fxckpt.InvalidOption` for an unknown decision or reason.
        """
        wanted = None if decision is None else _parse_decision(decision)
        because = None if reason is None else _parse_reason(reason)
        kept = tuple(
            row
            for row in self.rows
            if (wanted is None or row.decision is wanted)
            and (module is None or is_inside(row.module, module))
            and (op is None or fits(row.op, op))
            and (name is None or fits(row.name, name))
            and (because is None or row.reason is because)
            and row.bytes >= least_bytes
        )
        keeps_inputs = (
            wanted is not Decision.RECOMPUTED
            and module is op is because is None
            and least_bytes <= 0
        )
        inputs = tuple(
            i for i in self.inputs if keeps_inputs and (name is None or fits(i.name, name))
        )
        return replace(self, rows=kept, inputs=inputs)

    def by_module(self, depth: int | None = None) -> Table:
        """Return bytes and time by module, largest first.

        ``depth`` truncates module paths to that many components.
        """
        return _group_by(
            "module", self.rows, lambda row: ".".join(row.module.split(".")[:depth]) or "(model)"
        )

    def by_op(self) -> Table:
        """Return bytes and time by op, largest first."""
        return _group_by("op", self.rows, lambda row: row.op)

    def by_reason(self) -> Table:
        """Return bytes and time by reason, largest first."""
        return _group_by(
            "reason", self.rows, lambda row: f"{row.decision.value}: {row.reason.value}"
        )

    def why(self, name: str) -> str:
        """Return the reason for the decision about the value ``name`` as a sentence.

        Raises :class:`fxckpt.InvalidOption` if the plan has no row of this name.
        """
        return self._narrator.why(self._row(name))

    def readers(self, name: str) -> Readers:
        """Return the ops that read the value ``name`` in the forward, recomputation and backward.

        Raises :class:`fxckpt.InvalidOption` if the plan has no row of this name, or carries no
        graph snapshot.
        """
        return self._narrator.readers(self._row(name).name)

    def _row(self, name: str) -> Row:
        if not isinstance(name, str):
            example = next((row.name for row in self.plan.rows), "addmm")
            raise InvalidOption(
                f"{name!r} is not the name of a value, which is a string. Example: {example!r}."
            )
        found = next((row for row in self.plan.rows if row.name == name), None)
        if found is None:
            similar = [row.name for row in self.plan.rows if name in row.name][:5]
            hint = f"Near it: {', '.join(similar)}." if similar else "plan.explain() lists them."
            raise InvalidOption(f"{name!r} is neither saved nor recomputed by this plan. {hint}")
        return found

    def diff(self, other: Plan) -> Difference:
        """Return the changes from this plan to ``other``.

        Raises :class:`fxckpt.InvalidOption` if ``other`` is not a plan of the same graph.
        """
        return diff(self.plan, other)

    def saved_values(self) -> SavedValues:
        """Return the saved values and inputs among the rows, one line a value.

        The format follows ``jax.ad_checkpoint.print_saved_residuals``.
        """
        return list_saved_values(self.rows, self.inputs)

    def gap(self) -> str:
        """Return the plan's optimality gap in words."""
        plan = self.plan
        if plan.extra_seconds <= plan.lower_bound_seconds:
            return "this plan is optimal"
        if (plan.budget_bytes is None and not plan.regions) or not plan.step_seconds:
            return "no bound"
        gap = (plan.extra_seconds - plan.lower_bound_seconds) / plan.step_seconds
        return f"this plan is within {gap:.2%} of the step of it"

    def next_100_mib(self) -> str:
        """Return the time that 100 MiB more would save, in words."""
        plan = self.plan
        if not plan.next_seconds or not plan.step_seconds:
            return "nothing"
        share = plan.next_seconds / plan.step_seconds
        return f"at most {format_seconds(plan.next_seconds)}, {share:.2%} of the step"

    def binding(self) -> str:
        """Return the budgets that cost time: that of the graph, and those of regions, by name."""
        plan = self.plan
        found = ["the budget"] if plan.budget_binds else []
        found += [f"region {region.name}" for region in plan.regions if region.binds]
        return ", ".join(found) or "no budget"

    def regions(self) -> Table:
        """Return the regions with a budget of their own, one a row, in the order they run."""
        return Table(
            REGION_COLUMNS,
            tuple(
                (
                    region.name,
                    region.budget,
                    region.limit_bytes,
                    region.saved_bytes,
                    region.least_bytes,
                    region.default_bytes,
                    "yes" if region.binds else "no",
                )
                for region in self.plan.regions
            ),
        )

    def summary(self) -> list[tuple[str, str]]:
        """Return the plan's figures as (name, text)."""
        plan = self.plan
        budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
        return [
            ("peak", format_bytes(plan.peak_bytes)),
            *(
                []
                if plan.compiled_peak_bytes is None
                else [("peak as compiled", format_bytes(plan.compiled_peak_bytes))]
            ),
            ("budget", budget),
            *([("binds", self.binding())] if plan.regions else []),
            *([("tiles", str(plan.tiling))] if plan.tiling else []),
            ("uncheckpointed peak", format_bytes(plan.baseline_peak_bytes)),
            (
                "floor (least peak found)",
                f"{format_bytes(plan.floor_bytes)}; "
                f"no plan is below {format_bytes(plan.floor_bound_bytes)}",
            ),
            (
                "saved for the backward",
                f"{format_bytes(plan.saved_bytes)} in {len(plan.saved)} values",
            ),
            (
                "recomputed",
                f"{len(plan.schedule)} runs of {len(plan.recomputed)} ops, "
                f"{format_flops(plan.recompute_flops)}",
            ),
            *(
                [
                    (
                        "sent away",
                        f"{format_bytes(plan.away_bytes)} in {len(plan.offloads)} values; waits "
                        f"for copies: {format_seconds(plan.stall_seconds)}",
                    )
                ]
                if plan.offloads
                else []
            ),
            (
                "extra time",
                f"{format_seconds(plan.extra_seconds)}, {plan.slowdown:.1%} of the step "
                f"(cost model: {plan.cost})",
            ),
            (
                "least possible extra time",
                f"{format_seconds(plan.lower_bound_seconds)}: {self.gap()}",
            ),
            (
                "price of memory",
                f"{format_seconds(plan.price)} a MiB at the margin; "
                f"the next 100 MiB save {self.next_100_mib()}",
            ),
        ]

    def table(self) -> Table:
        """Return the rows as a table.

        Its data, beyond the printed columns: each reason as a sentence, and the ops that read the
        value in the backward.
        """
        has_snapshot = self.plan.snapshot is not None

        def backward_readers(row: Row) -> str:
            if not has_snapshot:
                return ""
            readers = self._narrator.readers(row.name)
            return " ".join((*readers.recompute, *readers.backward))

        return Table(
            COLUMNS,
            tuple(
                (*_cells(row), self._narrator.why(row), backward_readers(row)) for row in self.rows
            ),
        )

    def to_markdown(self) -> str:
        """Return the figures and the rows as two Markdown tables."""
        figures = tabulate(self.summary(), ("", ""), tablefmt="github", disable_numparse=True)
        return f"{figures}\n\n{self.table().to_markdown()}"

    def to_csv(self) -> str:
        """Return the rows as CSV, in bytes, seconds and FLOPs, with each reason as a sentence."""
        return self.table().to_csv()

    def to_json(self, indent: int | None = None) -> str:
        """Return the rows as a JSON array, in bytes, seconds and FLOPs, with each reason as a
        sentence."""
        return self.table().to_json(indent)

    def to_pandas(self) -> Any:
        """Return the rows as a pandas ``DataFrame``; pandas has to be installed."""
        return self.table().to_pandas()

    def _hidden_note(self) -> str:
        hidden = len(self.plan.rows) - len(self.rows)
        return f"... and {hidden} more values" if hidden > 0 else ""

    def __str__(self) -> str:
        parts = [
            tabulate(self.summary(), tablefmt="plain"),
            memory_bar(self.plan),
            str(self.regions()) if self.plan.regions else "",
            str(_brief_table(self.rows)),
            self._hidden_note(),
        ]
        return "\n\n".join(filter(None, parts))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self.top(20)))

    def _repr_html_(self) -> str:
        figures = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>"
            for name, text in self.summary()
        )
        bar = html.escape(memory_bar(self.plan))
        shown = self.top(20)
        table = _brief_table(shown.rows).to_html()
        note = html.escape(shown._hidden_note())
        return f"<table>{figures}</table>\n<pre>{bar}</pre>\n{table}\n<p>{note}</p>"


def summary_of(plan: Plan) -> str:
    """Return a plan's figures, one line each."""
    figures = Explanation(plan, ()).summary()
    width = max(len(name) for name, _ in figures)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in figures)


def explain(plan: Plan) -> Explanation:
    """Return the explanation of ``plan``, all rows, largest first."""
    inputs = Narrator(plan).backward_inputs() if plan.snapshot is not None else ()
    return Explanation(plan, tuple(sorted(plan.rows, key=lambda row: -row.bytes)), inputs)


COLUMNS = (
    Column("name", "value", lambda v: shorten(v, 26)),
    Column("op", "op", lambda v: shorten(v, 22)),
    Column("shape", "shape", lambda v: "x".join(map(str, v))),
    Column("dtype", "dtype"),
    Column("bytes", "bytes", format_bytes, is_number=True),
    Column("module", "module", lambda v: shorten(v, 26)),
    Column("source", "source", lambda v: shorten(v, 24)),
    Column("decision", "decision"),
    Column("reason", "reason"),
    Column("runs", "runs", lambda v: str(v or ""), is_number=True),
    Column("recompute_seconds", "time a run", format_seconds, is_number=True),
    Column("recompute_flops", "FLOPs a run", format_flops, is_number=True, is_brief=False),
    Column("why", "why", is_brief=False),
    Column("backward_readers", "read in the backward by", is_brief=False),
)

_BRIEF_COLUMNS = COLUMNS[:-2]


REGION_COLUMNS = (
    Column("name", "region", lambda v: shorten(v, 48)),
    Column("budget", "budget"),
    Column("limit_bytes", "allowed", format_bytes, is_number=True),
    Column("saved_bytes", "saved", format_bytes, is_number=True),
    Column("least_bytes", "least", format_bytes, is_number=True),
    Column("default_bytes", "without a budget", format_bytes, is_number=True),
    Column("binds", "binds"),
)


def _cells(row: Row) -> tuple[Any, ...]:
    return (
        row.name,
        row.op,
        row.shape,
        row.dtype,
        row.bytes,
        row.module,
        row.source,
        row.decision.value,
        row.reason.value,
        row.runs,
        row.recompute_seconds,
        row.recompute_flops,
    )


def _brief_table(rows: Iterable[Row]) -> Table:
    """Return the rows as a table without the columns that take a walk over the graph."""
    return Table(_BRIEF_COLUMNS, tuple(_cells(row) for row in rows))


def _parse_reason(reason: Reason | str) -> Reason:
    try:
        return Reason(reason)
    except ValueError:
        known = ", ".join(r.name for r in Reason)
        raise InvalidOption(
            f"filter(reason={reason!r}): there is no such reason. "
            f"Give one of fxckpt.Reason: {known}."
        ) from None


def _parse_decision(decision: Decision | str) -> Decision:
    try:
        return Decision(decision)
    except ValueError:
        raise InvalidOption(
            f"decision={decision!r}: a value is {' or '.join(repr(d.value) for d in Decision)}."
        ) from None


def _group_by(heading: str, rows: Iterable[Row], key: Callable[[Row], str]) -> Table:
    """Return the totals of the rows that share a ``key``, the most bytes first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    columns = (
        Column(heading, heading, lambda v: shorten(v, 60)),
        Column("saved_bytes", "saved", format_bytes, is_number=True),
        Column("saved_values", "values", is_number=True),
        Column("recomputed_bytes", "recomputed", format_bytes, is_number=True),
        Column("recomputed_values", "values", is_number=True),
        Column("runs", "runs", is_number=True),
        Column("recompute_seconds", "extra time", format_seconds, is_number=True),
        Column("recompute_flops", "extra FLOPs", format_flops, is_number=True),
    )
    totals = (_totals(name, members) for name, members in groups.items())
    return Table(columns, tuple(sorted(totals, key=lambda r: (-(r[1] + r[3]), r[0]))))


def _totals(name: str, rows: list[Row]) -> tuple[Any, ...]:
    saved = [row for row in rows if row.decision is not Decision.RECOMPUTED]
    recomputed = [row for row in rows if row.decision is Decision.RECOMPUTED]
    # A value that only the backward needs is computed there for the first time, at no extra time.
    extra = [row for row in recomputed if row.reason is not Reason.FREE]
    return (
        name,
        sum(row.bytes for row in saved),
        len(saved),
        sum(row.bytes for row in recomputed),
        len(recomputed),
        sum(row.runs for row in recomputed),
        sum(row.runs * row.recompute_seconds for row in extra),
        sum(row.runs * row.recompute_flops for row in extra),
    )
