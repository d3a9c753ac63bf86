"""Policies about what comes from other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import fxckpt
from fxckpt.policies import Value, decide_all, gather_again, save_collectives

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE = torch.ops._c10d_functional.all_reduce.default
CAST, SIN = torch.ops.aten._to_copy.default, torch.ops.aten.sin.default
AGAIN, SAVED = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def values(*calls: tuple[Any, tuple[int, ...]]) -> list[Value]:
    return [
        Value(op, shape=(4,), dtype=torch.float32, position=i, reads=reads)
        for i, (op, reads) in enumerate(calls)
    ]


def test_gathers_of_inputs_run_again() -> None:
    """A gather of an input, cast or not, must run again; one of an activation is left open."""
    calls = values((CAST, ()), (GATHER, (0,)), (GATHER, ()), (SIN, ()), (GATHER, (3,)))
    assert decide_all(gather_again, calls) == [None, AGAIN, AGAIN, None, None]


def test_a_graph_without_gathers_is_an_error() -> None:
    """The error says where FSDP2 gathers; one graph of several may lack any."""
    calls = values((SIN, ()))
    with pytest.raises(fxckpt.PolicyMatchesNothing, match="FSDP2"):
        decide_all(gather_again, calls)
    assert decide_all(gather_again.lenient(), calls) == [None]


def test_collectives_are_saved() -> None:
    """Results of all collectives must be saved; the rest is left open."""
    calls = values((SIN, ()), (REDUCE, (0,)), (GATHER, ()))
    assert decide_all(save_collectives, calls) == [None, SAVED, SAVED]
