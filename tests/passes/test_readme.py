"""The order of passes that passes/README.md prints is the pipeline's."""

from __future__ import annotations

import doctest
from pathlib import Path

README = Path(__file__).parent.parent.parent / "passes" / "README.md"


def test_readme_prints_the_pipeline() -> None:
    """Every tuple of passes in the README equals the one in planner/pipeline.py."""
    failed, tried = doctest.testfile(str(README), module_relative=False)
    assert failed == 0 and tried >= 6
