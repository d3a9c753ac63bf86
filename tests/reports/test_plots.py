"""Plots: they draw the figures of plans, with units on the axes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.costs.roofline import Roofline

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


@pytest.fixture(scope="module")
def curve() -> fxckpt.Frontier:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    )
    return fxckpt.frontier(model, torch.randn(1024, 64), points=5, cost=Roofline(2e11, 1e10, 0.0))


@pytest.fixture(autouse=True)
def closed() -> object:
    yield
    from matplotlib import pyplot as plt

    plt.close("all")


def labels(axes: object) -> list[str]:
    return axes.get_legend_handles_labels()[1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("over", ["ops", "time"])
def test_memory_plot_has_parts_and_budget(curve: fxckpt.Frontier, over: str) -> None:
    """The plot has the holders, the budget and the uncheckpointed profile, with units."""
    plan = curve.plans[1]
    axes = plan.plot_memory(over=over)
    assert {"saved", "recomputed", "gradients", "budget", "uncheckpointed"} <= set(labels(axes))
    assert "MiB" in axes.get_ylabel() and axes.get_xlabel()
    assert axes.get_ylim()[1] * 2**20 > plan.baseline_peak_bytes
    (line,) = [c for c in axes.lines if c.get_drawstyle() == "steps-post"]
    assert max(line.get_ydata()) == pytest.approx(plan.peak_bytes / 2**20)


def test_memory_plot_shows_what_is_away(curve: fxckpt.Frontier) -> None:
    """What is sent away has a line of its own, in a plan that sends."""
    layers = (m for _ in range(4) for m in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    model = nn.Sequential(*layers)
    host = fxckpt.tiers.Host("1GiB", 1e12)
    plan = fxckpt.plan(model, torch.randn(1024, 64), budget=0.5, offload=host)
    assert plan.away_bytes
    axes = plan.plot_memory()
    (line,) = [c for c in axes.lines if c.get_label() == "sent away"]
    assert "MiB" in axes.get_ylabel()
    assert max(line.get_ydata()) * 2**20 == pytest.approx(plan.away_bytes)
    assert "sent away" not in labels(curve.plans[1].plot_memory())


def test_memory_plot_refuses_unknown_axis(curve: fxckpt.Frontier) -> None:
    """The memory is drawn over ops or time only."""
    with pytest.raises(fxckpt.InvalidOption, match="'ops' or 'time'"):
        curve.plans[0].plot_memory(over="days")


def test_frontier_plot_marks_chosen_and_peers(curve: fxckpt.Frontier) -> None:
    """The plot marks the chosen plan and the peers, and its axes contain them."""
    from fxckpt.reports.plots import Peer

    axes = curve.plot(
        chosen=curve.plans[2], peers=[Peer("by hand", curve.plans[3].peak_bytes, 0.4)]
    )
    assert {"this plan", "by hand", "least possible time"} <= set(labels(axes))
    assert "%" in axes.get_ylabel() and "MiB" in axes.get_xlabel()
    assert axes.get_ylim()[1] > 40


def test_frontier_plot_refuses_other_graphs(curve: fxckpt.Frontier) -> None:
    """The chosen plan has to be a plan of the same graph."""
    with pytest.raises(
        fxckpt.InvalidOption, match=r"plot\(chosen=...\): that plan is of another graph"
    ):
        curve.plot(chosen=fxckpt.plan(nn.Linear(4, 4), torch.randn(2, 4)))
    with pytest.raises(fxckpt.InvalidOption, match="that is no plan"):
        curve.plot(chosen=0)  # type: ignore[arg-type]


def test_dollar_sign_is_no_formula(curve: fxckpt.Frontier) -> None:
    """Dollar signs in names are drawn as they are."""
    from fxckpt.reports.plots import Peer

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict(
                {r"$\bad$": nn.Sequential(nn.Linear(64, 64), nn.Tanh()), "$a$": nn.Softmax(-1)}
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["$a$"](self.parts[r"$\bad$"](x)).square()

    plan = fxckpt.plan(Named(), torch.randn(256, 64), cost=Roofline(2e11, 1e10, 0.0, r"$\bad$"))
    for axes in (
        plan.plot_modules(),
        plan.plot_memory(over="time"),
        curve.plot(peers=[Peer(r"$\bad$", 2**20, 0.1)]),
    ):
        axes.figure.canvas.draw()
        shown = [*axes.get_yticklabels(), axes.xaxis.label, *axes.get_legend().get_texts()]
        assert [text for text in shown if r"$\bad$" in text.get_text()]


def test_module_bars_follow_model_order(curve: fxckpt.Frontier) -> None:
    """The bars are in the order of the model and add up to the saved bytes."""
    _, given = matplotlib.pyplot.subplots()
    axes = curve.plans[1].plot_modules(given, depth=1)
    assert axes is given
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert [n for n in names if n.isdigit()] == ["0", "1", "2", "3"]
    assert sum(bar.get_width() for bar in axes.containers[0]) * 2**20 == pytest.approx(
        curve.plans[1].saved_bytes
    )


def test_frontier_of_plan_contains_it(curve: fxckpt.Frontier) -> None:
    """A plan's own frontier contains the plan."""
    plan = curve.plans[2]
    own = plan.frontier(points=4)
    assert plan in own.plans
    assert [p.peak_bytes for p in own.plans] == sorted(p.peak_bytes for p in own.plans)
    assert all(p.snapshot is plan.snapshot for p in own.plans)
