"""One browser, and the frontiers that its pages show."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from tests.reports.html.pages import COST, blocks


@pytest.fixture(scope="package")
def curve() -> fxckpt.Frontier:
    return fxckpt.frontier(blocks(4), torch.randn(2048, 64), points=5, cost=COST)


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def viewed() -> fxckpt.Frontier:
    return fxckpt.frontier(Viewed(), torch.randn(512, 64), torch.randn(64), points=4, cost=COST)
