"""The device of these tests: ``FXCKPT_TEST_DEVICE``, else the GPU; without one they are skipped."""

from __future__ import annotations

import pytest
from gpu_device import NoDevice, chosen_device  # tests/conftest.py leads to bench/


@pytest.fixture(scope="session")
def device() -> str:
    try:
        return chosen_device()
    except NoDevice as error:
        pytest.skip(str(error))
