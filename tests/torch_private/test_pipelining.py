"""The order of forwards and backwards that schedules of pipelines have for one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxckpt
from fxckpt.torch_private import calls_of


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """This process is the first of two ranks, of which the other does not exist."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def stage(index: int, of: int) -> PipelineStage:
    return PipelineStage(nn.Linear(4, 4), index, of, torch.device("cpu"))


def shown(schedule: Any) -> str:
    """Return the calls as ``F`` or ``B`` with stage and micro-batch."""
    return " ".join(f"{'B' if back else 'F'}{s}.{m}" for s, m, back in calls_of(schedule))


def test_calls_of_one_stage(first_of_two: None) -> None:
    """GPipe has all forwards first, and 1F1B as few in flight as there are ranks after it."""
    one = stage(0, 2)
    gpipe = ScheduleGPipe(one, 3, loss_fn=torch.sum)
    assert shown(gpipe) == "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"
    assert shown(Schedule1F1B(one, 3, loss_fn=torch.sum)) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert fxckpt.Backend(0.5).follow(gpipe) == 3


def test_calls_of_two_stages(first_of_two: None) -> None:
    """Micro-batches of all stages of a rank are in flight together."""
    both = ScheduleInterleaved1F1B([stage(0, 4), stage(2, 4)], 2, loss_fn=torch.sum)
    assert shown(both) == "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"
    assert fxckpt.Backend(0.5).follow(both) == 4


def test_what_cannot_be_followed(first_of_two: None) -> None:
    """A schedule without a loss, another object, and a budget of graphs are refused."""
    with pytest.raises(fxckpt.InvalidOption, match=r"Linear.* is not a schedule"):
        fxckpt.Backend(0.5).follow(nn.Linear(4, 4))
    with pytest.raises(fxckpt.InvalidOption, match="ScheduleGPipe has no backwards"):
        fxckpt.Backend(0.5).follow(ScheduleGPipe(stage(0, 2), 2))
    with pytest.raises(fxckpt.InvalidOption, match="only a budget of a step depends on"):
        fxckpt.Backend(0.5, scope="graph").follow(ScheduleGPipe(stage(0, 2), 2, loss_fn=torch.sum))
