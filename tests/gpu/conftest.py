"""The device of these tests: ``FXCKPT_TEST_DEVICE``, else the GPU; without one they are skipped."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("FXCKPT_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else None)


@pytest.fixture(scope="session")
def device() -> str:
    if DEVICE is None:
        pytest.skip("needs a CUDA device, or FXCKPT_TEST_DEVICE=cpu")
    return DEVICE
