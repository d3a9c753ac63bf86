"""Draw the pictures of the README and print its example of a reason: ``python notebooks/draw.py``.

Needs the ``test`` dependencies, and Chromium for the page.

The model is GPT-2 (12 layers, d 768, batch 4 x 256, dropout) on a generic GPU's roofline, planned
from shapes alone. The default partitioner is evaluated on the same graph, with the same liveness
and the same costs.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

import matplotlib
from PIL import Image

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 1400
"""Width of the page's picture in pixels."""


def main() -> None:
    """Draw all pictures."""
    matplotlib.use("Agg")
    sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
    from models import gpt2
    from peers import allocates, evaluate, torch_partition

    import fxckpt
    from fxckpt.costs.roofline import Roofline
    from fxckpt.planner.capture import capture_joint
    from fxckpt.planner.pipeline import prepare
    from fxckpt.planner.planner import Planner
    from fxckpt.policies import block_boundaries
    from fxckpt.reports.tradeoff import Frontier, Peer

    cost = Roofline(100e12, 1.5e12, 0.0)
    model, inputs = gpt2()
    joint = capture_joint(model, (), inputs)
    prepare(joint)
    planner = Planner(None, None, cost, measure_workspace=False)
    curve = Frontier(planner.frontier(joint, points=16))
    step = sum(cost.seconds(node) for node in joint.module.graph.nodes if allocates(node))
    peers = []
    for budget in (1.0, 0.7, 0.5, 0.3, 0.1):
        forward, backward = torch_partition(
            joint.module, budget, num_fwd_outputs=joint.num_fwd_outputs
        )
        figures = evaluate(forward, backward, cost, num_fwd_outputs=joint.num_fwd_outputs)
        share = figures.seconds / step - 1
        peers.append(Peer(f"torch budget {budget:g}", figures.peak_bytes, share))
    by_block = fxckpt.plan(
        model, **inputs, policy=block_boundaries("model.transformer.h.*"), cost=cost
    )
    peers.append(
        Peer(
            "checkpoint every block",
            by_block.peak_bytes,
            by_block.slowdown,
        )
    )
    chosen = next(plan for plan in curve.plans if plan.peak_bytes > 0.45 * plan.baseline_peak_bytes)
    why = chosen.explain().why("_softmax_7")
    print(f"inside {chosen.budget_bytes / 2**20:.0f} MiB, _softmax_7 is {why}")
    FOLDER.mkdir(exist_ok=True)
    save(chosen.plot_memory().figure, "memory.png")
    save(curve.plot(chosen=chosen, peers=peers).figure, "frontier.png")
    with tempfile.TemporaryDirectory() as folder:
        page = curve.to_html(Path(folder) / "page.html", chosen=chosen, title="GPT-2, 12 layers")
        take_screenshot(page)


def save(figure: object, name: str) -> None:
    """Save a figure with 128 colours, at a third of the bytes without visible loss."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)  # type: ignore[attr-defined]
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        FOLDER / name, optimize=True
    )


def take_screenshot(page: Path) -> None:
    """Save a picture of the page with one value selected."""
    from playwright.sync_api import sync_playwright

    path = next(
        (
            p
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (p := shutil.which(name))
        ),
        None,
    )
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": 860})
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready=yes]")
        tab.evaluate("() => fxpage.go(fxpage.model.position.get('_softmax_7'))")
        tab.evaluate("() => { fxpage.graph.cy.zoom(0.9); }")
        tab.evaluate("() => { fxpage.graph.cy.center(fxpage.graph.cy.nodes('.chosen')); }")
        tab.wait_for_timeout(1500)
        drawn = tab.screenshot()
        browser.close()
    Image.open(io.BytesIO(drawn)).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        FOLDER / "page.png", optimize=True
    )


if __name__ == "__main__":
    main()
