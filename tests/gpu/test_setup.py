"""The environment over a machine's own torch, for ``make gpu``."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

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
    asked = ["scipy", "setuptools>=77,<82", "pytest>=999", "no-such-package"]
    assert gpu_setup.missing(asked) == ["pytest>=999", "no-such-package"]
