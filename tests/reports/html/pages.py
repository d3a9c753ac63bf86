"""Plans of pages, and what a page embeds and draws."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any

import torch
from torch import nn

import fxckpt
from fxckpt.costs.roofline import Roofline
from fxckpt.planner.build_plan import build_plan
from fxckpt.plans.snapshot import GraphSnapshot, NodeKind, NodeLabel
from fxckpt.solver.exact.lower_bounds import Bound
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import save_all
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.simulate import simulate

COST = Roofline(2e11, 1e10, 0.0)


def embedded(text: str) -> dict[str, Any]:
    packed = re.search(r'<script id="data"[^>]*>([^<]*)</script>', text)
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found


def blocks(count: int) -> nn.Module:
    """Return a stack of blocks with dropout."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(count)
        )
    )


def planned(offload: fxckpt.tiers.Host | None) -> fxckpt.Plan:
    """A plan within half the bytes."""
    layers = (m for _ in range(4) for m in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    model, x = nn.Sequential(*layers), torch.randn(512, 64)
    return fxckpt.plan(model, x, budget=0.5, cost=COST, offload=offload)


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
