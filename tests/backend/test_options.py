"""Options of a backend that come by name, and from the environment."""

from __future__ import annotations

import pytest
import torch

import fxckpt
from fxckpt.backend.options import by_environment


def test_environment_gives_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budget and policy come from the environment; what the program gives stays."""
    monkeypatch.setenv("FXCKPT_BUDGET", "0.5")
    monkeypatch.setenv("FXCKPT_POLICY", "save_matmuls")
    found = by_environment({"inner": "aot_eager"})
    policy = fxckpt.policies.save_matmuls
    assert found == {"inner": "aot_eager", "budget": 0.5, "policy": policy}
    assert by_environment({"budget": "1GiB", "policy": None})["budget"] == "1GiB"


def test_bad_budget_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has no such line: the error says where the budget is from."""
    monkeypatch.setenv("FXCKPT_BUDGET", "lots")
    with pytest.raises(fxckpt.InvalidBudget, match=r"FXCKPT_BUDGET in the environment: .*'lots'"):
        by_environment({})


def test_misspelt_variable_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is almost one of fxckpt's says which; others are left alone."""
    monkeypatch.setenv("FXCKPT_BUGDET", "1GiB")
    monkeypatch.setenv("FXCKPT_OTHER", "1")
    with pytest.warns(UserWarning, match="FXCKPT_BUGDET .* Did you mean FXCKPT_BUDGET?") as told:
        assert by_environment({}) == {}
    assert len(told) == 1


def test_what_is_compiled_by_name_has_a_report() -> None:
    """fxckpt.report() is of the backend that was used by name last."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8), torch.nn.GELU()) * 6)
    options = {"budget": 0.9, "inner": "aot_eager"}
    torch.compile(model, backend="fxckpt", options=options)(torch.randn(256, 8)).sum().backward()
    report = fxckpt.report()
    assert report.plans and report.step is not None
