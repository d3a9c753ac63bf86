"""Clicks, searches and sliders of the page, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.plans.snapshot import NodeKind
from fxckpt.reports import html
from tests.reports.html.pages import NODE, ON_SCREEN, chain, press


@pytest.mark.browser
def test_click_shows_reason_and_readers(
    curve: fxckpt.Frontier, opened: Any, tmp_path: Path
) -> None:
    """A click on a node shows its reason and its readers."""
    plan = curve.plans[1]
    tab = opened(curve.to_html(tmp_path / "page.html", chosen=plan))
    assert "uncheckpointed peak" in tab.inner_text("#panel")
    for name in (next(n for n in plan.saved if not n.endswith("_rng_state")), plan.recomputed[0]):
        press(tab, name)
        panel = tab.inner_text("#panel")
        assert plan.explain().why(name) in panel
        readers = plan.explain().readers(name)
        assert all(
            reader in panel for reader in (*readers.backward, *readers.forward, *readers.recompute)
        )


@pytest.mark.browser
def test_slider_changes_colours_and_figures(
    curve: fxckpt.Frontier, opened: Any, tmp_path: Path
) -> None:
    """The slider changes the colours, the title and the reasons."""
    tight, loose = curve.plans[0], curve.plans[-1]
    name = next(n for n in tight.recomputed if n in loose.saved)
    tab = opened(curve.to_html(tmp_path / "page.html", chosen=tight))
    tab.evaluate("name => fxpage.go(fxpage.model.position.get(name))", name)
    color = f"name => {NODE}.style('background-color')"
    before, title = tab.evaluate(color, name), tab.inner_text("#plan-title")
    tab.focus("#slider")
    tab.keyboard.press("End")
    assert tab.evaluate(color, name) != before
    assert tab.inner_text("#plan-title") != title
    assert loose.explain().why(name) in tab.inner_text("#panel")


class Broken(nn.Module):
    """Two graphs, with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).sum()


@pytest.mark.browser
def test_step_shows_one_graph_at_a_time(opened: Any, tmp_path: Path) -> None:
    """The page of a step has its table, and a selector and links that change the graph."""
    step = fxckpt.plan_step(Broken(), torch.randn(512, 64), budget=0.8)
    tab = opened(step.to_html(tmp_path / "step.html"))
    panel = tab.inner_text("#panel")
    assert all(text in panel for _, text in step.lines())
    assert tab.locator("#panel .moments rect").count() > 0
    assert tab.evaluate("() => fxpage.model.text('module', fxpage.model.count - 1)") == "first.0"
    for choose in (
        lambda: tab.select_option("#graphs", "2"),
        lambda: tab.click("#panel [data-graph='1']"),
    ):
        with tab.expect_navigation(wait_until="load"):
            choose()
        tab.wait_for_selector("body[data-ready=yes]")
    level = step.level_of(1)
    assert tab.inner_text("#plan-title").startswith(f"level {level + 1} of ")
    assert tab.url.endswith(f"#graph=1&level={level + 1}")


@pytest.mark.browser
def test_search_unfolds_matches(curve: fxckpt.Frontier, opened: Any, tmp_path: Path) -> None:
    """A search unfolds the module of its match and selects the node."""
    name = curve.plans[1].recomputed[-1]
    tab = opened(curve.to_html(tmp_path / "page.html", chosen=curve.plans[1]))
    tab.click("#fold")
    tab.fill("#search", name)
    tab.keyboard.press("Enter")
    assert tab.inner_text("#panel h2") == name
    assert tab.evaluate(f"name => {NODE}.length", name) == 1
    tab.fill("#search", "nothing has this name")
    assert "nothing has that name" in tab.inner_text("#found")


@pytest.mark.browser
def test_timeline_shows_live_values(curve: fxckpt.Frontier, opened: Any, tmp_path: Path) -> None:
    """A click on the timeline lists live values; a value shows its intervals."""
    plan = curve.plans[1]
    tab = opened(curve.to_html(tmp_path / "page.html", chosen=plan))
    box = tab.locator("#timeline .u-over").bounding_box()
    at = 0.6
    tab.mouse.click(box["x"] + at * box["width"], box["y"] + box["height"] / 2)
    timeline = plan.timeline()
    tick = int(at * len(timeline.ticks))
    panel = tab.inner_text("#panel")
    assert timeline.ticks[tick].name in panel and timeline.at(tick)[0].name in panel
    name = next(n for n in plan.saved if not n.endswith("_rng_state"))
    tab.evaluate("name => fxpage.go(fxpage.model.position.get(name))", name)
    bands = tab.evaluate("() => fxpage.timeline.bands")
    assert [h.first for h in timeline.held if h.name == name] == [first for first, _ in bands]


@pytest.mark.browser
def test_double_click_unfolds_module(curve: fxckpt.Frontier, opened: Any, tmp_path: Path) -> None:
    """A double click unfolds a module, and its panel folds it."""
    tab = opened(curve.to_html(tmp_path / "page.html", chosen=curve.plans[1]))
    tab.click("#fold")
    shown = "() => fxpage.tree.visible().length"
    before = tab.evaluate(shown)
    place = tab.evaluate(
        f"() => {{ const p = fxpage.graph.cy.nodes('.folded')[0].renderedPosition(); {ON_SCREEN} }}"
    )
    tab.mouse.dblclick(*place)
    assert tab.evaluate(shown) > before
    tab.click("#panel [data-toggle]")
    assert tab.evaluate(shown) == before


@pytest.mark.browser
def test_large_graph_stays_folded(opened: Any, tmp_path: Path) -> None:
    """A graph of 20,000 nodes opens folded, and draws few nodes when unfolded."""
    tab = opened(html.write([chain(20_000)], tmp_path / "large.html"))
    assert tab.evaluate("() => fxpage.model.count") == 20_000
    assert tab.evaluate("() => fxpage.graph.cy.nodes().length") < 200
    tab.fill("#search", "f7321")
    tab.keyboard.press("Enter")
    assert "recomputing it needs" in tab.inner_text("#panel .why")
    for _ in range(3):
        tab.click("#unfold")
    assert tab.evaluate("() => fxpage.graph.cy.nodes().length") < 2000


@pytest.mark.browser
def test_reasons_agree_with_readers(viewed: fxckpt.Frontier, opened: Any, tmp_path: Path) -> None:
    """No reason denies a reader that the page lists."""
    tab = opened(viewed.to_html(tmp_path / "page.html"))
    reasons = """number => Array.from({ length: fxpage.model.count }, (_, i) => {
        const { model } = fxpage, { forward, backward } = model.readers(i);
        const plan = model.plans[number], state = model.states(plan)[i];
        const recomputed = forward.filter(u => plan.rows[model.name(u)]?.[0]);
        return [model.kind(i), model.why(i, plan, state), backward.length, recomputed.length];
    })"""
    views = []
    for number in range(len(viewed.plans)):
        for kind, why, backward, recomputed in tab.evaluate(reasons, number):
            is_denied = "does not need" in why or "does not read" in why or "not needed" in why
            assert not (is_denied and backward), why
            views += (
                [(is_denied, backward + recomputed > 0)]
                if kind == list(NodeKind).index(NodeKind.VIEW) and why.startswith("a view: ")
                else []
            )
    assert {(True, False), (False, True)} == set(views)


@pytest.mark.browser
def test_search_finds_modules_with_brackets(
    viewed: fxckpt.Frontier, opened: Any, tmp_path: Path
) -> None:
    """The search takes brackets in module names literally."""
    tab = opened(viewed.to_html(tmp_path / "page.html"))
    tab.fill("#search", "head[1]")
    assert "heads.head[1].0" in tab.inner_text("#found")
    assert "head[0]" not in tab.inner_text("#found")


@pytest.mark.browser
def test_point_of_frontier_chooses_plan(
    curve: fxckpt.Frontier, opened: Any, tmp_path: Path
) -> None:
    """A click on a point beside the slider shows its plan; one plan has no points."""
    tab = opened(curve.to_html(tmp_path / "page.html", chosen=curve.plans[0]))
    points = tab.locator("#frontier circle")
    assert points.count() == len(curve.plans)
    across = [float(point.get_attribute("cx")) for point in points.all()]
    assert across == sorted(across)
    points.last.click()
    assert tab.input_value("#slider") == str(len(curve.plans) - 1)
    assert points.last.get_attribute("class") == "current"
    alone = opened(curve.plans[0].to_html(tmp_path / "one.html", points=0))
    assert alone.locator("#frontier").is_hidden()
