"""Plots of plans and frontiers with matplotlib (``pip install fxckpt[plot]``).

Each function draws on the given axes, or on new ones, and returns them. Colours are those of the
Okabe-Ito palette, which is safe for red-green colour blindness; hatches and dashes keep the parts
apart in grey.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fxckpt.budgets import format_bytes
from fxckpt.errors import InvalidOption
from fxckpt.plans.types import Plan
from fxckpt.reports.timeline import away_profile
from fxckpt.solver.live_intervals import Holder
from fxckpt.utils.units import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fxckpt.reports.step_plan import StepFrontier
    from fxckpt.reports.timeline import Timeline
    from fxckpt.reports.tradeoff import Frontier


@dataclass(frozen=True)
class HolderStyle:
    """The colour, hatch and legend label of a holder."""

    color: str
    hatch: str
    label: str


HOLDER_STYLES: Mapping[Holder, HolderStyle] = {
    Holder.SAVED: HolderStyle("#0072b2", "", "saved"),
    Holder.OUTPUT: HolderStyle("#56b4e9", "", "outputs"),
    Holder.RECOMPUTED: HolderStyle("#e69f00", "////", "recomputed"),
    Holder.GRADIENT: HolderStyle("#c9d0d6", "", "gradients"),
    Holder.TEMPORARY: HolderStyle("#aab2b9", "....", "temporaries"),
}
"""The style of each holder, in stacking order, which is from dark to light in grey."""

INK, HIGHLIGHT, BOUND_FILL = "#2b3036", "#d55e00", "#e9ecef"
"""Colours of text and outlines, of the budget and the chosen plan, and of infeasible areas."""

AWAY_COLOR = "#009e73"
"""Colour of the bytes that are off the device."""

MIN_SHARE = 0.002
"""Holders whose largest share of the peak is below this are too thin to see and are not drawn."""

PLAIN_TEXT: Mapping[str, Any] = {"parse_math": False}
"""Properties of texts that hold the user's own names: a dollar sign starts no formula."""

PEER_MARKERS = "sX^vDPhp<>"
"""The markers of peers, in turn."""


@dataclass(frozen=True)
class Peer:
    """Another way to train the same step, drawn as a point beside a frontier."""

    name: str
    """The label in the legend."""
    peak_bytes: int
    """Peak of one forward and backward."""
    share: float
    """Extra time divided by the time of the uncheckpointed step."""


def memory(plan: Plan, ax: Axes | None = None, *, over: str = "ops") -> Axes:
    """Draw live memory over the step, stacked by holder, over the uncheckpointed profile.

    ``over`` is ``"ops"``, one unit an op, or ``"time"``, milliseconds by the plan's cost model.
    Raises :class:`fxckpt.InvalidOption` for any other.
    """
    timeline = plan.timeline()
    if over not in ("ops", "time"):
        raise InvalidOption(f"over={over!r}: the timeline is drawn over 'ops' or 'time'.")
    axes = ax if ax is not None else _new_axes((9.0, 4.2))
    widths = [1.0 if over == "ops" else tick.seconds * 1e3 for tick in timeline.ticks]
    edges = list(accumulate(widths, initial=0.0))
    unit, factor = _unit(max(plan.peak_bytes, plan.baseline_peak_bytes))

    uncheckpointed = _steps([tick.uncheckpointed_bytes for tick in timeline.ticks], factor)
    axes.fill_between(
        edges,
        uncheckpointed,
        step="post",
        facecolor="#f6efe2",
        edgecolor="#b08d57",
        linewidth=0.8,
        label="uncheckpointed",
        zorder=0,
    )
    total = _draw_holders(axes, timeline, edges, factor, MIN_SHARE * plan.peak_bytes)
    away = _steps(away_profile(plan), factor) if plan.offloads else []
    if away:
        axes.step(
            edges,
            away,
            where="post",
            color=AWAY_COLOR,
            linewidth=1.6,
            linestyle="-.",
            label="sent away",
            zorder=4,
        )
    if plan.budget_bytes is not None:
        axes.axhline(
            plan.budget_bytes / factor,
            color=HIGHLIGHT,
            linestyle="--",
            linewidth=1.4,
            label="budget",
            zorder=4,
        )
    _draw_phases(axes, edges[timeline.forward_ticks])
    axes.set_xlim(0, edges[-1] or 1.0)
    axes.set_ylim(0, 1.12 * max([*uncheckpointed, *total, *away, 1e-9]))
    axes.set_xlabel(
        "ops of the step, in order" if over == "ops" else f"time, ms (cost model: {plan.cost})",
        **PLAIN_TEXT,
    )
    axes.set_ylabel(f"live memory, {unit}")
    axes.set_title(_title(plan), fontsize=10, loc="left")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, fontsize=8, loc="upper right", framealpha=0.9)
    return axes


def _draw_holders(
    axes: Axes, timeline: Timeline, edges: Sequence[float], factor: int, min_bytes: float
) -> list[float]:
    """Stack the live bytes of the holders, and return the height of the stack at each edge."""
    below = [0.0] * len(edges)
    for holder, style in HOLDER_STYLES.items():
        live = timeline.stack[holder]
        if max(live, default=0) < min_bytes or not any(live):
            continue
        top = [a + b for a, b in zip(below, _steps(live, factor), strict=True)]
        axes.fill_between(
            edges,
            below,
            top,
            step="post",
            facecolor=style.color,
            hatch=style.hatch,
            edgecolor="white",
            linewidth=0.0,
            label=style.label,
            zorder=2,
        )
        below = top
    axes.step(edges, below, where="post", color=INK, linewidth=0.9, zorder=3)
    return below


def _draw_phases(axes: Axes, split: float) -> None:
    """Mark where the forward ends and the backward begins."""
    axes.axvline(split, color=INK, linewidth=0.8, linestyle=":", zorder=4)
    for text, side in (("forward ", "right"), (" backward", "left")):
        axes.text(
            split,
            0.985,
            text,
            ha=side,
            va="top",
            fontsize=9,
            color=INK,
            transform=axes.get_xaxis_transform(),
            zorder=5,
        )


def draw_frontier(
    curve: Frontier | StepFrontier,
    ax: Axes | None = None,
    *,
    chosen: Plan | None = None,
    peers: Sequence[Peer] = (),
) -> Axes:
    """Draw recompute time over peak, with lower bounds, the ``chosen`` plan and the ``peers``."""
    axes = ax if ax is not None else _new_axes((7.0, 4.4))
    unit, factor = _unit(max(p.peak_bytes for p in curve.rows))
    peaks = [p.peak_bytes / factor for p in curve.rows]
    shares = [100 * p.share for p in curve.rows]
    _draw_bounds(axes, curve, factor)
    axes.step(
        peaks,
        shares,
        where="post",
        color="#0072b2",
        marker="o",
        markersize=4,
        linewidth=1.6,
        label="fxckpt",
        zorder=3,
    )
    if chosen is not None:
        _draw_chosen(axes, chosen, curve.plans[0].step_seconds or 1.0, factor)
    markers = PEER_MARKERS * (1 + len(peers) // len(PEER_MARKERS))
    for peer, marker in zip(peers, markers, strict=False):
        axes.plot(
            peer.peak_bytes / factor,
            100 * peer.share,
            marker=marker,
            color="#55575b",
            markersize=7,
            linestyle="none",
            label=peer.name,
            zorder=4,
        )
    all_peaks = [*peaks, *(p.peak_bytes / factor for p in peers)]
    left, right = min(all_peaks), max(all_peaks)
    axes.set_xlim(
        max(0.0, left - 0.12 * (right - left) - 0.02 * right), right + 0.05 * (right - left)
    )
    axes.set_ylim(0, 1.12 * max([*shares, *(100 * p.share for p in peers), 0.5]))
    axes.set_xlabel(f"peak of one forward and backward, {unit}")
    axes.set_ylabel("extra time, % of the step")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for label in axes.legend(fontsize=8, loc="upper right", framealpha=0.9).get_texts():
        label.set(**PLAIN_TEXT)
    return axes


def _draw_bounds(axes: Axes, curve: Frontier | StepFrontier, factor: int) -> None:
    """Shade the peaks and times that no plan reaches."""
    step_seconds = curve.plans[0].step_seconds or 1.0
    budgets = [p.budget_bytes / factor for p in curve.rows]
    bounds = [100 * p.lower_bound_seconds / step_seconds for p in curve.rows]
    axes.axvspan(
        0,
        curve.plans[0].floor_bound_bytes / factor,
        color=BOUND_FILL,
        zorder=0,
        label="no plan is in here",
    )
    axes.fill_between(budgets, bounds, color=BOUND_FILL, zorder=0)
    axes.plot(
        budgets,
        bounds,
        color="#6b747c",
        linestyle="--",
        linewidth=1.2,
        label="least possible time",
        zorder=2,
    )


def _draw_chosen(axes: Axes, plan: Plan, step_seconds: float, factor: int) -> None:
    """Mark a plan with a star and its figures."""
    share = 100 * plan.extra_seconds / step_seconds
    point = (plan.peak_bytes / factor, share)
    axes.plot(
        *point,
        marker="*",
        markersize=15,
        color=HIGHLIGHT,
        markeredgecolor="white",
        linestyle="none",
        label="this plan",
        zorder=5,
    )
    axes.annotate(
        f"{format_bytes(plan.peak_bytes)}, {share:+.1f} %",
        point,
        xytext=(-7, -13),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=INK,
    )


def modules(
    plan: Plan, ax: Axes | None = None, *, depth: int | None = None, most: int = 16
) -> Axes:
    """Draw saved and recomputed bytes by module as bars, in the order of the model.

    ``depth`` truncates module paths to that many components. The ``most`` largest modules have a
    bar each, and the others share one.
    """
    rows = _module_rows(plan, depth, most)
    axes = ax if ax is not None else _new_axes((7.5, 0.9 + 0.27 * max(3, len(rows))))
    unit, factor = _unit(max([r["saved_bytes"] + r["recomputed_bytes"] for r in rows] or [1]))
    positions = range(len(rows))
    saved = [r["saved_bytes"] / factor for r in rows]
    recomputed = [r["recomputed_bytes"] / factor for r in rows]
    for values, left, holder in (
        (saved, None, Holder.SAVED),
        (recomputed, saved, Holder.RECOMPUTED),
    ):
        style = HOLDER_STYLES[holder]
        axes.barh(
            positions,
            values,
            left=left,
            color=style.color,
            hatch=style.hatch,
            edgecolor="white",
            linewidth=0.0,
            label=style.label,
        )
    names = [shorten(r["module"], 42) for r in rows]
    axes.set_yticks(list(positions), names, fontsize=8, **PLAIN_TEXT)
    axes.invert_yaxis()
    axes.set_xlabel(f"bytes of the values that the backward needs, {unit}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
    return axes


def _module_rows(plan: Plan, depth: int | None, most: int) -> list[dict[str, Any]]:
    """Return the totals of the largest modules in the order of the model, then of the others."""
    table = plan.explain().by_module(depth).records()
    labels = plan.snapshot.labels if plan.snapshot is not None else plan.rows
    in_order = dict.fromkeys(_truncate(label.module, depth) for label in labels)
    order = {name: i for i, name in enumerate(in_order)}
    rows = sorted(table[:most], key=lambda r: order.get(r["module"], len(order)))
    if rest := table[most:]:
        totals = {key: sum(r[key] for r in rest) for key in ("saved_bytes", "recomputed_bytes")}
        rows.append({"module": f"{len(rest)} smaller", **totals})
    return rows


def _truncate(module: str, depth: int | None) -> str:
    return ".".join(module.split(".")[:depth]) or "(model)"


def _title(plan: Plan) -> str:
    peaks = f"{format_bytes(plan.peak_bytes)} instead of {format_bytes(plan.baseline_peak_bytes)}"
    return f"peak {peaks}, {plan.slowdown:+.1%} time"


def _steps(values: Sequence[int], factor: int) -> list[float]:
    """Return ``values / factor`` with the last one repeated, for matplotlib's ``step="post"``."""
    return [v / factor for v in values] + [values[-1] / factor] if values else [0.0]


def _unit(most: int) -> tuple[str, int]:
    """Return the largest unit, with its bytes, that ``most`` bytes fill."""
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if most >= size:
            return name, size
    return "bytes", 1


def require_matplotlib() -> None:
    """Raise :class:`InvalidOption` where matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise InvalidOption(
            "a picture needs matplotlib, which is not installed: pip install 'fxckpt[plot]'"
        ) from None


def _new_axes(size: tuple[float, float]) -> Any:
    require_matplotlib()
    from matplotlib import pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]
