"""Reports: what they say is what the plan decided, in every form."""

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
from fxckpt.reports.narrate import Narrator
from fxckpt.solver.live_intervals import Holder
from tests.models.zoo import ENTRIES

COST = Roofline(2e11, 1e10, 0.0)
"""A machine that is the same everywhere."""
REPOSITORY = Path(__file__).parent.parent.parent
GPT2 = next(e for e in ENTRIES if e.name == "gpt2")


@pytest.fixture(scope="module")
def curve() -> fxckpt.Frontier:
    model, inputs = GPT2.make()
    return fxckpt.frontier(model.train(), *inputs, points=6, cost=COST)


@pytest.fixture(scope="module")
def plan(curve: fxckpt.Frontier) -> fxckpt.Plan:
    return curve.plans[2]


def test_filters_compose_and_say_what_is_hidden(plan: fxckpt.Plan) -> None:
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


def test_sorts_by_what_is_asked(plan: fxckpt.Plan) -> None:
    seconds = [r.recompute_seconds * max(r.runs, 1) for r in plan.explain().sort("seconds").rows]
    assert seconds == sorted(seconds, reverse=True)
    with pytest.raises(fxckpt.InvalidOption, match="'bytes'"):
        plan.explain().sort("size")
    with pytest.raises(fxckpt.InvalidOption, match="'saved' or 'recomputed'"):
        plan.explain().filter(decision="kept")


def test_groups_add_up(plan: fxckpt.Plan) -> None:
    for table in (plan.explain().by_module(3), plan.explain().by_op(), plan.explain().by_reason()):
        rows = table.records()
        assert sum(r["saved_bytes"] for r in rows) == plan.saved_bytes
        assert sum(r["runs"] for r in rows) == len(plan.schedule)
        assert sum(r["recompute_seconds"] for r in rows) == pytest.approx(plan.recompute_seconds)


def test_the_reason_names_what_would_run_and_what_it_would_free(plan: fxckpt.Plan) -> None:
    words = plan.explain().why("_softmax")
    assert words.startswith("saved: recomputing it needs ") and "attn.softmax" in words
    assert "MFLOP; costs " in words and "to free 144.0 KiB" in words
    for row in plan.rows:
        assert plan.explain().why(row.name).startswith(f"{row.decision.value}: ")
    with pytest.raises(fxckpt.InvalidOption, match="Near it: _softmax"):
        plan.explain().why("softmax")


def test_a_chain_ends_at_what_is_at_hand() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return (((x @ w).exp() @ w).exp() @ w).exp().sum()

    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    plan = fxckpt.plan(step, x, w, cost=COST, budget=1.0)
    reasons = Narrator(plan)
    assert plan.saved == ("exp", "exp_1", "exp_2")
    chain = reasons.chain(reasons.step.storage_index["exp_1"])
    assert [op.name for op in chain.ops] == ["mm_1", "exp_1"]
    assert chain.flops == 2 * 64**3 and chain.no_recompute_op is None
    assert reasons.readers("exp_1") == (("mm_2",), (), ("mm_3", "mul_1"))


def test_states_and_outputs_have_their_own_words(plan: fxckpt.Plan) -> None:
    state = next(row.name for row in plan.rows if row.reason is fxckpt.Reason.RNG_STATE)
    assert "so that its second run draws the same" in plan.explain().why(state)
    assert plan.explain().readers(state).recompute == (state.removesuffix("_rng_state"),)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ x
        return h, (h * h).sum()

    plan = fxckpt.plan(step, torch.randn(64, 64, requires_grad=True))
    assert (
        plan.explain().why("mm")
        == "saved: a forward output, alive anyway; the backward reads it at no cost"
    )


def test_a_difference_lists_what_changes_and_nothing_else(curve: fxckpt.Frontier) -> None:
    tight, loose = curve.plans[0], curve.plans[-1]
    change = tight.diff(loose)
    assert {(b or a).name for b, a in change.rows if (b or a)} >= set(tight.recomputed) - set(
        loose.recomputed
    )
    assert "not needed" in str(change) and f"{len(change.rows)} values" in str(change)
    assert "the same decisions" in str(tight.diff(tight))
    other = fxckpt.plan(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(fxckpt.InvalidOption, match="different graphs"):
        tight.diff(other)


def test_every_form_carries_the_same_rows(plan: fxckpt.Plan) -> None:
    shown = plan.explain().top(5)
    as_json = json.loads(shown.to_json())
    as_csv = list(csv.DictReader(io.StringIO(shown.to_csv())))
    assert (
        [r["name"] for r in as_json] == [r["name"] for r in as_csv] == [r.name for r in shown.rows]
    )
    assert [int(r["bytes"]) for r in as_csv] == [r.bytes for r in shown.rows]
    assert as_json[0]["why"] == shown.why(shown.rows[0].name)
    assert shown.to_markdown().count("| addmm") == sum(r.op == "addmm" for r in shown.rows)
    assert all(row.name in shown._repr_html_() for row in shown.rows)


def test_a_frame(plan: fxckpt.Plan) -> None:
    pandas = pytest.importorskip("pandas")
    frame = plan.explain().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame[frame.decision == "saved"].bytes.sum() == plan.saved_bytes


def test_saved_values_read_like_jaxs(plan: fxckpt.Plan) -> None:
    listed = plan.explain().saved_values()
    assert sum(v.bytes for v in listed.values) == plan.saved_bytes
    lines = str(listed).splitlines()
    assert any(
        "f32[4,4,48,48]" in line and "output of _softmax from modeling_gpt2.py:" in line
        for line in lines
    )
    assert any("from the input primals_" in line for line in lines)


def test_saved_values_of_a_filtered_explanation_are_what_is_left(plan: fxckpt.Plan) -> None:
    shown = plan.explain()
    assert shown.filter(decision="saved").saved_values() == shown.saved_values()
    within = shown.filter(module="*.h.1").saved_values().values
    assert within and all(
        ".h.1" in v.module and v.origin.startswith(("output of", "generator state of"))
        for v in within
    )
    (named,) = shown.filter(name="primals_1").saved_values().values
    assert named.origin == "from the input primals_1"
    assert not shown.filter(decision="recomputed").saved_values().values
    assert len(shown.filter(decision="saved").top(2).saved_values().values) == 2


def test_what_is_no_plan_and_what_is_no_name(plan: fxckpt.Plan) -> None:
    with pytest.raises(
        fxckpt.InvalidOption, match=r"diff\(None\): that is no plan. Give another plan"
    ):
        plan.diff(None)  # type: ignore[arg-type]
    with pytest.raises(fxckpt.InvalidOption, match="3 is not the name of a value"):
        plan.explain().why(3)  # type: ignore[arg-type]


def test_modules_keep_the_names_they_have() -> None:
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


def test_the_timeline_adds_up_and_names_the_peak(plan: fxckpt.Plan) -> None:
    timeline = plan.timeline()
    assert [sum(live) for live in zip(*timeline.stack.values(), strict=True)] == list(plan.profile)
    peak = timeline.at(timeline.peak_tick)
    assert sum(h.bytes for h in peak) == plan.peak_bytes
    assert max(tick.uncheckpointed_bytes for tick in timeline.ticks) == plan.baseline_peak_bytes
    assert {h.name for h in timeline.held if h.holder is Holder.SAVED} == set(
        plan.saved
    ) - _outputs(plan)
    assert "peak " in str(timeline) and timeline.ticks[timeline.peak_tick].name in str(timeline)


def _outputs(plan: fxckpt.Plan) -> set[str]:
    return {row.name for row in plan.rows if row.reason is fxckpt.Reason.OUTPUT}


def test_a_plan_travels_with_its_step(plan: fxckpt.Plan) -> None:
    copied = pickle.loads(pickle.dumps(plan))
    assert copied == plan and copied.step == plan.step
    assert copied.explain().why("_softmax") == plan.explain().why("_softmax")


def test_a_plan_without_its_step_still_reports(plan: fxckpt.Plan) -> None:
    bare = replace(plan, step=None)
    assert bare == plan
    assert str(bare.explain()) == str(plan.explain())
    assert (
        bare.explain().why("_softmax") == "saved: cheaper to save than to recompute at this budget"
    )
    assert json.loads(bare.explain().to_json())
    with pytest.raises(fxckpt.InvalidOption, match="does not carry the graph"):
        bare.timeline()


def test_a_model_of_another_kind_is_explained() -> None:
    entry = next(e for e in ENTRIES if e.name == "unet")
    model, inputs = entry.make()
    plan = fxckpt.plan(model.train(), *inputs, budget=0.9)
    timeline = plan.timeline()
    assert [sum(live) for live in zip(*timeline.stack.values(), strict=True)] == list(plan.profile)
    assert all(
        row.source and row.name in plan.step.by_name
        for row in plan.rows
        if row.reason is not fxckpt.Reason.RNG_STATE
    )
    assert len(plan.explain().table()) == len(plan.rows)


def test_json_leaves_the_step_behind(plan: fxckpt.Plan) -> None:
    text = plan.to_json()
    assert fxckpt.Plan.from_json(text) == plan and '"step"' not in text


def test_rows_are_filtered_by_reason_or_its_words() -> None:
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3))
    )
    explained = fxckpt.plan(model, torch.randn(64, 8), budget=0.8).explain()
    reason = explained.rows[0].reason
    assert explained.filter(reason=reason).rows == explained.filter(reason=reason.value).rows != ()
    with pytest.raises(fxckpt.InvalidOption, match="no such reason"):
        explained.filter(reason="because")


def test_the_readme_looks_inside_a_plan_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    from models import gpt2

    model, inputs = gpt2()
    plan = fxckpt.plan(model, **inputs, budget="924MiB", cost=Roofline(100e12, 1.5e12, 0.0))
    found = re.search(
        r"## Look inside\n.*?```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL
    )
    assert found is not None
    exec(found[1], {"plan": plan, "other_plan": plan})
    asked = re.search(r'why\("(\w+)"\)\n# (.*)', found[1])
    assert asked is not None and plan.explain().why(asked[1]) == asked[2]
