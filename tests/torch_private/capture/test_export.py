"""Input guards of exported programs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxckpt.torch_private import guards_function, guards_module, guards_namespace


def exported_guards() -> torch.nn.Module:
    """Return the guards module of a program with a dynamic batch of at most 8."""
    program = torch.export.export(
        nn.Linear(2, 2), (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim("n", max=8)},)
    )
    return program.module()._guards_fn  # type: ignore[return-value]


def test_the_check_of_an_exported_graph_is_found() -> None:
    """The check behind an export's guards module takes legal inputs and refuses others."""
    check = guards_function(exported_guards())
    assert check is not None
    check(torch.ones(5, 2))
    with pytest.raises(Exception, match="Guard failed"):
        check(torch.ones(9, 2))


def test_other_modules_have_no_check() -> None:
    """A module that is no guards module has none."""
    assert guards_function(nn.Linear(2, 2)) is None


def test_a_guards_module_runs_its_check() -> None:
    """A module made of a check runs it, and gives it back."""
    seen: list[object] = []
    module = guards_module(seen.append)
    module(3)
    assert seen == [3]
    assert guards_function(module) == seen.append


def test_the_namespace_has_what_checks_name() -> None:
    """Checks name builtins, ``math`` and torch's functions on sizes."""
    names = guards_namespace()
    assert eval("math.ceil(3 / 2) + max(1, inf) - inf != 0", dict(names))
