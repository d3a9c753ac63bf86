"""The states of all generators a step may draw from: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def generator_states() -> dict[str, Tensor]:
    """Return the states of torch's default generators, by the device's name."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda:{index}"] = state
    return states


def seed_all(seed: int) -> None:
    """Seed torch's generators, Python's and, where it is loaded, NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.random.seed(seed)


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Give all generators their states back at the end."""
    states, python, numpy = generator_states(), random.getstate(), _numpy()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        for name, state in states.items():
            if name == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, name)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _numpy() -> Any:
    return sys.modules.get("numpy")
