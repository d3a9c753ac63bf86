"""Plans of steps: their table, figures, frontier and page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxckpt


class Two(nn.Module):
    """Two graphs, with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.several(x, 0)
        torch._dynamo.graph_break()
        return self.several(x, 4).sum()

    def several(self, x: Tensor, first: int) -> Tensor:
        for k in range(first, first + 4):
            x = self.layers[k](x).tanh().exp()
        return x


@pytest.fixture(scope="module")
def step() -> fxckpt.StepPlan:
    return fxckpt.plan_step(Two(), torch.randn(512, 64), budget=0.7)


def test_table_and_figures_agree(step: fxckpt.StepPlan) -> None:
    """The table has a row for each graph and level, and the text has the figures."""
    rows = step.table().records()
    assert sum(row["calls"] for row in rows) == len(step.calls) == 2
    assert sum(row["calls"] * row["extra_seconds"] for row in rows) == pytest.approx(
        step.extra_seconds
    )
    text = str(step)
    assert text.startswith("step of 2 calls of 2 graphs") and "uncheckpointed peak" in text
    assert max(map(sum, step.moments())) == step.peak_bytes == step.figures()["peak_bytes"]


def test_frontier_trades_time_for_the_steps_peak(step: fxckpt.StepPlan) -> None:
    """Points are of the whole step: within their budgets, and the less memory the more time."""
    curve = step.frontier(5)
    rows = curve.rows
    assert [row.peak_bytes <= row.budget_bytes for row in rows] == [True] * 5
    assert rows[0].budget_bytes == step.floor_bytes
    assert rows[-1].budget_bytes == step.baseline_peak_bytes
    seconds = [row.recompute_seconds for row in rows]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == 0 < seconds[0]
    assert all(row.lower_bound_seconds <= row.recompute_seconds for row in rows)
    assert len(str(curve).splitlines()) == 7 and "<table" in curve._repr_html_()
    named = step.frontier([0.9, step.baseline_peak_bytes])
    assert named.rows[0].budget_bytes == int(0.9 * step.baseline_peak_bytes)


def test_frontier_is_drawn(step: fxckpt.StepPlan) -> None:
    pytest.importorskip("matplotlib").use("agg")
    axes = step.frontier(3).plot()
    assert len(axes.lines) == 2


@pytest.mark.parametrize("points", [1, [], ["min"], [0.01]])
def test_bad_points_are_refused(step: fxckpt.StepPlan, points: object) -> None:
    with pytest.raises(fxckpt.FxckptError, match=r"[Ee]xample|give|Give|least peak"):
        step.frontier(points)


def test_plan_of_a_graph_is_its_level(step: fxckpt.StepPlan) -> None:
    """The plan of a graph saves what the table says that its call holds."""
    for number, row in zip((1, 2), step.table().records(), strict=True):
        plan = step.plan_of(number)
        assert plan is step.graphs[number - 1].plans[row["level"] - 1]
        assert len(plan.explain().table()) > 0


def test_page_has_every_graph(step: fxckpt.StepPlan, tmp_path: Path) -> None:
    """The page has the data of each graph, with one plan a level, and the model's name."""
    from fxckpt.reports.html import step_data

    text = step.to_html(tmp_path / "step.html").read_text()
    assert "<title>Two</title>" in text
    data = step_data(step)
    assert [len(g["plans"]) for g in data["graphs"]] == [len(g.plans) for g in step.graphs]
    for graph, drawn in zip(step.graphs, data["graphs"], strict=True):
        shown = drawn["plans"][drawn["chosen"]]["title"]
        assert shown.startswith(f"level {step.level_of(graph.number) + 1} of {len(graph.plans)}")
    assert data["step"]["budget"] == step.budget_bytes
