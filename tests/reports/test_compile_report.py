"""Reports of a backend."""

from __future__ import annotations

from dataclasses import replace

import fxckpt
from fxckpt.reports.compile_report import SHOWN, Break, Origin, Report, outputs_bytes


def test_report_without_plans() -> None:
    """A report without plans says how to compile a graph with a backward."""
    assert str(Report(())).startswith("no graph with a backward has been compiled yet")


def test_report_numbers_graphs_and_lists_breaks(plan: fxckpt.Plan) -> None:
    """Graphs are rows of one table; breaks come last, or a hint if none was seen."""
    found = Break(1, "call to print", "model.py:7", 2048)
    report = Report((plan, plan), (found,))
    text = str(report)
    assert [row["graph"] for row in report.table()] == [1, 2]
    assert len(text.splitlines()) < 10 and text.startswith("  plan    graph  called at")
    assert text.endswith(str(found)) and "TORCH_LOGS" not in text
    assert "TORCH_LOGS=graph_breaks" in str(Report((plan, plan)))


def test_a_lone_plan_shows_its_largest_values(plan: fxckpt.Plan) -> None:
    """The report of one plan is its explanation, cut short."""
    assert str(Report((plan,))) == str(plan.explain().top(SHOWN))


def test_plans_of_a_step_name_their_graphs(plan: fxckpt.Plan) -> None:
    """Two levels of one graph are two plans of it, whose budget is the step's."""
    lone = replace(plan, budget_bytes=None)
    report = Report((lone, lone), origins=(Origin(1, "train.py:9"), Origin(1, "train.py:9")))
    assert [(r["plan"], r["graph"], r["source"]) for r in report.table()] == [
        (1, 1, "train.py:9"),
        (2, 1, "train.py:9"),
    ]
    assert "the step's" in str(report)


def test_break_names_graph_source_and_bytes() -> None:
    """The text of a break has its graph, line, reason and the bytes of the outputs."""
    assert str(Break(1, "call to print", "model.py:7", 2048)) == (
        "graph break: graph 1 ends at model.py:7 (call to print): nothing is planned across it, "
        "and its outputs, 2.0 KiB, are held until its backward"
    )
    assert str(Break(None, "a loop", "", 0)) == (
        "graph break: a graph without a backward ends (a loop): nothing is planned across it"
    )


def test_outputs_bytes(plan: fxckpt.Plan) -> None:
    """The bytes of outputs are those of the snapshot's output storages."""
    assert plan.snapshot is not None
    outputs = [s.bytes for s in plan.snapshot.program.storages if s.is_output]
    assert outputs_bytes(plan) == sum(outputs) > 0
    assert outputs_bytes(replace(plan, snapshot=None)) == 0
