"""Targets and their inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxckpt.cli.factory import TargetError, load_attribute, load_target

MODULE = """
import torch

x = torch.ones(2)
tensor = lambda: (torch.sin, x)
arguments = lambda: (torch.add, [x, x])
keywords = lambda: (torch.sin, {"input": x})
both = lambda: (torch.add, (x, x), {"alpha": 2})
wrong = lambda: (torch.sin, 3)
uncalled = lambda: (torch.nn.Linear, x)
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    """The path of a module with factories."""
    path = tmp_path / "targets_of_test.py"
    path.write_text(MODULE)
    return str(path)


@pytest.mark.parametrize(
    ("factory", "args", "kwargs"),
    [("tensor", 1, []), ("arguments", 2, []), ("keywords", 0, ["input"]), ("both", 2, ["alpha"])],
)
def test_inputs(source: str, factory: str, args: int, kwargs: list[str]) -> None:
    """Inputs are a tensor, arguments, keyword arguments, or both."""
    target = load_target(f"{source}:{factory}")
    assert len(target.args) == args and list(target.kwargs) == kwargs
    assert isinstance(target.model(*target.args, **target.kwargs), torch.Tensor)


def test_other_inputs_are_refused(source: str) -> None:
    """Inputs of another type are named in the error."""
    with pytest.raises(TargetError, match="returned inputs that are an int"):
        load_target(f"{source}:wrong")
    with pytest.raises(TargetError, match="returned the class Linear in place of a model"):
        load_target(f"{source}:uncalled")


def test_load_attribute() -> None:
    """An attribute is loaded by the name of its module."""
    assert load_attribute("torch.nn:functional.relu") is torch.nn.functional.relu
