"""Cost models: seconds and FLOPs of one run of an op.

``"roofline"`` takes the greater time of arithmetic and memory traffic (Williams, Waterman and
Patterson 2009, https://doi.org/10.1145/1498765.1498785) plus a launch. ``"flops"`` counts FLOPs
alone. ``"measured"`` times each distinct op on this machine. A custom model is any object with
``name``, ``seconds(node)`` and ``flops(node)``.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from fxckpt.costs.devices import Device
from fxckpt.costs.measured import MeasuredSeconds, Records
from fxckpt.costs.op_counts import formula_call, node_flops
from fxckpt.costs.roofline import DeviceRoofline, Roofline, device_roofline
from fxckpt.errors import InvalidCost, InvalidOption


@runtime_checkable
class CostModel(Protocol):
    """Seconds and FLOPs of one run of a node.

    ``node.meta["val"]`` holds a node's fake result: shapes, dtypes and devices without values. The
    nodes in ``node.all_input_nodes`` hold the same of the inputs. Answers that are not finite, that
    are negative, or that exceed 1e12 seconds or 1e18 FLOPs raise :class:`fxckpt.InvalidCost` when
    the graph is planned.

    >>> class OneMicrosecond:
    ...     name = "one microsecond"
    ...     def seconds(self, node): return 1e-6
    ...     def flops(self, node): return 0
    >>> isinstance(OneMicrosecond(), CostModel)
    True
    """

    @property
    def name(self) -> str:
        """Name shown in reports."""
        ...

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds of one run, finite and not negative."""
        ...

    def flops(self, node: fx.Node) -> int:
        """Return the FLOPs of one run, not negative."""
        ...


FLOP_COST_RATE = 1e12
"""FLOP/s of :class:`FlopCost`; by convention, since it scales all times alike."""


@dataclass(frozen=True)
class FlopCost:
    """Cost model of FLOPs alone, at 1e12 FLOP/s; ops without a FLOP count are free."""

    name: str = "flops"

    def flops(self, node: fx.Node) -> int:
        """Return the FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds of one run, FLOPs / 1e12."""
        return self.seconds_of(node, node_flops(node))

    def seconds_of(self, node: fx.Node, flops: int) -> float:
        """Return the seconds of ``flops`` FLOPs."""
        return flops / FLOP_COST_RATE


@dataclass(frozen=True, eq=False)
class MeasuredCost:
    """Cost model of measured times; an op that cannot run in isolation is estimated."""

    measured: MeasuredSeconds
    estimate: Roofline | DeviceRoofline
    name: str = "measured"

    def flops(self, node: fx.Node) -> int:
        """Return the FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds of one run, measured or estimated."""
        seconds = self.measured(node)
        return self.estimate.seconds(node) if seconds is None else seconds


def resolve(
    cost: str | CostModel,
    device: torch.device | None,
    *,
    named: Device | None = None,
    replays: bool = False,
) -> CostModel:
    """Return the cost model of a name, or ``cost`` itself if it is a model.

    The roofline is that of a ``named`` device, else of ``device``, without launches where a CUDA
    graph ``replays`` the kernels.

    Raises
    ------
    InvalidOption
        ``cost`` is no model, or ``"measured"`` lacks the device to measure on.
    """
    device = device or torch.device("cpu")
    if cost == "roofline":
        model = device_roofline(device) if named is None else DeviceRoofline.of(named)
        return without_launches(model) if replays and device.type == "cuda" else model
    if cost == "flops":
        return FlopCost()
    if cost == "measured":
        if named is not None or (device.type == "cuda" and not torch.cuda.is_available()):
            raise InvalidOption(
                "cost='measured' needs the device it plans for, and that is "
                f"{device if named is None else named.name}, elsewhere. Use cost='roofline' here."
            )
        return MeasuredCost(MeasuredSeconds(Records.of_machine(), device), device_roofline(device))
    if isinstance(cost, (str, type)) or not isinstance(cost, CostModel):
        raise InvalidOption(
            f"cost={cost!r} is not a cost model. Use 'roofline', 'flops', 'measured', or an object "
            "with name, seconds(node) and flops(node). Example: fxckpt.Backend(cost='flops')."
        )
    return cost


def without_launches(model: Roofline | DeviceRoofline) -> Roofline | DeviceRoofline:
    """Return a roofline in which kernels cost no launch."""
    if isinstance(model, Roofline):
        return replace(model, launch_seconds=0.0)
    return replace(model, device=replace(model.device, launch_seconds=0.0))


LEAST_SECONDS = 1e-30
"""Least positive seconds of a run; below it, ratios of costs would overflow."""

MOST_SECONDS = 1e12
"""Most seconds of a run; beyond it, sums and ratios of costs would overflow."""

MOST_FLOPS = 10**18
"""Most FLOPs of a run; beyond it, sums and ratios of costs would overflow."""


COUNTING = (Roofline, DeviceRoofline, FlopCost)
"""Models whose seconds follow from an op's FLOPs, which are counted once for equal calls."""


@dataclass(frozen=True)
class Checked:
    """A cost model whose every answer is checked; a wrong one raises :class:`InvalidCost`."""

    model: CostModel
    _known_flops: dict[Hashable, int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """FLOPs by call of torch's formulas; layers repeat the same calls."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    def seconds(self, node: fx.Node) -> float:
        """Return the model's seconds, finite and not negative; less than 1e-30 counts as 0."""
        seconds = float(self._check(node, "seconds", self._seconds, MOST_SECONDS))
        return seconds if seconds >= LEAST_SECONDS else 0.0

    def flops(self, node: fx.Node) -> int:
        """Return the model's FLOPs, finite and not negative."""
        return int(self._check(node, "flops", self._flops, MOST_FLOPS))

    def _seconds(self, node: fx.Node) -> float:
        model = self.model
        # Not isinstance: a subclass may override seconds().
        if isinstance(model, COUNTING) and type(model) in COUNTING:
            return model.seconds_of(node, self._flops(node))
        return model.seconds(node)

    def _flops(self, node: fx.Node) -> int:
        call = formula_call(node) if type(self.model) in COUNTING else None
        if call is None:
            return self.model.flops(node)
        if call not in self._known_flops:
            self._known_flops[call] = self.model.flops(node)
        return self._known_flops[call]

    def _check(
        self, node: fx.Node, quantity: str, ask: Callable[[fx.Node], Any], most: float
    ) -> Any:
        try:
            answer = ask(node)
        except Exception as error:
            raise InvalidCost(
                f"cost model {self.model.name!r} (or a formula given to register_op) raised "
                f"{type(error).__name__} for {quantity} of node {node.name!r} ({node.target}): "
                f"{error}\nIts tensors are fake: shapes and dtypes without values."
            ) from error
        # Not math.isfinite: an int may be too large for a float.
        is_real = isinstance(answer, numbers.Real)
        if not is_real or not 0 <= answer <= most:
            raise InvalidCost(
                f"cost model {self.model.name!r} says {quantity}={answer!r} for node {node.name!r} "
                f"({node.target}). It must be a number from 0 to {most:g}; return 0 for a free op. "
                "To keep an op from being recomputed, use a policy."
            )
        return answer


def checked(model: CostModel) -> Checked:
    """Return ``model`` with every answer checked, see :class:`Checked`."""
    return Checked(model)
