"""Every test starts from the same seed and an empty compile cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
