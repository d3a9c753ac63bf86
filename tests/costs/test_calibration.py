"""Calibration: a device's figures are measured, kept and found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxckpt.costs import calibration
from fxckpt.costs.measured import Records
from fxckpt.errors import InvalidOption

CPU = torch.device("cpu")


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "timings.sqlite3")


def test_figures_are_kept(records: Records) -> None:
    """Every figure is positive and found again; a second calibration replaces the first."""
    assert calibration.calibrated(CPU, records) is None
    first = calibration.calibrate(CPU, records, calibration.SMALL)
    assert all(getattr(first, name) > 0 for name in calibration.FIGURES)
    assert calibration.calibrated(CPU, records) == first
    second = calibration.calibrate(CPU, records, calibration.SMALL)
    assert calibration.calibrated(CPU, Records(records.path)) == second != first


def test_rates_are_flops_over_seconds(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks once a reading, each rate is the work of one call."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(calibration, "perf_counter", lambda: float(next(ticks)))
    found = calibration.calibrate(CPU, records, calibration.SMALL)
    assert found.bf16 == found.fp32 == found.tf32 == 2 * 64**3
    assert found.bytes_per_second == 2 * 2**16
    assert found.to_host == found.from_host == 2**16
    assert found.attention_share == 4 * 2 * 64**2 * 128 / found.bf16


def test_settings_stay_as_they_were(records: Records) -> None:
    """torch's precision and the user's generator are left alone."""
    before = torch.backends.cuda.matmul.fp32_precision, torch.get_rng_state()
    calibration.calibrate(CPU, records, calibration.SMALL)
    assert torch.backends.cuda.matmul.fp32_precision == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_unkept_figures_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute is not spent on figures that no file can keep; a file for reading keeps none."""
    (tmp_path / "file").touch()
    (tmp_path / "text.sqlite3").write_text("no database, but long enough to be taken for one")
    monkeypatch.setattr(calibration, "_measure", lambda device, sizes: 1 / 0)
    for path in (tmp_path / "file/timings.sqlite3", tmp_path / "text.sqlite3"):
        with pytest.raises(InvalidOption, match=r"cannot be kept in .*FXCKPT_CACHE_DIR"):
            calibration.calibrate(CPU, Records(path), calibration.SMALL)


def test_no_device_to_calibrate(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the error says how to plan for one all the same."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidOption, match=r"no CUDA device here to calibrate.*--device H100"):
        calibration.calibrate(torch.device("cuda", 0), records)
