"""The HTML page: a single file without network access, tried in a real browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.costs.roofline import Roofline
from fxckpt.planner.build_plan import build_plan
from fxckpt.plans.snapshot import GraphSnapshot, NodeKind, NodeLabel
from fxckpt.reports import html
from fxckpt.solver.exact.lower_bounds import Bound
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import save_all
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.simulate import simulate

COST = Roofline(2e11, 1e10, 0.0)


@pytest.fixture(scope="module")
def curve() -> fxckpt.Frontier:
    blocks = (
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
        for _ in range(4)
    )
    return fxckpt.frontier(nn.Sequential(*blocks), torch.randn(2048, 64), points=5, cost=COST)


def embedded(text: str) -> dict[str, Any]:
    packed = re.search(r'<script id="data"[^>]*>([^<]*)</script>', text)
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found


def test_page_is_self_contained(curve: fxckpt.Frontier, tmp_path: Path) -> None:
    """The page embeds its data, scripts and styles, and loads nothing."""
    path = curve.to_html(tmp_path / "page.html", chosen=curve.plans[1], title="<b>")
    text = path.read_text()
    assert "<title>&lt;b&gt;</title>" in text and "<!--" not in re.sub(
        r"<script>.*?</script>", "", text, flags=re.S
    )
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=", text)
    assert "default-src 'none'" in text
    data = embedded(text)
    assert data["chosen"] == 1 and len(data["plans"]) == 5
    assert len(data["nodes"]["name"]) == len(curve.plans[0].snapshot.labels)


def test_data_adds_up_to_profile(curve: fxckpt.Frontier) -> None:
    """The live intervals on the page add up to the profile of the plan."""
    data = html.data(curve.plans)
    for plan, drawn in zip(curve.plans, data["plans"], strict=True):
        held, live = drawn["held"], [0] * len(plan.profile)
        for storage, first, more, nbytes in zip(
            held["storage"], held["first"], held["last"], held["bytes"], strict=True
        ):
            for at in range(first, first + more + 1):
                live[at] += nbytes if storage < 0 else data["nodes"]["storage_bytes"][storage]
        assert live == list(plan.profile)
        assert {name for name, row in drawn["rows"].items() if row[0] == 0} == set(plan.saved)


def planned(offload: fxckpt.tiers.Host | None) -> fxckpt.Plan:
    """A plan within half the bytes."""
    layers = (m for _ in range(4) for m in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    model, x = nn.Sequential(*layers), torch.randn(512, 64)
    return fxckpt.plan(model, x, budget=0.5, cost=COST, offload=offload)


def test_values_sent_away_are_told_apart() -> None:
    """The page has the values that are sent away, and the bytes that are away at every op."""
    plan = planned(fxckpt.tiers.Host("1GiB", 1e9))
    (drawn,) = html.data([plan])["plans"]
    sent = {offload.name for offload in plan.offloads}
    assert sent and {name for name, row in drawn["rows"].items() if row[0] == 2} == sent
    assert max(drawn["away"]) == plan.away_bytes and len(drawn["away"]) == len(plan.profile)
    assert drawn["away"][0] == drawn["away"][-1] == 0
    (drawn,) = html.data([planned(None)])["plans"]
    assert drawn["away"] == []


def test_one_plan_and_mixed_graphs(curve: fxckpt.Frontier, tmp_path: Path) -> None:
    """A page of one plan has no others; plans of different graphs are refused."""
    path = curve.plans[1].to_html(tmp_path / "one.html", points=0)
    assert len(embedded(path.read_text())["plans"]) == 1
    other = fxckpt.plan(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(fxckpt.InvalidOption, match="different graphs"):
        html.render([curve.plans[0], other])


def test_page_is_deterministic(curve: fxckpt.Frontier) -> None:
    """Equal plans give equal pages."""
    assert html.render(curve.plans) == html.render(curve.plans)


def test_vendored_libraries_match_checksums() -> None:
    """The vendored libraries have the recorded checksums."""
    folder = resources.files("fxckpt.reports").joinpath("web", "vendor")
    listed = dict(
        reversed(line.split()) for line in folder.joinpath("SHA256SUMS").read_text().splitlines()
    )  # type: ignore[misc]
    assert {name for name in html.SCRIPTS + html.STYLES if name.startswith("vendor/")} == {
        f"vendor/{name}" for name in listed
    }
    for name, digest in listed.items():
        assert hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest() == digest


def test_sources_keep_to_100_columns() -> None:
    """Scripts and styles of the page are as narrow as the rest of the code."""
    folder = resources.files("fxckpt.reports").joinpath("web")
    own = [name for name in html.SCRIPTS + html.STYLES if not name.startswith("vendor/")]
    assert len(own) > 3
    for name in own:
        lines = folder.joinpath(name).read_text().splitlines()
        assert max(map(len, lines)) <= 100, name


def chain(length: int) -> fxckpt.Plan:
    """Return a plan that saves everything, of a chain of ops and their gradients."""
    half = length // 2
    ops = tuple(
        Op(f"f{i}", Side.FORWARD, 1e-6, 1, (i - 1,) if i else (), (i,)) for i in range(half)
    )
    backward = tuple(
        Op(
            f"b{j}",
            Side.BACKWARD,
            1e-6,
            1,
            (half - 1 - j, *((half + j - 1,) if j else ())),
            (half + j,),
        )
        for j in range(half)
    )
    storages = (
        *(Storage(f"f{i}", 1024, i) for i in range(half)),
        *(Storage(f"b{j}", 1024, IN_BACKWARD) for j in range(half)),
    )
    program = Program(
        ops, (*backward, Op("output", Side.BACKWARD, 0.0, 0, (2 * half - 1,), ())), storages, ()
    )

    def label(at: int) -> NodeLabel:
        is_backward = at >= half
        layer = (at if not is_backward else 2 * half - 1 - at) * 100 // half
        inputs = (at - 1,) if 0 < at != half else (half - 1,) if at else ()
        name = f"b{at - half}" if is_backward else f"f{at}"
        return NodeLabel(
            name,
            NodeKind.OP,
            "aten.mm",
            f"model.layers.{layer}.mlp",
            "model.py:1",
            (16, 16),
            "float32",
            inputs,
            (at,),
            is_backward,
            False,
        )

    snapshot = GraphSnapshot(program, tuple(label(at) for at in range(2 * half)))
    candidate = Candidate(save_all(program), simulate(program, save_all(program)))
    found = SearchResult(None, candidate, candidate, candidate, Bound(0.0, 0.0), Bound(0.0, 0.0), 0)
    return build_plan(snapshot, found, candidate, budget_bytes=None, cost="none")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api",
        reason="the page is tried in a browser, which takes playwright (pip install playwright)",
    )
    path = next(
        (
            p
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (p := shutil.which(name))
        ),
        None,
    )
    with playwright.sync_playwright() as started:
        if path is None and not Path(started.chromium.executable_path).exists():
            pytest.skip(
                "the page is tried in a browser, and there is no Chromium: "
                "install the package chromium"
            )
        launched = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Open a page offline; a message on its console or a request fails the test."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, offline=True)
    complaints: list[str] = []

    def show(path: Path) -> Any:
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("file:", "data:", "blob:"))
                else complaints.append(request.url)
            ),
        )
        tab.goto(path.as_uri())
        tab.wait_for_selector("body[data-ready=yes]")
        return tab

    yield show
    context.close()
    assert complaints == []


NODE = "fxpage.graph.cy.getElementById('n' + fxpage.model.position.get(name))"
"""JavaScript for the drawn node of a name."""
ON_SCREEN = (
    "const box = document.getElementById('graph').getBoundingClientRect(); "
    "return [p.x + box.left, p.y + box.top];"
)
"""JavaScript for the coordinates in the window of a point of the graph."""


def press(tab: Any, name: str, *, times: int = 1) -> None:
    """Click a node where it is drawn."""
    tab.evaluate("name => fxpage.go(fxpage.model.position.get(name))", name)
    tab.evaluate("() => fxpage.select(null)")
    place = tab.evaluate(f"name => {{ const p = {NODE}.renderedPosition(); {ON_SCREEN} }}", name)
    tab.mouse.click(*place, click_count=times)


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


class Viewed(nn.Module):
    """A model whose inputs are read through views, in a step that recomputes some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict(
            {
                f"head[{k}]": nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
                for k in range(3)
            }
        )

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for head in self.heads.values():
            x = head(x * scale.unsqueeze(0).expand(512, 64))
        return x.sum()


@pytest.fixture(scope="module")
def viewed() -> fxckpt.Frontier:
    return fxckpt.frontier(Viewed(), torch.randn(512, 64), torch.randn(64), points=4, cost=COST)


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


def test_page_names_model_device_and_costs(curve: fxckpt.Frontier, tmp_path: Path) -> None:
    """The page is titled after the model, and names the device and the cost model."""
    text = curve.to_html(tmp_path / "page.html").read_text()
    assert "<title>Sequential</title>" in text
    assert embedded(text)["about"] == [
        ["model", "Sequential"],
        ["device", "cpu"],
        ["cost model", curve.plans[0].cost],
    ]
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        away = fxckpt.plan(lambda x: layers(x).sum(), torch.empty(2, 8), device="B200")
    assert away.snapshot.device == "B200"
    assert away.snapshot.model.startswith("lambda at test_html.py:")
