"""Plans as JSON: each field under its name, with the version of the form and a checksum."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace
from typing import Any

from fxckpt.errors import InvalidPlan
from fxckpt.plans.types import Offload, Plan, Recompute, RegionBudget, Row, Tiling
from fxckpt.reason import Decision, Reason

FORM = "fxckpt plan 1"
"""Name and version of the JSON form."""


def dump(plan: Plan, *, indent: int | None = None) -> str:
    """Return a plan as JSON text."""
    # The snapshot of the graph only serves reports, and is many times larger than the decisions.
    figures = {
        name: value
        for name, value in asdict(replace(plan, snapshot=None)).items()
        if name != "snapshot"
    }
    return json.dumps({"form": FORM, "checksum": _checksum(figures), **figures}, indent=indent)


def load(text: str) -> Plan:
    """Return the plan of a JSON text.

    Raises :class:`InvalidPlan` for a text of another form, or one that was changed.
    """
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidPlan(
            f"the text is not JSON: {error}. Give what plan.to_json() returned."
        ) from error
    found = data.get("form") if isinstance(data, dict) else None
    if found != FORM:
        raise InvalidPlan(
            f"the text is of form {found!r}, this version of fxckpt reads {FORM!r}. "
            "Plan again, or read it with the version that wrote it."
        )
    try:
        written = data["checksum"]
        figures = {key: value for key, value in data.items() if key not in ("form", "checksum")}
        plan = _plan(figures)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidPlan(
            f"the text has the form {FORM!r}, but not its fields: {type(error).__name__}: {error}."
        ) from error
    if written != (found := _checksum(figures)):
        raise InvalidPlan(
            f"the text was changed since it was written: its figures have the checksum {found}, "
            f"and it says {written}. Plan again, with a policy that says what you want: a plan is "
            "applied as it was made."
        )
    return plan


def _checksum(figures: dict[str, Any]) -> str:
    """Return a hash of the fields."""
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()[:16]


def _plan(data: dict[str, Any]) -> Plan:
    """Return the plan with the fields ``data``."""
    rows = tuple(
        Row(
            **{
                **row,
                "shape": tuple(row["shape"]),
                "decision": Decision(row["decision"]),
                "reason": Reason(row["reason"]),
            }
        )
        for row in data["rows"]
    )
    schedule = tuple(Recompute(**run) for run in data["schedule"])
    regions = tuple(RegionBudget(**region) for region in data.get("regions", ()))
    offloads = tuple(Offload(**offload) for offload in data.get("offloads", ()))
    tiling = data.get("tiling")
    if tiling is not None:
        tiling = Tiling(**{**tiling, "regions": tuple(tiling["regions"])})
    # Fields newer than the version that wrote the text have defaults.
    names = [f.name for f in fields(Plan) if f.name in data and f.name != "snapshot"]
    plain: dict[str, Any] = {
        n: tuple(data[n]) if isinstance(data[n], list) else data[n] for n in names
    }
    if unknown := data.keys() - plain.keys():
        raise ValueError(f"unknown field {min(unknown)!r}")
    read = {"rows": rows, "schedule": schedule, "regions": regions, "offloads": offloads}
    return Plan(**(plain | read | {"tiling": tiling}))
