"""Explanations: their rows are the decisions of the plan, in every format."""

from __future__ import annotations

import csv
import io
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.costs.roofline import Roofline
from tests.models.zoo import ENTRIES

REPOSITORY = Path(__file__).parent.parent.parent


def test_filters_compose(plan: fxckpt.Plan) -> None:
    """Filters apply together, and the text counts the hidden rows."""
    shown = plan.explain()
    attention = shown.filter(decision="recomputed", module="*.attn", op="clone*")
    assert attention.rows and all(
        r.runs > 0 and ".attn" in r.module and r.op == "clone" for r in attention.rows
    )
    assert (
        shown.filter(module="model.transformer.h.1").rows
        == shown.filter(module="model.transformer.h.1*").rows
    )
    assert len(shown.filter(least_bytes=2**15).rows) < len(shown.rows)
    assert f"and {len(plan.rows) - 1} more values" in str(shown.top(1))


def test_sort(plan: fxckpt.Plan) -> None:
    """Rows are sorted by a known key, and other keys are refused."""
    seconds = [r.recompute_seconds * max(r.runs, 1) for r in plan.explain().sort("seconds").rows]
    assert seconds == sorted(seconds, reverse=True)
    with pytest.raises(fxckpt.InvalidOption, match="'bytes'"):
        plan.explain().sort("size")
    with pytest.raises(fxckpt.InvalidOption, match="'saved' or 'recomputed'"):
        plan.explain().filter(decision="kept")


def test_groups_add_up(plan: fxckpt.Plan) -> None:
    """The groups of each table add up to the plan's figures."""
    for table in (plan.explain().by_module(3), plan.explain().by_op(), plan.explain().by_reason()):
        rows = table.records()
        assert sum(r["saved_bytes"] for r in rows) == plan.saved_bytes
        assert sum(r["runs"] for r in rows) == len(plan.schedule)
        assert sum(r["recompute_seconds"] for r in rows) == pytest.approx(plan.recompute_seconds)


def test_all_formats_have_the_same_rows(plan: fxckpt.Plan) -> None:
    """JSON, CSV, Markdown and HTML have the rows of the explanation."""
    shown = plan.explain().top(5)
    as_json = json.loads(shown.to_json())
    as_csv = list(csv.DictReader(io.StringIO(shown.to_csv())))
    assert (
        [r["name"] for r in as_json] == [r["name"] for r in as_csv] == [r.name for r in shown.rows]
    )
    assert [int(r["bytes"]) for r in as_csv] == [r.bytes for r in shown.rows]
    assert as_json[0]["why"] == shown.why(shown.rows[0].name)
    assert shown.to_markdown().count("| addmm ") == sum(r.op == "addmm" for r in shown.rows)
    assert all(row.name in shown._repr_html_() for row in shown.rows)


def test_to_pandas(plan: fxckpt.Plan) -> None:
    """A pandas frame has the rows in bytes."""
    pandas = pytest.importorskip("pandas")
    frame = plan.explain().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame[frame.decision == "saved"].bytes.sum() == plan.saved_bytes


def test_module_names_with_special_characters() -> None:
    """Names with brackets, quotes and bars are reported and matched literally."""
    names = ["a[b]*", "[0]", "it's", "x[1]", "日本|語"]
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)) for name in names})

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([head(x) for head in self.heads.values()]).sum()

    heads = Heads()
    with fxckpt.record_regions() as regions:
        fxckpt.checkpoint(heads, torch.randn(4, 8), policy=fxckpt.policies.save_matmuls)
    for plan in (fxckpt.plan(heads, torch.randn(4, 8)), regions[0].plan):
        assert {row.module for row in plan.rows if row.op == "_softmax"} == {
            f"heads.{name}.1" for name in names
        }
        for name in names:
            assert {row.module for row in plan.explain().filter(module=f"heads.{name}").rows} <= {
                f"heads.{name}.0",
                f"heads.{name}.1",
            }
            assert plan.explain().filter(module=f"heads.{name}").rows
    kept = fxckpt.plan(heads, torch.randn(4, 8), policy=fxckpt.policies.save("heads.x[1]"))
    assert "heads.x[1].1" in {row.module for row in kept.rows if row.reason is fxckpt.Reason.POLICY}


def test_pickled_plan_explains_itself(plan: fxckpt.Plan) -> None:
    """A pickled plan keeps its graph snapshot and its reasons."""
    copied = pickle.loads(pickle.dumps(plan))
    assert copied == plan and copied.snapshot == plan.snapshot
    assert copied.explain().why("_softmax") == plan.explain().why("_softmax")


def test_plan_without_snapshot(plan: fxckpt.Plan) -> None:
    """A plan without a snapshot is explained by rows alone, and has no timeline."""
    bare = replace(plan, snapshot=None)
    assert bare == plan
    assert str(bare.explain()) == str(plan.explain())
    assert (
        bare.explain().why("_softmax_1")
        == "saved: cheaper to save than to recompute at this budget"
    )
    assert json.loads(bare.explain().to_json())
    with pytest.raises(fxckpt.InvalidOption, match="does not carry the graph"):
        bare.timeline()


def test_convolutional_model() -> None:
    """A U-Net is explained with sources, and its timeline adds up."""
    entry = next(e for e in ENTRIES if e.name == "unet")
    model, inputs = entry.make()
    plan = fxckpt.plan(model.train(), *inputs, budget=0.9)
    timeline = plan.timeline()
    assert [sum(live) for live in zip(*timeline.stack.values(), strict=True)] == list(plan.profile)
    assert all(
        row.source and row.name in plan.snapshot.by_name
        for row in plan.rows
        if row.reason is not fxckpt.Reason.RNG_STATE
    )
    assert len(plan.explain().table()) == len(plan.rows)


def test_plan_json_has_no_snapshot(plan: fxckpt.Plan) -> None:
    """The JSON of a plan leaves out the graph snapshot."""
    text = plan.to_json()
    assert fxckpt.Plan.from_json(text) == plan and '"snapshot"' not in text


def test_filter_by_reason() -> None:
    """A reason is given as enum member or as text."""
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3))
    )
    explained = fxckpt.plan(model, torch.randn(64, 8), budget=0.8).explain()
    reason = explained.rows[0].reason
    assert explained.filter(reason=reason).rows == explained.filter(reason=reason.value).rows != ()
    with pytest.raises(fxckpt.InvalidOption, match="no such reason"):
        explained.filter(reason="because")


def test_quoted_reason_is_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason that the documentation quotes is the one that the plan gives."""
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    from models import gpt2

    model, inputs = gpt2()
    plan = fxckpt.plan(model, **inputs, budget="924MiB", cost=Roofline(100e12, 1.5e12, 0.0))
    text = (REPOSITORY / "docs" / "planner.md").read_text()
    found = re.search(r'why\("(\w+)"\)` says:\n\n((?:> .*\n)+)', text)
    assert found is not None
    quoted = " ".join(line.removeprefix("> ") for line in found[2].splitlines())
    assert plan.explain().why(found[1]) == quoted


def test_why_refuses_other_objects(plan: fxckpt.Plan) -> None:
    """The name of a value is a string."""
    with pytest.raises(fxckpt.InvalidOption, match="3 is not the name of a value"):
        plan.explain().why(3)  # type: ignore[arg-type]


def test_printed_plan_is_a_summary() -> None:
    """A printed plan has ten lines of figures at most; its repr has one, with its digest."""
    plan = fxckpt.plan(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.ones(4, 8)
    )
    lines = str(plan).splitlines()
    assert 8 <= len(lines) <= 10 and all(len(line) < 120 for line in lines)
    assert lines[0].split()[0] == "peak" and lines[1].split() == ["budget", "none"]
    assert plan.digest in repr(plan) and len(repr(plan)) < 100
