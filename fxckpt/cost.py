"""Cost models: what one run of an op takes.

``roofline``: the greater of arithmetic and memory traffic (Williams, Waterman and Patterson 2009), plus a launch. ``flops``: FLOPs
alone. A model of your own is any object with ``name``, ``seconds(node)`` and ``flops(node)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fxckpt.errors import InvalidCost, InvalidOption
from fxckpt.passes.facts import tensors
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
    packet = getattr(node.target, "overloadpacket", None)
    name = str(packet)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return _attention_flops(node, backward=False)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention_flops(node, backward=True)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args = fx.map_arg(node.args, lambda n: _concrete(n.meta.get("val")))
    kwargs = fx.map_arg(node.kwargs, lambda n: _concrete(n.meta.get("val")))
    return size_hint(formula(*args, **kwargs, out_val=node.meta["val"]))


def node_bytes(node: fx.Node) -> int:
    """Return the bytes one run reads and writes: each storage once, a broadcast one by what it holds. Views move nothing."""
    storages: dict[int, int] = {}
    for value in [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]:
        for tensor in tensors(value):
            held = size_hint(tensor.untyped_storage().nbytes())
            read = math.prod(_shape(tensor)) * tensor.element_size()
            storages[storage_id(tensor)] = max(storages.get(storage_id(tensor), 0), min(held, read))
    return sum(storages.values())


@dataclass(frozen=True)
class Roofline:
    """max(FLOPs / rate, bytes / bandwidth) + launch."""

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    name: str = "roofline"

    def flops(self, node: fx.Node) -> int:
        """FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """Seconds of one run."""
        return max(node_flops(node) / self.flops_per_second, node_bytes(node) / self.bytes_per_second) + self.launch_seconds


@dataclass(frozen=True)
class FlopCost:
    """FLOPs alone, as seconds of a machine that does 1e12 a second; what has none is free."""

    name: str = "flops"

    def flops(self, node: fx.Node) -> int:
        """FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """FLOPs of one run / 1e12."""
        return node_flops(node) / 1e12


def device_roofline(device: torch.device) -> Roofline:
    """Return the roofline of a device.

    GPU figures: dense bf16 rate and memory bandwidth of the vendor's datasheets (A100 SXM 80 GB: 312 TFLOP/s, 2.0 TB/s; H100 SXM: 989, 3.35;
    H200: 989, 4.8), an unknown GPU counts as 100 TFLOP/s and 1.5 TB/s. CPU: 100 GFLOP/s and 10 GB/s, a guess for two cores: only ratios of
    times matter to a plan.
    """
    if device.type != "cuda":
        return Roofline(100e9, 10e9, 2e-6)
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    for key, flops, bandwidth in (("H200", 989e12, 4.8e12), ("H100", 989e12, 3.35e12), ("A100", 312e12, 2.0e12)):
        if key in name:
            return Roofline(flops, bandwidth, 2e-6)
    return Roofline(100e12, 1.5e12, 2e-6)


def resolve(cost: str | CostModel, device: torch.device | None) -> CostModel:
    """Return the cost model for a name or pass an object through. Raises :class:`InvalidOption`."""
    if cost == "roofline":
        return device_roofline(device or torch.device("cpu"))
    if cost == "flops":
        return FlopCost()
    if isinstance(cost, str) or not isinstance(cost, CostModel):
        raise InvalidOption(
            f"cost={cost!r} is not a cost model. Use 'roofline', 'flops', or an object with name, seconds(node) and flops(node). "
            "Example: fxckpt.Backend(cost='flops')."
        )
    return cost


@dataclass(frozen=True)
class Checked:
    """A cost model whose every answer is checked. Raises :class:`InvalidCost`."""

    model: CostModel

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.model.name

    def seconds(self, node: fx.Node) -> float:
        """The model's seconds, finite and not negative."""
        return float(self._check(node, "seconds", self.model.seconds(node)))

    def flops(self, node: fx.Node) -> int:
        """The model's FLOPs, finite and not negative."""
        return int(self._check(node, "flops", self.model.flops(node)))

    def _check(self, node: fx.Node, what: str, answer: Any) -> Any:
        if not isinstance(answer, (int, float)) or not math.isfinite(answer) or answer < 0:
            raise InvalidCost(
                f"cost model {self.model.name!r} says {what}={answer!r} for node {node.name!r} ({node.target}). "
                "It must be a finite number that is not negative; return 0 for what is free."
            )
        return answer


def checked(model: CostModel) -> Checked:
    """Return ``model`` with every answer checked."""
    return Checked(model)
