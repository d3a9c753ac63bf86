"""Verification collects after each step: what the whole run froze stays frozen around it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def thawed() -> Iterator[None]:
    """Let `verify` freeze all objects for itself, which it leaves where somebody else did."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()
