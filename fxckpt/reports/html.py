"""The HTML page of one or more plans: the graph by module, the decisions and the timeline.

One file that needs no network. The graph is embedded once for all plans, as compressed JSON; the
browser lays out and draws the expanded modules, with the libraries in
``fxckpt/reports/web/vendor``. Since no layout happens here, a graph of 20,000 nodes is written in
about a second.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxckpt.budgets import format_bytes
from fxckpt.errors import InvalidOption
from fxckpt.plans.snapshot import GraphSnapshot, NodeKind, NodeLabel
from fxckpt.plans.types import Plan, schedule_of, snapshot_of_plan
from fxckpt.reason import Decision
from fxckpt.reports.explanation import explain
from fxckpt.reports.narrate import Narrator
from fxckpt.reports.plots import HOLDER_STYLES
from fxckpt.reports.timeline import away_profile, uncheckpointed_profile
from fxckpt.solver.live_intervals import NO_STORAGE, Holder, live_intervals, op_runs
from fxckpt.utils.units import format_seconds, format_shape

if TYPE_CHECKING:
    from fxckpt.reports.step_plan import StepPlan

HOLDERS = tuple(Holder)
DECISIONS = (Decision.SAVED, Decision.RECOMPUTED, Decision.OFFLOADED)
"""Decisions, as the page numbers them."""
SCRIPTS = (
    "vendor/cytoscape.min.js",
    "vendor/dagre.min.js",
    "vendor/uPlot.iife.min.js",
    "model.js",
    "tree.js",
    "graph.js",
    "timeline.js",
    "step.js",
    "page.js",
)
STYLES = ("vendor/uPlot.min.css", "page.css")


def write(
    plans: Sequence[Plan], path: str | Path, *, chosen: int = 0, title: str | None = None
) -> Path:
    """Write the page of ``plans``, opened at index ``chosen``, and return its path.

    The title is by default the name of the model.

    Raises :class:`fxckpt.InvalidOption` for plans of different graphs, and for plans that carry no
    graph snapshot.
    """
    return _written(path, render(plans, chosen=chosen, title=title))


def write_step(step: StepPlan, path: str | Path, *, title: str | None = None) -> Path:
    """Write the page of a step, with each of its graphs at every level, and return its path."""
    title = title or snapshot_of_plan(step.graphs[0].plans[0]).model or "fxckpt"
    return _written(path, _page(step_data(step), title))


def _written(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.write_text(text, encoding="utf-8")
    return path


def render(plans: Sequence[Plan], *, chosen: int = 0, title: str | None = None) -> str:
    """Return the page of ``plans``, opened at index ``chosen``, as HTML text."""
    return _page(data(plans, chosen), title or snapshot_of_plan(plans[0]).model or "fxckpt")


def _page(drawn: dict[str, Any], title: str) -> str:
    """Return the page that draws some data, as HTML text."""
    packed = base64.b64encode(
        gzip.compress(json.dumps(drawn, separators=(",", ":")).encode(), 6, mtime=0)
    ).decode()
    template = _asset("page.html")
    parts = {
        "TITLE": html.escape(title),
        "STYLE": "\n".join(map(_asset, STYLES)),
        "SCRIPT": "\n".join(f"<script>\n{_asset(name)}\n</script>" for name in SCRIPTS),
        "DATA": packed,
    }
    for name, part in parts.items():
        template = template.replace(f"<!--{name}-->", part)
    return template


def _asset(name: str) -> str:
    return (
        resources.files("fxckpt.reports")
        .joinpath("web", *name.split("/"))
        .read_text(encoding="utf-8")
    )


def data(plans: Sequence[Plan], chosen: int = 0) -> dict[str, Any]:
    """Return the data that the page draws, as values of JSON.

    Raises :class:`fxckpt.InvalidOption` for plans of different graphs, and for plans that carry no
    graph snapshot.
    """
    snapshot = snapshot_of_plan(plans[0])
    if any(snapshot_of_plan(plan).labels != snapshot.labels for plan in plans):
        raise InvalidOption(
            "these plans are of different graphs; a page shows plans of one, "
            "for example those of a frontier: frontier(...).to_html(path)."
        )
    return {
        "nodes": _node_columns(snapshot),
        "holders": [
            {"name": h.value, "label": HOLDER_STYLES[h].label, "color": HOLDER_STYLES[h].color}
            for h in HOLDERS
        ],
        "about": _about(snapshot, plans[0]),
        "plans": [_plan_data(snapshot, plan) for plan in plans],
        "chosen": chosen,
    }


def step_data(step: StepPlan) -> dict[str, Any]:
    """Return the data of a step's page: its table and moments, and the data of each graph."""
    graphs = []
    for graph in step.graphs:
        # The slider goes from the least memory to the most, levels from the fastest on.
        drawn = data(graph.plans[::-1], len(graph.plans) - 1 - step.level_of(graph.number))
        for number, (each, level) in enumerate(zip(graph.plans, graph.levels, strict=True), 1):
            drawn["plans"][-number]["title"] = (
                f"level {number} of {len(graph.plans)}: holds {format_bytes(level.held_bytes)}, "
                f"peak {format_bytes(each.peak_bytes)}, {each.slowdown:+.1%} time"
            )
        graphs.append(drawn)
    calls = Counter(step.calls)
    return {
        "graphs": graphs,
        "names": [
            f"graph {graph.number}, {graph.source}, {calls[i]} call{'s' if calls[i] > 1 else ''}"
            for i, graph in enumerate(step.graphs)
        ],
        "step": {
            "figures": step.lines(),
            "rows": step.table().records(),
            "budget": step.budget_bytes,
            "moments": step.moments(),
        },
    }


def _about(snapshot: GraphSnapshot, plan: Plan) -> list[tuple[str, str]]:
    """Return what was planned, as (name, text): the model, the device and the cost model."""
    found = (("model", snapshot.model), ("device", snapshot.device), ("cost model", plan.cost))
    return [(name, text) for name, text in found if text]


class _StringTable:
    """Interns strings: each distinct one gets an index."""

    def __init__(self) -> None:
        self.indices: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.indices.setdefault(text, len(self.indices))


def _node_columns(snapshot: GraphSnapshot) -> dict[str, Any]:
    """Return the nodes of the joint graph, one list a column."""
    texts = _StringTable()
    storages = snapshot.program.storages
    position = {label.name: i for i, label in enumerate(snapshot.labels)}
    work = {
        op.name: (op.seconds, op.flops)
        for op in (*snapshot.program.ops, *snapshot.program.backward)
    }

    def own_bytes(label: NodeLabel) -> int:
        own = label.storages if label.kind is not NodeKind.VIEW else ()
        return sum(storages[s].bytes for s in own if snapshot.owners[s] is label)

    return {
        "name": [label.name for label in snapshot.labels],
        "kind": [list(NodeKind).index(label.kind) for label in snapshot.labels],
        "op": [texts(label.op) for label in snapshot.labels],
        "module": [texts(label.module) for label in snapshot.labels],
        "source": [texts(label.source) for label in snapshot.labels],
        "type": [
            texts(format_shape(label.dtype, label.shape) if label.dtype else "")
            for label in snapshot.labels
        ],
        "inputs": [label.inputs for label in snapshot.labels],
        "storages": [label.storages for label in snapshot.labels],
        "backward": [int(label.is_backward) for label in snapshot.labels],
        "bytes": [own_bytes(label) for label in snapshot.labels],
        "seconds": [_round(work.get(label.name, (0.0, 0))[0]) for label in snapshot.labels],
        "flops": [work.get(label.name, (0.0, 0))[1] for label in snapshot.labels],
        "texts": list(texts.indices),
        "kinds": [kind.value for kind in NodeKind],
        "owner": [position[label.name] for label in snapshot.owners],
        "storage_names": snapshot.storage_names,
        "storage_bytes": [storage.bytes for storage in storages],
    }


def _round(seconds: float) -> float:
    """Return ``seconds`` rounded to the three significant digits that the page shows."""
    return float(f"{seconds:.3g}")


def _decisions(plan: Plan) -> dict[str, list[Any]]:
    """Return the decision about each value, its number of recomputes, and why, by name.

    A value that is saved may be let go of in the backward, and recomputed for a later reader.
    """
    narrator, found = Narrator(plan), dict[str, list[Any]]()
    for row in plan.rows:
        why = narrator.why(row)
        if row.name in found:
            decision, _, before = found[row.name]
            found[row.name] = [decision, row.runs, f"{before}; later {why}"]
        else:
            found[row.name] = [DECISIONS.index(row.decision), row.runs, why]
    return found


def _plan_data(snapshot: GraphSnapshot, plan: Plan) -> dict[str, Any]:
    """Return the figures, decisions and live intervals of one plan."""
    program, schedule = snapshot.program, schedule_of(plan)
    order, intervals = op_runs(program, schedule), live_intervals(program, schedule)
    position = {label.name: i for i, label in enumerate(snapshot.labels)}
    budget = (
        "no budget" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
    )
    return {
        "title": f"{budget}: peak {format_bytes(plan.peak_bytes)}, {plan.slowdown:+.1%} time",
        "figures": explain(plan).summary(),
        "budget": plan.budget_bytes,
        "peak": plan.peak_bytes,
        "slowdown": _round(plan.slowdown),
        "seconds": format_seconds(plan.extra_seconds),
        "rows": _decisions(plan),
        "ops": [position.get(m.op.name, -1) for m in order],
        "again": "".join("1" if m.is_recompute else "0" for m in order),
        "forward": plan.forward_ops,
        "profile": plan.profile,
        "uncheckpointed": uncheckpointed_profile(program, order),
        "away": away_profile(plan),
        "held": {
            "storage": [i.storage for i in intervals],
            "holder": [HOLDERS.index(i.holder) for i in intervals],
            "first": [i.first for i in intervals],
            "last": [i.last - i.first for i in intervals],
            "bytes": [i.bytes if i.storage == NO_STORAGE else -1 for i in intervals],
        },
    }
