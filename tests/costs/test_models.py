"""Cost models: what is measured is measured once, and what a user's model says is checked."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from pathlib import Path

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import fxckpt
from fxckpt.costs import models, roofline
from fxckpt.costs.isolated_op import IsolatedOp
from fxckpt.costs.measured import MeasuredSeconds, Records, cpu_figures

CPU = torch.device("cpu")


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "kept" / "timings.sqlite3")


def node_of(function: object, *inputs: torch.Tensor) -> fx.Node:
    """The last op of a traced function."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return next(n for n in reversed(graph.nodes) if n.op == "call_function")


def count(records: Records) -> int:
    with sqlite3.connect(records.path) as db:
        return int(db.execute("select count(*) from records").fetchone()[0])


def test_a_cpu_is_calibrated_once(records: Records) -> None:
    first = cpu_figures(records)
    assert all(figure > 0 for figure in first)
    assert cpu_figures(Records(records.path)) == first
    assert count(records) == 4


def test_calibration_goes_on_without_a_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "fxckpt"):
        assert all(
            figure > 0 for figure in cpu_figures(Records(tmp_path / "file" / "timings.sqlite3"))
        )
    assert "FXCKPT_CACHE_DIR" in caplog.text


def test_calibration_goes_on_with_a_broken_file(
    records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    records.path.parent.mkdir()
    records.path.write_text("no database, but long enough to be taken for one by its first bytes")
    with caplog.at_level(logging.WARNING, "fxckpt"):
        assert all(figure > 0 for figure in cpu_figures(records))
    assert "cannot be read" in caplog.text


def test_a_figure_that_cannot_be_is_measured_again(records: Records) -> None:
    records.keep("time", 1.0)
    with sqlite3.connect(records.path) as db:
        db.execute("update records set figure = 0")
    assert records.get("time") is None
    assert records.keep("time", 2.0) == 2.0
    assert records.keep("time", 3.0) == 2.0


def test_a_draw_takes_what_the_generator_takes() -> None:
    slow = roofline.Roofline(1e12, 1e12, 0.0, draws_per_second=1e3)
    assert slow.seconds(node_of(lambda a: torch.rand_like(a), torch.ones(100))) == 0.1
    assert slow.seconds(node_of(lambda a: a + a, torch.ones(100))) < 0.1


def test_the_gpu_table_is_ordered_as_the_devices_are() -> None:
    rates = [roofline.DEVICES[name].bytes_per_second for name in ("H200", "H100", "A100")]
    assert rates == sorted(rates, reverse=True)
    assert roofline.device_roofline(torch.device("cuda")) in (
        *roofline.DEVICES.values(),
        roofline.GENERIC_GPU,
    )


def test_an_op_is_timed_once_and_then_read(records: Records) -> None:
    node = node_of(lambda a: a @ a, torch.ones(64, 64))
    first = MeasuredSeconds(records, CPU)(node)
    assert first is not None
    assert first > 0
    assert MeasuredSeconds(Records(records.path), CPU)(node) == first
    assert count(records) == 1


def test_a_figure_is_the_seconds_of_one_run(records: Records) -> None:
    ticks = itertools.count()
    measured = MeasuredSeconds(records, CPU, clock=lambda: float(next(ticks)))
    assert (
        measured(node_of(lambda a: a @ a, torch.ones(4, 4))) == 1.0
    )  # whatever runs between two looks at this clock takes a second


@torch.library.custom_op("fxckpt_tests::twice_slowly", mutates_args=())
def twice_slowly(a: torch.Tensor) -> torch.Tensor:
    raise AssertionError("nobody knows what else it does: it must not be run for its time")


@twice_slowly.register_fake
def _(a: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a)


def test_what_is_not_torchs_own_is_estimated(records: Records) -> None:
    node = node_of(lambda a: twice_slowly(a), torch.ones(64))
    model = models.MeasuredCost(MeasuredSeconds(records, CPU), roofline.GENERIC_GPU)
    assert MeasuredSeconds(records, CPU)(node) is None
    assert model.seconds(node) == roofline.GENERIC_GPU.seconds(node)


def test_kernels_with_buffers_of_their_own_are_not_tried_on_made_up_ones() -> None:
    graph = fx.Graph()
    assert IsolatedOp.of(graph.call_function(torch.ops.aten.mkldnn_rnn_layer.default)) is None
    assert IsolatedOp.of(graph.call_function(torch.ops.aten._cudnn_rnn.default)) is None


def test_measuring_leaves_the_generator_alone(records: Records) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    MeasuredSeconds(records, CPU)(node_of(lambda a: torch.nn.functional.dropout(a), torch.ones(64)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_is_planned_with_measured_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path))
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4))
    )
    plan = fxckpt.plan(model, torch.ones(256, 32), budget=0.7, cost="measured")
    assert plan.cost == "measured"
    assert 0 < plan.recompute_seconds < plan.step_seconds
    assert fxckpt.plan(model, torch.ones(256, 32), budget=0.7, cost="measured") == plan
