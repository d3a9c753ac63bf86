"""Every test starts from the same seed, an empty compile cache and no records."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# The workers have more threads than there are cores. A thread that spins while it waits takes the
# core from the one that it waits for; OpenMP reads this once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings
from torch.optim.optimizer import _global_optimizer_post_hooks

from fxckpt.inductor import plan_cache
from fxckpt.utils.cache_folder import cache_dir

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from gpu_device import VARIABLE, NoDevice, chosen_device

settings.register_profile("default", deadline=None, max_examples=15, derandomize=True)
settings.register_profile("sweep", deadline=None, max_examples=1000)
settings.load_profile("default")


def pytest_configure() -> None:
    """Refuse a device for the tests that is not there."""
    if os.environ.get(VARIABLE):
        try:
            chosen_device()
        except NoDevice as error:
            raise pytest.UsageError(str(error)) from None


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Leave what is there before a module, a million objects, out of its many collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Timings of this machine are kept where the tests alone read them."""
    folder, compiled = tmp_path_factory.mktemp("records"), cache_dir() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    # What is compiled depends on the machine alone: it is shared with other runs.
    (folder / "native").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXCKPT_CACHE_DIR", str(folder))
        # A defect of the planner must not hide behind torch's own partition.
        patch.setenv("FXCKPT_STRICT", "1")
        yield


@pytest.fixture(autouse=True)
def own_plans(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan of another test, or of an earlier run, is found."""
    folder = tmp_path_factory.mktemp("plans")
    where = plan_cache.cache_folder
    monkeypatch.setattr(plan_cache, "cache_folder", lambda: None if where() is None else folder)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    torch._dynamo.reset()
    # A backend that outlives its test would tell an optimizer of another one that it has no plan.
    _global_optimizer_post_hooks.clear()
    yield
    torch._dynamo.reset()
