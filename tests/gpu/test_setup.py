"""The environment over a machine's own torch, for ``make gpu``."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import gpu_setup


def test_environment_sees_the_machines_packages(tmp_path: Path) -> None:
    """Its setuptools is the machine's, not the one that Python before 3.12 puts beside pip."""
    python = gpu_setup.make(tmp_path / "environment")
    names = ("setuptools", "torch", "scipy")
    code = f"import importlib.metadata as m; print(*(m.version(n) for n in {names}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [importlib.metadata.version(name) for name in names]


def test_lacking_and_outdated_packages_are_missing() -> None:
    """A requirement without a version is met by any."""
    asked = ["scipy", "setuptools>=77,<82", "torch>=2.11", "pytest>=999", "no-such-package"]
    assert gpu_setup.missing(asked) == ["pytest>=999", "no-such-package"]
    has = gpu_setup.numbers(importlib.metadata.version("torch"))
    assert gpu_setup.missing([f"torch>={has[0]}.{has[1] + 1}"])


@pytest.mark.parametrize(
    ("version", "said"),
    [("2.10.1+cu128", "has torch 2.10.1+cu128, and fxckpt needs torch>=2.11"), (None, "no torch")],
)
def test_unusable_torch_is_one_line(
    version: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is set up over a torch that fxckpt refuses, or over none."""

    def version_of(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(sys, "argv", ["gpu_setup.py", str(tmp_path / "environment"), "wheels"])
    with pytest.raises(SystemExit, match=re.escape(said)):
        gpu_setup.main()
    assert not [*tmp_path.iterdir()]


def test_missing_wheels_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that neither the machine nor the folder has is named, with what to run."""
    monkeypatch.setattr(gpu_setup, "make", lambda folder: Path(sys.executable))
    wheels = str(tmp_path / "wheels")
    monkeypatch.setattr(sys, "argv", ["gpu_setup.py", str(tmp_path), wheels, "no-such-package"])
    with pytest.raises(SystemExit, match=r"lacks: no-such-package\. Run make gpu-wheels"):
        gpu_setup.main()
