"""One step of a side and everything of it that must equal the other side's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxckpt.verification.random_state import generator_states, seed_all
from fxckpt.verification.side import Arguments, CheckedStep

SEED = 0
"""Seed of every step."""
Loss = Callable[[Any], Tensor]
"""A function of a step's result that returns its loss."""


@dataclass
class Observation:
    """Results of a step, and the state that it left."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the result, by their place."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Gradients of parameters and inputs, by name."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers after the step."""
    forward_buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers after the forward."""
    start_numbers: dict[str, float] = field(default_factory=dict)
    """Numbers in Python at the start."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers in Python after the step."""
    generators: dict[str, Tensor] = field(default_factory=dict)
    """States of the generators after the step."""
    forward_generators: dict[str, Tensor] = field(default_factory=dict)
    """States of the generators after the forward."""
    error: Exception | None = None
    """Error that the step raised; None if it ran."""


@dataclass(frozen=True)
class StepRun:
    """How a step is run: its arguments, its loss, and the outputs that have gradients."""

    arguments: Arguments
    loss: Loss | None
    outputs: Collection[str] | None = None
    """Names of the outputs whose gradients are taken where there is no loss; None for all."""

    def forward(
        self, side: CheckedStep, starting: Callable[[Mapping[str, Tensor]], None] = lambda _: None
    ) -> tuple[Any, dict[str, Tensor]]:
        """Reset a side, run its forward, and return the result and the arguments' tensors.

        ``starting`` is called just before the forward, with the arguments' tensors.
        """
        side.reset()
        seed_all(SEED)
        args, kwargs, named = self.arguments.fresh()
        starting(named)
        return side.step(*args, **kwargs), named

    def backward(self, result: Any, starting: Callable[[], None] = lambda: None) -> None:
        """Run the backward of a result: from its loss, or from all its outputs.

        ``starting`` is called once its roots are there.
        """
        roots = self._roots(result)
        starting()
        with torch.no_grad():
            gradients = [_cotangent(root) for root in roots]
        if roots:
            torch.autograd.backward(roots, gradients)

    def _roots(self, result: Any) -> list[Tensor]:
        if self.loss is not None:
            return [self.loss(result)]
        own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        if isinstance(own, Tensor) and own.requires_grad:
            return [own]
        named = named_tensors(result)
        return [
            tensor
            for name, tensor in named.items()
            if tensor.requires_grad and (self.outputs is None or name in self.outputs)
        ]


def named_tensors(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a step's result by their place, such as ``logits`` or ``[0]``."""
    if isinstance(result, Tensor):
        return {"result": result}
    if isinstance(result, Mapping):
        result = dict(result)
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = vars(result)
    leaves, _ = pytree.tree_flatten_with_path(result)
    return {
        pytree.keystr(path).strip("[]'\""): value
        for path, value in leaves
        if isinstance(value, Tensor)
    }


def _cotangent(root: Tensor) -> Tensor:
    """Return the incoming gradient of an output, the same in every run; 1 for a scalar."""
    if root.numel() == 1:
        return torch.ones_like(root)
    drawn = torch.randn(root.shape, generator=torch.Generator().manual_seed(SEED))
    scaled: Tensor = drawn / root.numel() ** 0.5
    return scaled.to(root.device, root.dtype)


def observe(side: CheckedStep, run: StepRun) -> Observation:
    """Run one step of a side and return its results, or the error that it raised."""
    seen = Observation()
    try:
        result, inputs = run.forward(side, lambda _: seen.start_numbers.update(side.numbers()))
        seen.outputs = _copies(named_tensors(result))
        seen.forward_buffers = _copies(side.buffers())
        seen.forward_generators = generator_states()
        run.backward(result)
    except Exception as error:
        # The user's own step raised: that is a finding.
        seen.error = error.with_traceback(None)
        return seen
    seen.gradients = {
        name: None if (grad := tensor.grad) is None else grad.detach().clone()
        for name, tensor in (*side.parameters().items(), *inputs.items())
        if tensor.requires_grad
    }
    seen.buffers = _copies(side.buffers())
    seen.numbers = side.numbers()
    seen.generators = generator_states()
    return seen


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
