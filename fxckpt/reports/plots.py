"""Pictures of plans, drawn by matplotlib (``pip install fxckpt[plot]``). Each function returns the axes it drew on.

Colours are of the Okabe-Ito palette, which people who see red and green alike tell apart; hatches and dashes tell the parts apart in grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fxckpt.budget import format_bytes
from fxckpt.errors import InvalidOption
from fxckpt.plans.types import Plan
from fxckpt.solver.live_intervals import Holder
from fxckpt.utils.units import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fxckpt.reports.tradeoff import Frontier


@dataclass(frozen=True)
class Look:
    """How one part is drawn."""

    color: str
    hatch: str
    label: str


LOOKS: Mapping[Holder, Look] = {
    Holder.SAVED: Look("#0072b2", "", "saved"),
    Holder.OUTPUT: Look("#56b4e9", "", "outputs"),
    Holder.RECOMPUTED: Look("#e69f00", "////", "recomputed"),
    Holder.GRADIENT: Look("#c9d0d6", "", "gradients"),
    Holder.TEMPORARY: Look("#aab2b9", "....", "temporaries"),
}
"""From dark to light in grey, in the order in which they are stacked."""

INK = "#2b3036"

LEAST_SHARE = 0.002
"""Parts that are never as much of the peak as this are left out: nobody would see them."""

AS_IT_IS: Mapping[str, Any] = {"parse_math": False}
"""How words are written that are the user's own: a dollar in them begins no formula."""


def memory(plan: Plan, ax: Axes | None = None, *, over: str = "ops") -> Axes:
    """Draw what holds the memory at every op: stacked parts, the budget, and the uncheckpointed profile behind.

    ``over`` is ``"ops"``, one unit an op, or ``"time"``, by the plan's cost model. Raises :class:`fxckpt.InvalidOption` for any other.
    """
    timeline = plan.timeline()
    if over not in ("ops", "time"):
        raise InvalidOption(f"over={over!r}: the timeline is drawn over 'ops' or 'time'.")
    axes = ax if ax is not None else _new((9.0, 4.2))
    ends = list(
        accumulate(
            [1.0 if over == "ops" else tick.seconds * 1e3 for tick in timeline.ticks], initial=0.0
        )
    )
    unit, factor = _unit(max(plan.peak_bytes, plan.baseline_peak_bytes))

    def steps(values: Sequence[int]) -> list[float]:
        return [v / factor for v in values] + [values[-1] / factor] if values else [0.0]

    without = steps([tick.uncheckpointed_bytes for tick in timeline.ticks])
    axes.fill_between(
        ends,
        without,
        step="post",
        facecolor="#f6efe2",
        edgecolor="#b08d57",
        linewidth=0.8,
        label="uncheckpointed",
        zorder=0,
    )
    below = [0.0] * len(ends)
    for holder, look in LOOKS.items():
        live = timeline.stack[holder]
        if max(live, default=0) < LEAST_SHARE * plan.peak_bytes or not any(live):
            continue
        top = [a + b for a, b in zip(below, steps(live), strict=True)]
        axes.fill_between(
            ends,
            below,
            top,
            step="post",
            facecolor=look.color,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0.0,
            label=look.label,
            zorder=2,
        )
        below = top
    axes.step(ends, below, where="post", color=INK, linewidth=0.9, zorder=3)
    if plan.budget_bytes is not None:
        axes.axhline(
            plan.budget_bytes / factor,
            color="#d55e00",
            linestyle="--",
            linewidth=1.4,
            label="budget",
            zorder=4,
        )
    split = ends[timeline.forward_ticks]
    axes.axvline(split, color=INK, linewidth=0.8, linestyle=":", zorder=4)
    axes.set_xlim(0, ends[-1] or 1.0)
    axes.set_ylim(0, 1.12 * max([*without, *below, 1e-9]))
    for text, at, side in (("forward ", split, "right"), (" backward", split, "left")):
        axes.text(
            at,
            0.985,
            text,
            ha=side,
            va="top",
            fontsize=9,
            color=INK,
            transform=axes.get_xaxis_transform(),
            zorder=5,
        )
    axes.set_xlabel(
        "ops of the step, in order" if over == "ops" else f"time, ms (cost model: {plan.cost})",
        **AS_IT_IS,
    )
    axes.set_ylabel(f"live memory, {unit}")
    axes.set_title(_title(plan), fontsize=10, loc="left")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, fontsize=8, loc="upper right", framealpha=0.9)
    return axes


def frontier(
    curve: Frontier,
    ax: Axes | None = None,
    *,
    chosen: Plan | None = None,
    peers: Sequence[Peer] = (),
) -> Axes:
    """Draw recompute time over peak with the lower bounds; ``chosen`` is marked, ``peers`` stand beside the curve."""
    axes = ax if ax is not None else _new((7.0, 4.4))
    step = curve.plans[0].step_seconds or 1.0
    unit, factor = _unit(max(p.peak_bytes for p in curve.rows))
    peaks = [p.peak_bytes / factor for p in curve.rows]
    shares = [100 * p.share for p in curve.rows]
    bounds = [100 * p.lower_bound_seconds / step for p in curve.rows]
    budgets = [p.budget_bytes / factor for p in curve.rows]
    axes.axvspan(
        0,
        curve.plans[0].floor_bound_bytes / factor,
        color="#e9ecef",
        zorder=0,
        label="no plan is in here",
    )
    axes.fill_between(budgets, bounds, color="#e9ecef", zorder=0)
    axes.plot(
        budgets,
        bounds,
        color="#6b747c",
        linestyle="--",
        linewidth=1.2,
        label="least possible time",
        zorder=2,
    )
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
        share = 100 * chosen.recompute_seconds / step
        where = (chosen.peak_bytes / factor, share)
        axes.plot(
            *where,
            marker="*",
            markersize=15,
            color="#d55e00",
            markeredgecolor="white",
            linestyle="none",
            label="this plan",
            zorder=5,
        )
        text = f"{format_bytes(chosen.peak_bytes)}, {share:+.1f} %"
        axes.annotate(
            text,
            where,
            xytext=(-7, -13),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=INK,
        )
    for peer, marker in zip(peers, "sX^vDPhp<>" * (1 + len(peers) // 10), strict=False):
        at = (peer.peak_bytes / factor, 100 * peer.share)
        axes.plot(
            *at,
            marker=marker,
            color="#55575b",
            markersize=7,
            linestyle="none",
            label=peer.name,
            zorder=4,
        )
    rightmost = max([*peaks, *(p.peak_bytes / factor for p in peers)])
    leftmost = min([*peaks, *(p.peak_bytes / factor for p in peers)])
    axes.set_xlim(
        max(0.0, leftmost - 0.12 * (rightmost - leftmost) - 0.02 * rightmost),
        rightmost + 0.05 * (rightmost - leftmost),
    )
    axes.set_ylim(0, 1.12 * max([*shares, *(100 * p.share for p in peers), 0.5]))
    axes.set_xlabel(f"peak of one forward and backward, {unit}")
    axes.set_ylabel("extra time, % of the step")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for label in axes.legend(fontsize=8, loc="upper right", framealpha=0.9).get_texts():
        label.set(**AS_IT_IS)
    return axes


def modules(
    plan: Plan, ax: Axes | None = None, *, depth: int | None = None, most: int = 16
) -> Axes:
    """Draw saved and recomputed bytes by module as bars: the ``most`` largest ones, in the order of the model.

    ``depth`` cuts paths to so many parts.
    """
    table = plan.explain().by_module(depth).records()
    largest = table[:most]
    rest = table[most:]
    named = plan.step.labels if plan.step is not None else plan.rows
    order = {
        name: i
        for i, name in enumerate(dict.fromkeys(_cut(label.module, depth) for label in named))
    }
    rows = sorted(largest, key=lambda r: order.get(r["module"], len(order)))
    if rest:
        rows.append(
            {
                "module": f"{len(rest)} smaller",
                **{k: sum(r[k] for r in rest) for k in ("saved_bytes", "recomputed_bytes")},
            }
        )
    axes = ax if ax is not None else _new((7.5, 0.9 + 0.27 * max(3, len(rows))))
    unit, factor = _unit(max([r["saved_bytes"] + r["recomputed_bytes"] for r in rows] or [1]))
    places = range(len(rows))
    saved = [r["saved_bytes"] / factor for r in rows]
    again = [r["recomputed_bytes"] / factor for r in rows]
    for values, left, holder in ((saved, None, Holder.SAVED), (again, saved, Holder.RECOMPUTED)):
        look = LOOKS[holder]
        axes.barh(
            places,
            values,
            left=left,
            color=look.color,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0.0,
            label=look.label,
        )
    axes.set_yticks(list(places), [shorten(r["module"], 42) for r in rows], fontsize=8, **AS_IT_IS)
    axes.invert_yaxis()
    axes.set_xlabel(f"bytes of the values that the backward needs, {unit}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
    return axes


def _cut(module: str, depth: int | None) -> str:
    return ".".join(module.split(".")[:depth]) or "(model)"


def _title(plan: Plan) -> str:
    share = plan.recompute_seconds / plan.step_seconds if plan.step_seconds else 0.0
    return f"peak {format_bytes(plan.peak_bytes)} instead of {format_bytes(plan.baseline_peak_bytes)}, {share:+.1%} time"


def _unit(most: int) -> tuple[str, int]:
    return next(
        (
            (name, size)
            for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
            if most >= size
        ),
        ("bytes", 1),
    )


def _new(size: tuple[float, float]) -> Any:
    from matplotlib import pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


@dataclass(frozen=True)
class Peer:
    """Another way to train the same step, to be drawn beside a frontier."""

    name: str
    peak_bytes: int
    share: float
    """Extra time over the time of the uncheckpointed step."""
