"""Layout and colours of the page, in a real browser."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import fxckpt
from tests.reports.html.pages import planned


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 1000, 600, 420])
def test_header_fits(viewed: fxckpt.Frontier, opened: Any, tmp_path: Path, width: int) -> None:
    """The header fits the window with a long title."""
    tab = opened(
        viewed.to_html(
            tmp_path / "page.html", title="a title that is longer than the page is wide " * 4
        )
    )
    tab.set_viewport_size({"width": width, "height": 900})
    assert tab.evaluate("() => document.documentElement.scrollWidth") == width
    for part in ("#slider", "#plan-title", "#search"):
        box = tab.locator(part).bounding_box()
        assert box["width"] > 50 and box["x"] + box["width"] <= width
    assert tab.evaluate(
        "() => { const e = document.getElementById('plan-title'); "
        "return e.scrollWidth === e.clientWidth; }"
    )


@pytest.mark.browser
@pytest.mark.parametrize("offload", [None, fxckpt.tiers.Host("1GiB", 1e9)], ids=["stays", "sends"])
def test_key_has_every_colour(opened: Any, tmp_path: Path, offload: Any) -> None:
    """The key names each colour that the graph and the timeline draw."""
    tab = opened(planned(offload).to_html(tmp_path / "page.html", points=0))
    assert tab.evaluate("() => fxpage.model.sends") == (offload is not None)
    shown = tab.inner_html("#panel .key >> nth=0") + tab.inner_html("#panel .key >> nth=1")
    drawn = tab.evaluate(
        """() => [
            ...fxpage.model.shownStates.map((s) => s.color),
            ...fxpage.model.holders.map((h) => h.color),
            ...Object.values(fx.COLORS),
        ]"""
    )
    assert [color for color in drawn if color not in shown] == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 420])
def test_first_sight_can_be_read(
    curve: fxckpt.Frontier, opened: Any, tmp_path: Path, width: int
) -> None:
    """The graph opens at a size that can be read, with the loss in sight."""
    path = curve.to_html(tmp_path / "page.html")
    tab = opened(path)
    tab.set_viewport_size({"width": width, "height": 900})
    tab.reload()
    tab.wait_for_selector("body[data-ready=yes]")
    assert tab.evaluate("() => fxpage.graph.cy.zoom() >= fx.READABLE")
    foot, height = tab.evaluate(
        """() => {
            const { cy } = fxpage.graph, box = cy.elements().renderedBoundingBox();
            return [box.y2, cy.height()];
        }"""
    )
    assert 0 < foot <= height + 1


@pytest.mark.browser
def test_narrow_page_is_one_column(curve: fxckpt.Frontier, opened: Any, tmp_path: Path) -> None:
    """A narrow page has the graph, the panel and the timeline below each other."""
    tab = opened(curve.to_html(tmp_path / "page.html"))
    tab.set_viewport_size({"width": 420, "height": 900})
    parts = ("#graph-box", "#panel", "#timeline-box")
    boxes = [tab.locator(part).bounding_box() for part in parts]
    assert all(box["x"] == 0 and box["width"] == 420 for box in boxes)
    assert all(a["y"] + a["height"] <= b["y"] + 1 for a, b in itertools.pairwise(boxes))
