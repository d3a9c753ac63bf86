"""Cost models: rooflines, measured times and their cache."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from pathlib import Path

import pytest
import torch

import fxckpt
from fxckpt.costs import models, roofline
from fxckpt.costs.measured import MeasuredSeconds, Records, cpu_figures
from tests.costs.nodes import node_of

CPU = torch.device("cpu")


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "kept" / "timings.sqlite3")


def count(records: Records) -> int:
    with sqlite3.connect(records.path) as db:
        return int(db.execute("select count(*) from records").fetchone()[0])


def test_cpu_is_calibrated_once(records: Records) -> None:
    """The figures of a CPU are measured once and then read from disk."""
    first = cpu_figures(records)
    assert all(figure > 0 for figure in first)
    assert cpu_figures(Records(records.path)) == first
    assert count(records) == 4


def test_calibration_without_a_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Calibration goes on, with one warning for the folder, if its records cannot be stored."""
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "fxckpt"):
        for name in ("timings.sqlite3", "others.sqlite3"):
            found = cpu_figures(Records(tmp_path / "file" / name))
            assert all(figure > 0 for figure in found)
    assert caplog.text.count("cannot be written") == 1 and "FXCKPT_CACHE_DIR" in caplog.text


def test_calibration_with_a_broken_file(records: Records, caplog: pytest.LogCaptureFixture) -> None:
    """Calibration goes on, with a warning, if its records cannot be read."""
    records.path.parent.mkdir()
    records.path.write_text("no database, but long enough to be taken for one by its first bytes")
    with caplog.at_level(logging.WARNING, "fxckpt"):
        assert all(figure > 0 for figure in cpu_figures(records))
    assert caplog.text.count("cannot be read") == 1


def test_invalid_record_is_replaced(records: Records) -> None:
    """A record that is not positive is ignored and replaced; a valid one stays."""
    records.keep("time", 1.0)
    with sqlite3.connect(records.path) as db:
        db.execute("update records set figure = 0")
    assert records.get("time") is None
    assert records.keep("time", 2.0) == 2.0
    assert records.keep("time", 3.0) == 2.0


def test_op_is_timed_once(records: Records) -> None:
    """An op is timed once and then read from disk."""
    node = node_of(lambda a: a @ a, torch.ones(64, 64))
    first = MeasuredSeconds(records, CPU)(node)
    assert first is not None
    assert first > 0
    assert MeasuredSeconds(Records(records.path), CPU)(node) == first
    assert count(records) == 1


def test_measured_seconds_are_of_one_run(records: Records) -> None:
    """A measured time is the seconds of one run."""
    ticks = itertools.count()
    measured = MeasuredSeconds(records, CPU, clock=lambda: float(next(ticks)))
    # Anything between two reads of this clock takes a second.
    assert measured(node_of(lambda a: a @ a, torch.ones(4, 4))) == 1.0


@torch.library.custom_op("fxckpt_tests::twice_slowly", mutates_args=())
def twice_slowly(a: torch.Tensor) -> torch.Tensor:
    raise AssertionError("an op of unknown effects must not be run to time it")


@twice_slowly.register_fake
def _(a: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a)


def test_custom_op_is_estimated(records: Records) -> None:
    """An op other than torch's own is never run to time it; its time is estimated."""
    node = node_of(lambda a: twice_slowly(a), torch.ones(64))
    model = models.MeasuredCost(MeasuredSeconds(records, CPU), roofline.GENERIC_GPU)
    assert MeasuredSeconds(records, CPU)(node) is None
    assert model.seconds(node) == roofline.GENERIC_GPU.seconds(node)


def test_measuring_preserves_the_generator(records: Records) -> None:
    """Timing an op leaves the random state unchanged."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    MeasuredSeconds(records, CPU)(node_of(lambda a: torch.nn.functional.dropout(a), torch.ones(64)))
    assert torch.equal(torch.get_rng_state(), before)


def test_plan_with_measured_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan with measured times is the same when it is made twice."""
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path))
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4))
    )
    plan = fxckpt.plan(model, torch.ones(256, 32), budget=0.7, cost="measured")
    assert plan.cost == "measured"
    assert 0 < plan.recompute_seconds < plan.step_seconds
    assert fxckpt.plan(model, torch.ones(256, 32), budget=0.7, cost="measured") == plan
