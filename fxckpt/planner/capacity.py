"""Capacity: the largest step that fits a memory, found by planning alone.

A step fits where a plan exists within the bytes that its parameters, buffers, inputs and optimizer
state leave. The search doubles the size until no plan exists, then halves the interval: what fits
at a size is taken to fit at every smaller one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fxckpt import budgets
from fxckpt.budgets import AUTO_MARGIN, format_bytes
from fxckpt.costs.models import CostModel
from fxckpt.errors import BudgetInfeasible, InvalidBudget, InvalidOption
from fxckpt.optimizer_state import state_bytes
from fxckpt.planner.capture import is_on_meta, plan_for
from fxckpt.planner.planned_device import PlannedDevice, planned_device, warn_beyond
from fxckpt.plans.types import Plan
from fxckpt.torch_private import allocated_bytes, storage_id
from fxckpt.utils.progress import progress
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_seconds

MakeStep = Callable[..., tuple[Callable[..., Any], Any]]
"""A function of one size that returns a model and its inputs."""
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MOST = 1 << 24
"""Largest size that is tried."""


@dataclass(frozen=True)
class Resident:
    """Bytes that are in memory during the whole step, without activations and gradients."""

    parameter_bytes: int
    """Bytes of parameters."""
    buffer_bytes: int
    """Bytes of buffers."""
    input_bytes: int
    """Bytes of the inputs of a step."""
    optimizer_bytes: int
    """Bytes of the optimizer's state."""
    gradient_bytes: int
    """Bytes of gradients that earlier steps accumulated; 0 where the step makes them itself."""

    @property
    def total_bytes(self) -> int:
        """Sum of all."""
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.input_bytes
            + self.optimizer_bytes
            + self.gradient_bytes
        )


@dataclass(frozen=True)
class Trial:
    """One size that was tried."""

    size: int
    """The size."""
    resident: Resident
    """Bytes of the step's memory besides the plan's peak."""
    plan: Plan | None
    """The plan; None where none fits."""
    peak_bytes: int
    """Peak of the plan; the least peak that was found where none fits."""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None

    @property
    def total_bytes(self) -> int:
        """Memory of the whole step: what is resident, and the peak."""
        return self.resident.total_bytes + self.peak_bytes

    @property
    def seconds(self) -> float | None:
        """Time of a step by the cost model; None where no plan fits."""
        plan = self.plan
        return None if plan is None else plan.step_seconds + plan.extra_seconds

    @property
    def seconds_of_one(self) -> float | None:
        """Time of a step by the cost model, divided by the size."""
        return None if self.seconds is None else self.seconds / self.size


@dataclass(frozen=True)
class Fit:
    """The largest step that fits a memory, made by :func:`fxckpt.fit`. Printing shows a table."""

    over: str
    """Name of the size."""
    memory_bytes: int
    """The memory."""
    usable_bytes: int
    """The memory without the reserve."""
    trials: tuple[Trial, ...] = field(repr=False)
    """Every size that was tried, in order."""

    @property
    def best(self) -> Trial:
        """The largest size that fits."""
        return max((t for t in self.trials if t.fits), key=lambda trial: trial.size)

    @property
    def fastest(self) -> Trial:
        """The size with the least time of one, among those tried that fit."""
        return min((t for t in self.trials if t.fits), key=lambda t: (t.seconds_of_one, -t.size))

    @property
    def size(self) -> int:
        """The largest size that fits."""
        return self.best.size

    @property
    def plan(self) -> Plan:
        """The plan of the largest size."""
        found = self.best.plan
        assert found is not None
        return found

    def table(self) -> Table:
        """Return the sizes that were tried as a table."""

        def bytes_of(name: str, heading: str) -> Column:
            return Column(name, heading, format_bytes, is_number=True)

        def seconds(value: float | None) -> str:
            return "" if value is None else format_seconds(value)

        columns = (
            Column("size", self.over, is_number=True),
            Column("fits", "fits", lambda v: "yes" if v else "no"),
            bytes_of("total_bytes", "memory"),
            bytes_of("parameter_bytes", "parameters"),
            bytes_of("optimizer_bytes", "optimizer"),
            bytes_of("peak_bytes", "step's peak"),
            Column("slowdown", "extra time", lambda v: "" if v is None else f"{v:+.1%}", True),
            Column("seconds", "step", seconds, is_number=True),
            Column("seconds_of_one", f"time / {self.over}", seconds, is_number=True),
        )
        rows = []
        for trial in self.trials:
            rows.append(
                (
                    trial.size,
                    trial.fits,
                    trial.total_bytes,
                    trial.resident.parameter_bytes,
                    trial.resident.optimizer_bytes,
                    trial.peak_bytes,
                    None if trial.plan is None else trial.plan.slowdown,
                    trial.seconds,
                    trial.seconds_of_one,
                )
            )
        return Table(columns, tuple(rows))

    def __str__(self) -> str:
        budget = self.usable_bytes - self.best.resident.total_bytes
        return (
            f"{self.table()}\n\n"
            f"largest {self.over}: {self.size}, with budget={budget} "
            f"({format_bytes(budget)} of {format_bytes(self.memory_bytes)}) for the step\n"
            f"least time a {self.over}, among these: {self.fastest.size}"
        )


def fit(
    make_step: MakeStep,
    *,
    memory: int | str | None = None,
    over: str = "batch",
    optimizer: MakeOptimizer | str | None = torch.optim.AdamW,
    start: int = 1,
    multiple: int = 1,
    accumulates: bool = False,
    reserve: float = AUTO_MARGIN,
    policy: Any = None,
    cost: str | CostModel = "roofline",
    device: str | torch.device | None = None,
) -> Fit:
    """Return the largest size of a step that fits a memory; nothing is run.

    Counted are parameters, buffers, inputs, the optimizer's state, and the least peak of a step's
    activations and gradients that a plan reaches. Not counted are temporaries of the optimizer's
    own step, and what is allocated outside the model.

    Parameters
    ----------
    make_step
        A function that takes the size and returns a model and its inputs (a tensor, a tuple of
        arguments, or a dict of keyword arguments). Models on the meta device take no memory.
    memory
        Memory of the device: bytes as ``80 * 2**30`` or ``"80GiB"``, or ``"auto"`` for what is free
        here. None, or ``"auto"`` with a named ``device``, is the memory of that device.
    over
        Name of the size, for the table. Where ``make_step`` has a parameter of this name, the size
        is given by name.
    optimizer
        A class of optimizers, or its name in ``torch.optim``, or a function that makes one of a
        list of parameters; None for none.
    start
        The least size to try.
    multiple
        What every size is a multiple of, such as 128 for lengths.
    accumulates
        Whether gradients of earlier micro-batches are held during a step.
    reserve
        Share of the memory that is left for fragmentation, libraries and temporaries.
    policy, cost, device
        As in :func:`fxckpt.plan`.

    Raises
    ------
    BudgetInfeasible
        The least size does not fit.
    InvalidOption
        An argument makes no sense.
    CaptureError
        As :func:`fxckpt.plan`.

    Examples
    --------
    >>> import torch, fxckpt
    >>> def make_step(batch):
    ...     with torch.device("meta"):
    ...         layers = [m for _ in range(8) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    ...         return torch.nn.Sequential(*layers), torch.empty(batch, 64)
    >>> found = fxckpt.fit(make_step, memory="4MiB", over="batch", reserve=0.0)
    >>> found.best.total_bytes <= 4 * 2**20 < found.trials[-1].total_bytes
    True
    """
    _check(make_step, over, start, multiple, reserve)
    make_optimizer = _maker_of(optimizer)
    memory_bytes = _memory_bytes(memory, device)
    usable = int(memory_bytes * (1 - reserve))
    options = {"policy": policy, "cost": cost}
    name = over if over in inspect.signature(make_step).parameters else None
    tried: dict[int, Trial] = {}

    with progress(f"fit {over}", "plans") as shown:

        def fits(count: int) -> bool:
            size = count * multiple
            shown.tick(f"{over} {size}")
            model, inputs = _step(make_step, name, size)
            target = planned_device(device, is_on_meta=is_on_meta(model, *inputs))
            held = _resident(model, inputs, make_optimizer, accumulates, target)
            tried[size] = _trial(size, model, inputs, held, usable, target, options)
            return tried[size].fits

        first = -(-start // multiple)
        if not fits(first):
            raise _too_large(tried[first * multiple], over, memory_bytes, usable)
        _search(fits, first, MOST // multiple)
    return Fit(over, memory_bytes, usable, tuple(tried[size] for size in sorted(tried)))


def _search(fits: Callable[[int], bool], low: int, most: int) -> None:
    """Ask for sizes until two neighbours are found of which the smaller fits; ``low`` does."""
    high = low
    while low < most:
        high = min(2 * low, most)
        if not fits(high):
            break
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)


def _trial(
    size: int,
    model: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    held: Resident,
    usable: int,
    target: PlannedDevice,
    options: Mapping[str, Any],
) -> Trial:
    left = usable - held.total_bytes
    try:
        made = plan_for(target, model, *inputs, budget=max(1, left), **options)
    except BudgetInfeasible as error:
        return Trial(size, held, None, error.floor_bytes)
    return Trial(size, held, made, made.peak_bytes)


def _step(
    make_step: MakeStep, name: str | None, size: int
) -> tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the model of a size, and the arguments of its call by position and by name."""
    try:
        made = make_step(size) if name is None else make_step(**{name: size})
    except Exception as error:
        error.add_note(f"fxckpt.fit() asked for a step of size {size}.")
        raise
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise InvalidOption(
            f"make_step({size}) returned {type(made).__name__} {made!r:.80}, not a model and its "
            "inputs. Example: return model, torch.empty(batch, 512, device='meta')."
        )
    model, inputs = made
    if isinstance(inputs, Mapping):
        return model, ((), dict(inputs))
    return model, (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def _resident(
    model: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    make_optimizer: MakeOptimizer | None,
    accumulates: bool,
    target: PlannedDevice,
) -> Resident:
    """Return what a step holds in memory besides the peak of its plan."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
    trained = [p for p in parameters if p.requires_grad]
    seen: set[int] = set()
    return Resident(
        _held_bytes(parameters, seen, target),
        _held_bytes(buffers, seen, target),
        _held_bytes(
            (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)), seen, target
        ),
        _optimizer_bytes(trained, make_optimizer),
        sum(_taken(p.nbytes, target) for p in trained) if accumulates else 0,
    )


def _held_bytes(values: Iterable[Tensor], seen: set[int], target: PlannedDevice) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    total = 0
    for value in values:
        if storage_id(value) not in seen:
            seen.add(storage_id(value))
            total += _taken(value.untyped_storage().nbytes(), target)
    return total


def _taken(nbytes: int, target: PlannedDevice) -> int:
    return allocated_bytes(nbytes, target.place.type if target.place is not None else "cpu")


def _maker_of(optimizer: MakeOptimizer | str | None) -> MakeOptimizer | None:
    """Return what makes an optimizer; a class of torch's may be given by name."""
    if optimizer is None or callable(optimizer):
        return optimizer
    known = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer)
    }
    if not isinstance(optimizer, str) or optimizer not in known:
        raise InvalidOption(
            f"optimizer={optimizer!r}: torch.optim has no such class. It has "
            f"{', '.join(sorted(known))}. Of another library give the class, or a function that "
            "makes one of a list of parameters (on the command line, MODULE:NAME)."
        )
    return known[optimizer]


def _optimizer_bytes(trained: list[nn.Parameter], make: MakeOptimizer | None) -> int:
    if make is None or not trained:
        return 0
    made = make(trained)
    if not isinstance(made, Optimizer):
        raise InvalidOption(
            f"optimizer={make!r} made {type(made).__name__}, not an optimizer. "
            "Examples: optimizer=torch.optim.AdamW, optimizer=lambda ps: torch.optim.SGD(ps, 0.1)."
        )
    return sum(state_bytes(made, group, p) for group in made.param_groups for p in group["params"])


def _memory_bytes(memory: int | str | None, device: str | torch.device | None) -> int:
    """Return the memory in bytes."""
    target = PlannedDevice() if device is None else planned_device(device, is_on_meta=True)
    named = target.named
    parsed = budgets.parse(memory)
    if parsed is None and named is None:
        raise InvalidOption(
            "memory=None is the memory of a named device, and none was named. "
            "Examples: memory='24GiB', device='H100'."
        )
    if parsed in (None, "auto"):
        if named is not None:
            return named.memory_bytes
        return budgets.free_bytes(target.place or torch.device("cpu"))
    if not isinstance(parsed, int):
        raise InvalidBudget(
            f"memory={memory!r} is no memory: give bytes, as 80 * 2**30 or '80GiB', or 'auto' for "
            "what is free on this machine."
        )
    warn_beyond(named, "memory", memory)
    return parsed


def _check(make_step: object, over: object, start: object, multiple: object, reserve: Any) -> None:
    """Raise :class:`InvalidOption` for arguments that make no sense."""
    if not callable(make_step):
        raise InvalidOption(
            f"make_step={make_step!r:.80} is not a function of a size that returns a model and its "
            "inputs."
        )
    if not isinstance(over, str) or not over:
        raise InvalidOption(f"over={over!r} is not the name of a size. Example: over='batch'.")
    for name, value in (("start", start), ("multiple", multiple)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidOption(f"{name}={value!r} is not a whole number from 1.")
    if isinstance(reserve, bool) or not isinstance(reserve, (int, float)) or not 0 <= reserve < 1:
        raise InvalidOption(f"reserve={reserve!r} is not a share in [0, 1). Example: reserve=0.1.")


def _too_large(trial: Trial, over: str, memory_bytes: int, usable: int) -> BudgetInfeasible:
    """Return the error for a least size that does not fit, with the parts of its bytes."""
    held = trial.resident
    parts = ", ".join(
        f"{name} {format_bytes(count)}"
        for name, count in (
            ("parameters", held.parameter_bytes),
            ("buffers", held.buffer_bytes),
            ("inputs", held.input_bytes),
            ("optimizer state", held.optimizer_bytes),
            ("gradients of earlier steps", held.gradient_bytes),
            ("activations and gradients at least", trial.peak_bytes),
        )
        if count
    )
    return BudgetInfeasible(
        f"{over}={trial.size} needs {format_bytes(trial.total_bytes)} ({parts}), and "
        f"{format_bytes(usable)} of the memory of {format_bytes(memory_bytes)} can be used. Take a "
        "smaller model or dtype, an optimizer with less state, more memory, or shard the model.",
        floor_bytes=trial.total_bytes,
        budget_bytes=usable,
    )
