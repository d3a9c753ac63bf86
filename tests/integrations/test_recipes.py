"""Recipes of the documentation that need no package beyond those of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parent.parent.parent / "docs" / "recipes"


@pytest.mark.parametrize(
    "name",
    ["plain_loop", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("vision", "long_context"))],
)
def test_recipe_trains_the_same_within_its_budget(name: str) -> None:
    """The script compares its losses and its peak by itself."""
    run = subprocess.run(
        [sys.executable, str(RECIPES / f"{name}.py")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "equal losses" in run.stdout
    assert "over the budget" not in run.stderr
