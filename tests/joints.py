"""Joint graphs as the planner gets them, captured without compiling or running anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from fxckpt.passes.graphs import Joint
from fxckpt.planner.pipeline import PREPARE, PREPARE_INDUCTOR, prepare
from fxckpt.torch_private import capture_whole, trace_joint
from fxckpt.torch_private.inductor.options import CustomPartitionerFn


def normalize(module: fx.GraphModule, *, for_inductor: bool = False) -> None:
    """Rewrite a joint graph as it is before planning."""
    prepare(Joint(module, 0), PREPARE_INDUCTOR[:-1] if for_inductor else PREPARE)


class Captured(Exception):
    """Leaves the compile."""


class Capture(CustomPartitionerFn):
    """Keeps the joint graph that Inductor would have partitioned."""

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **given: Any
    ) -> Any:
        self.found = joint, num_fwd_outputs
        raise Captured

    def uuid(self) -> str:
        return "capture"


def inductor_joint(model: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, int]:
    """Return the joint graph after Inductor's joint passes, and its number of forward outputs."""
    capture = Capture()
    compiled = torch.compile(
        model,
        backend=lambda gm, given: compile_fx(
            gm, given, config_patches={"custom_partitioner_fn": capture}
        ),
    )
    try:
        compiled(*inputs)
    except Exception as error:
        if "Captured" not in repr(error):
            raise
    return capture.found


def plain_joint(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, int]:
    """The joint graph of a function of tensors, as AOTAutograd traces it."""
    found: list[tuple[fx.GraphModule, int]] = []
    capture_whole(
        function,
        inputs,
        {},
        lambda gm, given: trace_joint(gm, given, lambda joint, count: found.append((joint, count))),
    )
    return found[0]
