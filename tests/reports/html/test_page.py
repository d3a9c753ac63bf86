"""The HTML page: a single file without network access, with the data of its plans."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import nn

import fxckpt
from fxckpt.reports import html
from tests.reports.html.pages import COST, blocks, embedded, planned


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
        runs = Counter(recompute.name for recompute in plan.schedule)
        assert {name: row[1] for name, row in drawn["rows"].items() if row[1]} == runs


def test_saved_values_may_be_recomputed_later() -> None:
    """A value that is let go of in the backward, and recomputed, has one row that says both."""
    plan = fxckpt.plan(blocks(6), torch.randn(2048, 64), budget=0.3, cost=COST)
    both = set(plan.saved) & {recompute.name for recompute in plan.schedule}
    (drawn,) = html.data([plan])["plans"]
    assert both
    for name in both:
        decision, runs, why = drawn["rows"][name]
        assert (decision, runs) == (0, 1)
        assert why.startswith("saved: ") and "; later recomputed: " in why


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
    assert away.snapshot.model.startswith("lambda at test_page.py:")
