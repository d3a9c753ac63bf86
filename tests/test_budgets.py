"""Budgets: accepted forms, and errors for the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fxckpt
from fxckpt import budgets

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (1, 1),
        (np.int64(7), 7),
        (1.0, 1000),
        (0.5, 500),
        ("1500MB", 1_500_000_000),
        ("2GiB", 2 * 2**30),
        ("123456B", 123456),
        (" 1.5 gib ", 3 * 2**29),
        ("1kb", 1000),
    ],
)
def test_budget_in_bytes(given: budgets.Budget, expected: int | None) -> None:
    """Every accepted form of a budget has its value in bytes."""
    assert budgets.resolve(given, baseline_peak_bytes=1000, device=CPU) == expected


def test_auto_is_below_the_free_memory() -> None:
    """The budget "auto" is less than the free memory."""
    asked = budgets.resolve("auto", baseline_peak_bytes=1000, device=CPU)
    assert asked is not None and 2**20 < asked < budgets.free_bytes(CPU)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "2",
        "GiB",
        "2 GiBs",
        "-1GB",
        "0B",
        0,
        -5,
        0.0,
        1.5,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        [],
        b"1GB",
    ],
)
def test_invalid_budget_is_refused_with_an_example(wrong: object) -> None:
    """The error for an invalid budget shows the value and an example."""
    with pytest.raises(fxckpt.InvalidBudget, match="Example: budget='2GiB'") as error:
        fxckpt.Backend(budget=wrong)  # type: ignore[arg-type]
    assert repr(wrong) in str(error.value)
