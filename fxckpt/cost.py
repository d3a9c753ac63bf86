"""Cost models: what one run of an op takes.

``roofline``: the greater of arithmetic and memory traffic (Williams, Waterman and Patterson 2009), plus a launch. ``flops``: FLOPs
alone. ``measured``: each distinct op is timed on this machine. One of your own is any object with ``name``, ``seconds(node)`` and ``flops(node)``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fxckpt.errors import InvalidCost, InvalidOption
from fxckpt.passes.kinds import draws, tensors
from fxckpt.registry import Count, registered
from fxckpt.timing import MeasuredSeconds, Records, cpu_figures
from fxckpt.torch_private import size_hint, storage_id


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


def _concrete(value: Any) -> Any:
    """Sizes of a fake value by their hints, so that FLOP formulas see plain ints."""
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    return value


def _shape(value: Any) -> torch.Size:
    return torch.Size(size_hint(n) for n in value.shape)


def _attention_flops(node: fx.Node, *, backward: bool) -> int:
    """FLOPs of CPU flash attention, which torch's registry lacks; same formulas as for the other attention ops there."""
    operands = [arg for arg in node.args[: 4 if backward else 3] if isinstance(arg, fx.Node)]
    shapes = [_shape(arg.meta["val"]) for arg in operands]
    if backward:
        grad, query, key, value = shapes
        return int(sdpa_backward_flop_count(grad, query, key, value))
    return int(sdpa_flop_count(*_repeat_heads(*shapes)))


def _repeat_heads(query: torch.Size, key: torch.Size, value: torch.Size) -> tuple[torch.Size, torch.Size, torch.Size]:
    """Grouped-query attention reads each key head for several query heads."""
    heads = query[1]
    return query, torch.Size((key[0], heads, *key[2:])), torch.Size((value[0], heads, *value[2:]))


def node_flops(node: fx.Node) -> int:
    """Return the FLOPs of one run: torch's own formulas where it has them (a multiply-add counts two), else 0."""
    said = registered(node.target).flops
    if said is not None:
        return _said(node, said)
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is not None:
        return _said(node, partial(formula, out_val=node.meta["val"]))
    name = str(packet)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return _attention_flops(node, backward=False)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention_flops(node, backward=True)
    return 0


def formula_call(node: fx.Node) -> Hashable | None:
    """Return what torch's FLOP formula for a node looks at; None if it has none, or the arguments are not all tensors of known sizes and numbers."""
    if registered(node.target).flops is not None or getattr(node.target, "overloadpacket", None) not in flop_registry:
        return None
    seen: list[Hashable] = [node.target]
    for arg in (*node.args, *node.kwargs.values()):
        value = arg.meta.get("val") if isinstance(arg, fx.Node) else arg
        if isinstance(value, torch.Tensor) and all(type(n) is int for n in value.shape):
            seen.append(value.shape)
        elif value is None or isinstance(value, (bool, int, float)):
            seen.append(value)
        else:
            return None
    return (*seen, *node.kwargs)


def _said(node: fx.Node, count: Count) -> int:
    """Return a count, or a formula's answer for the arguments of ``node``."""
    if not callable(count):
        return count  # type: ignore[return-value]  # checked by Checked
    args = fx.map_arg(node.args, lambda n: _concrete(n.meta.get("val")))
    kwargs = fx.map_arg(node.kwargs, lambda n: _concrete(n.meta.get("val")))
    answer = count(*args, **kwargs)
    return size_hint(answer) if isinstance(answer, torch.SymInt) else answer  # type: ignore[return-value]  # checked by Checked


def node_bytes(node: fx.Node) -> int:
    """Return the bytes one run reads and writes: each storage once, a broadcast one by what it holds. Views move nothing."""
    said = registered(node.target).bytes
    if said is not None:
        return _said(node, said)
    storages: dict[int, int] = {}
    for value in [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]:
        for tensor in tensors(value):
            held, key = size_hint(tensor.untyped_storage().nbytes()), storage_id(tensor)
            count = tensor.numel()
            read = (count if type(count) is int else math.prod(_shape(tensor))) * tensor.element_size()
            storages[key] = max(storages.get(key, 0), min(held, read))
    return sum(storages.values())


def node_draws(node: fx.Node) -> int:
    """Return how many random numbers one run makes: one for each element of what it gives."""
    return max((math.prod(_shape(tensor)) for tensor in tensors(node.meta.get("val"))), default=0) if draws(node) else 0


@dataclass(frozen=True)
class Roofline:
    """max(FLOPs / rate, bytes / bandwidth, random numbers / rate) + launch."""

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    name: str = "roofline"
    draws_per_second: float = math.inf

    def flops(self, node: fx.Node) -> int:
        """FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """Seconds of one run."""
        return self.seconds_of(node, node_flops(node))

    def seconds_of(self, node: fx.Node, flops: int) -> float:
        """Seconds of one run of so many FLOPs."""
        seconds = max(flops / self.flops_per_second, node_bytes(node) / self.bytes_per_second, node_draws(node) / self.draws_per_second)
        return seconds + self.launch_seconds


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


LAUNCH_SECONDS = 2e-6
DEVICES = {
    "H200": Roofline(989e12, 4.8e12, LAUNCH_SECONDS),
    "H100": Roofline(989e12, 3.35e12, LAUNCH_SECONDS),
    "A100": Roofline(312e12, 2.0e12, LAUNCH_SECONDS),
}
"""Dense bf16 rate and memory bandwidth of the vendor's datasheets (SXM; the A100 of 80 GB), by what is in the device's name."""
GENERIC_GPU = Roofline(100e12, 1.5e12, LAUNCH_SECONDS)


def device_roofline(device: torch.device) -> Roofline:
    """Return the roofline of a device: the table's, a generic GPU's for one that is not in it, for a CPU what a second's micro-benchmark found."""
    if device.type == "cpu":
        flops, bandwidth, launch, draws_per_second = cpu_figures(Records.of_machine())
        return Roofline(flops, bandwidth, launch, draws_per_second=draws_per_second)
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        return next((roofline for key, roofline in DEVICES.items() if key in name), GENERIC_GPU)
    return GENERIC_GPU


def resolve(cost: str | CostModel, device: torch.device | None) -> CostModel:
    """Return the cost model for a name or pass an object through. Raises :class:`InvalidOption`."""
    device = device or torch.device("cpu")
    if cost == "roofline":
        return device_roofline(device)
    if cost == "flops":
        return FlopCost()
    if cost == "measured":
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InvalidOption(f"cost='measured' needs the device it plans for, and there is no {device}. Use cost='roofline' here.")
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
    _known_flops: dict[Hashable, int] = field(default_factory=dict, init=False, repr=False, compare=False)
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
