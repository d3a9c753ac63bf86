"""Budgets: what is accepted, what it means in bytes, and what is refused."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.budget import AUTO_MARGIN, Budget, format_bytes, free_bytes, resolve, validate
from fxckpt.errors import BudgetInfeasible, FxckptError, InvalidBudget

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        (None, None),
        (1, 1),
        (123456, 123456),
        (1.0, 1000),
        (0.5, 500),
        ("123456B", 123456),
        ("1500MB", 1_500_000_000),
        ("2GiB", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        (" 2 gib ", 2 * 2**30),
        ("7kB", 7000),
        (".5KiB", 512),
        ("4.35KB", 4350),
        ("9" * 400 + ".5KB", int("9" * 400 + "500")),
    ],
)
def test_a_budget_becomes_bytes(budget: Budget, nbytes: int | None) -> None:
    assert resolve(budget, baseline_peak_bytes=1000, device=CPU) == nbytes


@given(st.integers(min_value=1, max_value=2**60))
def test_bytes_as_text_and_as_int_are_the_same_budget(nbytes: int) -> None:
    assert resolve(f"{nbytes}B", baseline_peak_bytes=1, device=CPU) == resolve(nbytes, baseline_peak_bytes=1, device=CPU) == nbytes


@given(st.floats(min_value=0, max_value=1, exclude_min=True), st.integers(min_value=0, max_value=2**45))
def test_a_fraction_never_asks_for_more_than_the_baseline(fraction: float, baseline: int) -> None:
    nbytes = resolve(fraction, baseline_peak_bytes=baseline, device=CPU)
    assert nbytes is not None
    assert 0 <= nbytes <= baseline


@pytest.mark.parametrize(
    "budget",
    [
        0,
        -1,
        0.0,
        -0.5,
        1.5,
        float("nan"),
        float("inf"),
        float("-inf"),
        True,
        False,
        "",
        "2",
        "GiB",
        "-2GiB",
        "0MB",
        "0.0001B",
        "2 parsecs",
        "1e9B",
        "nanB",
        "half",
        b"2GiB",
        [1],
        torch.tensor(1),
    ],
)
def test_a_budget_that_cannot_be_meant_is_refused_with_an_example(budget: object) -> None:
    with pytest.raises(InvalidBudget) as caught:
        validate(budget)  # type: ignore[arg-type]
    assert f"budget={budget!r}" in str(caught.value)
    assert "Example: budget='2GiB'" in str(caught.value)
    assert isinstance(caught.value, (FxckptError, ValueError))


def test_auto_is_the_available_memory_less_a_margin() -> None:
    validate("AUTO")
    nbytes = resolve("auto", baseline_peak_bytes=1, device=CPU)
    assert nbytes is not None
    # Other processes allocate meanwhile: only the order of size is certain.
    assert nbytes == pytest.approx(free_bytes(CPU) * (1 - AUTO_MARGIN), rel=0.25)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (878_916_403, "838.2 MiB"), (5 * 2**40, "5.0 TiB"), (-2048, "-2.0 KiB")],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_an_infeasible_budget_survives_pickling_with_its_numbers() -> None:
    error = pickle.loads(pickle.dumps(BudgetInfeasible("too small", floor_bytes=7, budget_bytes=5)))
    assert (str(error), error.floor_bytes, error.budget_bytes) == ("too small", 7, 5)
