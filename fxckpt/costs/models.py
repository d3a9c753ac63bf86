"""Cost models: what one run of an op takes.

``roofline``: the greater of arithmetic and memory traffic (Williams, Waterman and Patterson 2009), plus a launch. ``flops``: FLOPs
alone. ``measured``: each distinct op is timed on this machine. One of your own is any object with ``name``, ``seconds(node)`` and ``flops(node)``.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from fxckpt.costs.measured import MeasuredSeconds, Records
from fxckpt.costs.op_counts import formula_call, node_flops
from fxckpt.costs.roofline import Roofline, device_roofline
from fxckpt.errors import InvalidCost, InvalidOption


@runtime_checkable
class CostModel(Protocol):
    """Seconds and FLOPs of one run of a node; ``node.meta["val"]`` and its inputs' give shapes and dtypes."""

    @property
    def name(self) -> str:
        """Shown in reports."""
        ...

    def seconds(self, node: fx.Node) -> float:
        """Seconds of one run; finite and not negative."""
        ...

    def flops(self, node: fx.Node) -> int:
        """FLOPs of one run."""
        ...


@dataclass(frozen=True)
class FlopCost:
    """FLOPs alone, as seconds of a machine that does 1e12 a second; what has none is free."""

    name: str = "flops"

    def flops(self, node: fx.Node) -> int:
        """FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """FLOPs of one run / 1e12."""
        return self.seconds_of(node, node_flops(node))

    def seconds_of(self, node: fx.Node, flops: int) -> float:
        """FLOPs / 1e12."""
        return flops / 1e12


@dataclass(frozen=True, eq=False)
class MeasuredCost:
    """What each distinct op takes on this machine; what cannot be run on its own is estimated."""

    measured: MeasuredSeconds
    estimate: Roofline
    name: str = "measured"

    def flops(self, node: fx.Node) -> int:
        """FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """Seconds of one run."""
        seconds = self.measured(node)
        return self.estimate.seconds(node) if seconds is None else seconds


def resolve(cost: str | CostModel, device: torch.device | None) -> CostModel:
    """Return the cost model for a name or pass an object through. Raises :class:`InvalidOption`."""
    device = device or torch.device("cpu")
    if cost == "roofline":
        return device_roofline(device)
    if cost == "flops":
        return FlopCost()
    if cost == "measured":
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InvalidOption(
                f"cost='measured' needs the device it plans for, and there is no {device}. Use cost='roofline' here."
            )
        return MeasuredCost(MeasuredSeconds(Records.of_machine(), device), device_roofline(device))
    if isinstance(cost, (str, type)) or not isinstance(cost, CostModel):
        raise InvalidOption(
            f"cost={cost!r} is not a cost model. Use 'roofline', 'flops', 'measured', or an object with name, seconds(node) and flops(node). "
            "Example: fxckpt.Backend(cost='flops')."
        )
    return cost


LEAST_SECONDS, MOST_SECONDS = 1e-30, 1e12

MOST_FLOPS = 10**18
"""Beyond these, sums and ratios of costs would overflow."""


@dataclass(frozen=True)
class Checked:
    """A cost model whose every answer is checked. Raises :class:`InvalidCost`."""

    model: CostModel
    _known_flops: dict[Hashable, int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What torch's formulas said: layers are alike."""

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.model.name

    def seconds(self, node: fx.Node) -> float:
        """The model's seconds, finite and not negative; what is less than any op can take is free."""
        seconds = float(self._check(node, "seconds", self._seconds, MOST_SECONDS))
        return seconds if seconds >= LEAST_SECONDS else 0.0

    def flops(self, node: fx.Node) -> int:
        """The model's FLOPs, finite and not negative."""
        return int(self._check(node, "flops", self._flops, MOST_FLOPS))

    def _seconds(self, node: fx.Node) -> float:
        model = self.model
        # Not isinstance: one derived from them may say something else.
        if type(model) is Roofline or type(model) is FlopCost:
            return model.seconds_of(node, self._flops(node))
        return model.seconds(node)

    def _flops(self, node: fx.Node) -> int:
        call = formula_call(node) if type(self.model) in (Roofline, FlopCost) else None
        if call is None:
            return self.model.flops(node)
        if call not in self._known_flops:
            self._known_flops[call] = self.model.flops(node)
        return self._known_flops[call]

    def _check(self, node: fx.Node, what: str, ask: Callable[[fx.Node], Any], most: float) -> Any:
        try:
            answer = ask(node)
        except Exception as error:
            raise InvalidCost(
                f"cost model {self.model.name!r} (or a formula given to register_op) raised {type(error).__name__} for {what} of node "
                f"{node.name!r} ({node.target}): {error}\nIts tensors are fake: shapes and dtypes without values."
            ) from error
        # Not math.isfinite: an int may be too large for a float.
        if not isinstance(answer, numbers.Real) or not 0 <= answer <= most:  # type: ignore[operator]  # numbers.Real orders
            raise InvalidCost(
                f"cost model {self.model.name!r} says {what}={answer!r} for node {node.name!r} ({node.target}). "
                f"It must be a number from 0 to {most:g}; return 0 for what is free. To keep an op from running again, use a policy."
            )
        return answer


def checked(model: CostModel) -> Checked:
    """Return ``model`` with every answer checked."""
    return Checked(model)
