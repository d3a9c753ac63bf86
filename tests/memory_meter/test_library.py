"""The compiled library: found, made again, or missing with its reason told."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from fxckpt.memory_meter import cpu, library
from fxckpt.utils.cache_folder import cache_dir


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The machine's library, and from now on an empty cache folder."""
    assert library.load_library() is not None
    (found,) = (cache_dir() / "native").glob(f"*{library._key()}.so")
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path))
    return found


def _load() -> object:
    return library.load_library.__wrapped__()


def test_is_compiled_once(monkeypatch: pytest.MonkeyPatch, compiled: Path, tmp_path: Path) -> None:
    copies: list[Path] = []

    def copy(source: Path, target: Path) -> list[str]:
        copies.append(target)
        return ["cp", str(compiled), str(target)]

    monkeypatch.setattr(library, "cpp_command", copy)
    assert _load() is not None and _load() is not None
    assert len(copies) == 1
    assert [path.name for path in (tmp_path / "native").iterdir()] == [compiled.name]


def test_damaged_library_is_made_again(
    monkeypatch: pytest.MonkeyPatch, compiled: Path, tmp_path: Path
) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / compiled.name).write_text("cut short")
    monkeypatch.setattr(library, "cpp_command", lambda _, to: ["cp", str(compiled), str(to)])
    assert _load() is not None
    assert (tmp_path / "native" / compiled.name).read_bytes() == compiled.read_bytes()


def test_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, compiled: Path, tmp_path: Path
) -> None:
    """A cache folder that is a file costs a compile in each process, and nothing else."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(library, "cpp_command", lambda _, to: ["cp", str(compiled), str(to)])
    assert _load() is not None


@pytest.mark.parametrize("compiler", ["none", "broken"])
def test_no_compiler_is_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiled: Path,
    compiler: str,
) -> None:
    def command(source: Path, target: Path) -> list[str]:
        if compiler == "none":
            raise RuntimeError("No working C++ compiler found")
        return ["sh", "-c", "echo headers are missing >&2; exit 1"]

    monkeypatch.setattr(library, "cpp_command", command)
    with caplog.at_level(logging.WARNING, logger="fxckpt"):
        assert _load() is None
    said = {"none": "No working C++ compiler", "broken": "headers are missing"}[compiler]
    assert said in caplog.text and "Install a C++ compiler" in caplog.text


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_compiles_here(compiled: Path, tmp_path: Path) -> None:
    """The source compiles with no warning of the compiler's strictest checks."""
    command = [*library.cpp_command(library.SOURCE, tmp_path / "made.so"), "-Wall", "-Wextra"]
    done = library.subprocess.run(command, capture_output=True, text=True, check=True)
    own = [line for line in done.stderr.splitlines() if library.SOURCE.name in line]
    assert (tmp_path / "made.so").exists() and not own


def test_process_meter_sees_large_blocks() -> None:
    """Without the library, the C library's figure rises and falls with a block of 64 MiB."""
    meter = cpu._process_meter()
    assert meter is not None and not meter.exact and "Not seen" in meter.describes
    watch = meter.watch()
    start = meter.allocated()
    held = bytearray(1 << 26)
    inside = meter.allocated()
    del held
    assert 0.9 < (inside - start) / (1 << 26) < 1.1
    assert meter.allocated() < inside <= watch.peak()
    watch.reset()
    assert watch.peak() < inside
