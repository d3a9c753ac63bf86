"""Verification collects after each step, and leaves alone what others froze."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def thawed(frozen: None) -> Iterator[None]:
    """Let `verify` freeze all objects for itself."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()
