"""The device of these tests: ``FXCKPT_TEST_DEVICE``, else the GPU; without one they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

# cuBLAS reads it when its first handle is made; without it torch takes it for nondeterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from gpu_device import NoDevice, chosen_device  # tests/conftest.py leads to bench/


@pytest.fixture(scope="session")
def device() -> str:
    try:
        return chosen_device()
    except NoDevice as error:
        pytest.skip(str(error))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels whose results are the same bits each time; an error where torch has none."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
