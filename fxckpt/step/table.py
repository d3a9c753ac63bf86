"""Table of a step: its calls by graph and level, and what it held outside of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fxckpt.reports.step_report import StepReport, StepRow
from fxckpt.solver.step_choice import bound_seconds, choice_of
from fxckpt.step.record import LearnedStep, RecordedCall, StepRecord


def step_report(
    record: StepRecord,
    learned: LearnedStep,
    limit: int,
    *,
    steps: int,
    settled_at: int | None,
    describes: str,
) -> StepReport:
    """Return the report of a step that ended.

    ``learned`` is what steps of its kind teach, ``limit`` their budget in bytes; ``steps`` is its
    number, ``settled_at`` that of the first one whose levels were chosen.
    """
    program = learned.program([call.sizes for call in record.calls])
    choice = choice_of(program, [call.position for call in record.calls])
    return StepReport(
        tuple(_rows(record)),
        limit,
        choice.peak_bytes,
        record.most_bytes,
        record.peak_bytes < record.most_bytes,
        record.peak_at,
        max((moment.outside_bytes for moment in program.moments), default=0),
        steps,
        settled_at,
        min(choice.extra_seconds, bound_seconds(program, limit)),
        choice.extra_seconds,
        describes,
    )


def _rows(record: StepRecord) -> Iterator[StepRow]:
    """Yield a row for each graph, level and sizes, with the number of its calls."""
    counts: Counter[RecordedCall] = Counter(record.calls)
    for call, count in sorted(counts.items(), key=lambda x: (x[0].graph.number, x[0].position)):
        graph = call.graph
        each = graph.levels(call.sizes)
        level = each[call.position]
        faster = sum(other.extra_seconds < level.extra_seconds for other in each)
        yield StepRow(
            graph.number,
            graph.name,
            count,
            faster + 1,
            len(graph.plans),
            level.held_bytes,
            level.forward_bytes,
            level.backward_bytes,
            level.extra_seconds,
            level.away_bytes,
        )
