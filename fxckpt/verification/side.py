"""The two sides of a verification: a step, the modules it runs, and their state by name."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxckpt.errors import InvalidOption

WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
"""Parts of names that wrappers add: ``torch.compile``, ``checkpoint_wrapper`` and FSDP."""
SWITCHES_OFF = ("gradient_checkpointing_disable", "disable_gradient_checkpointing")
"""Methods that turn checkpointing off: of transformers, of diffusers."""


def plain_name(name: str) -> str:
    """Return a module's or parameter's name without the parts that wrappers add.

    >>> plain_name("_orig_mod.0._checkpoint_wrapped_module.weight")
    '0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def modules_run_by(step: Any) -> dict[str, nn.Module]:
    """Return the modules that a step runs, by a prefix of their names.

    A step is a module, a method of one, or a function; those of a function are in its closure,
    its globals and, of a partial, its arguments. The name of a single module is empty.
    """
    found = dict(_reached(step))
    unique = {id(module): (name, module) for name, module in reversed(found.items())}
    # A part of another module is found in that one.
    parts = {id(p) for _, m in unique.values() for p in m.modules() if p is not m}
    kept = {name: module for key, (name, module) in unique.items() if key not in parts}
    if len(kept) == 1:
        return {"": next(iter(kept.values()))}
    return dict(sorted(kept.items()))


def _reached(step: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a step can reach, by name: arguments, attributes and closures."""
    if isinstance(step, nn.Module):
        yield "", step
    elif isinstance(step, functools.partial):
        yield from _reached(step.func)
        values = {**{str(i): v for i, v in enumerate(step.args)}, **step.keywords}
        yield from ((name, v) for name, v in values.items() if isinstance(v, nn.Module))
    elif inspect.ismethod(step):
        if isinstance(step.__self__, nn.Module):
            yield "", step.__self__
        else:
            yield from _members(vars(step.__self__))
    elif inspect.isfunction(function := inspect.unwrap(step)):
        variables = inspect.getclosurevars(function)
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            if isinstance(value, nn.Module):
                yield name, value
            elif callable(value) and inspect.isfunction(value) and value is not function:
                yield from _members(inspect.getclosurevars(value).nonlocals)
    elif not inspect.isclass(step) and hasattr(step, "__dict__"):
        yield from _members(vars(step))


def _members(values: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, value) for name, value in values.items() if isinstance(value, nn.Module))


def without_checkpointing(step: Any) -> Any:
    """Return a copy of a model with its own checkpointing turned off.

    Raises :class:`InvalidOption` if the model has no switch for it.
    """
    switch = next((name for name in SWITCHES_OFF if hasattr(step, name)), None)
    if not isinstance(step, nn.Module) or switch is None:
        raise InvalidOption(
            "verify() was called without a reference, and "
            f"{type(step).__name__} has no gradient_checkpointing_disable() to make one with. "
            "Give the same step without checkpointing: fxckpt.verify(checkpointed, plain, x)."
        )
    plain = copy.deepcopy(step)
    getattr(plain, switch)()
    return plain


@dataclass(frozen=True)
class _Slot:
    """A tensor in a module's parameters or buffers, and its value at the start."""

    holder: dict[str, Tensor | None]
    key: str
    tensor: Tensor
    start: Tensor


class CheckedStep:
    """One of the two steps: its callable and the state of its modules.

    Parameters
    ----------
    step
        The module or function.
    label
        Its name in messages.
    """

    def __init__(self, step: Callable[..., Any], label: str) -> None:
        if not callable(step):
            raise InvalidOption(
                f"verify() was given {type(step).__name__} as the {label} step. "
                "Give a module, or a function that runs a forward."
            )
        self.step, self.label = step, label
        self.modules = modules_run_by(step)
        self._slots = {
            name: _Slot(holder, key, tensor, tensor.detach().clone())
            for name, holder, key, tensor in self._tensors()
        }
        for name, slot in self._slots.items():
            if slot.tensor.is_meta:
                raise InvalidOption(
                    f"verify() runs the step, and {name} of the {label} step is on the meta "
                    "device. Give a model with values."
                )
        self._gradients = [(p, p.grad) for p in self._all_parameters()]
        self._numbers = list(self._python_numbers())
        self._start = {name: slot.start for name, slot in self._slots.items()}

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules with their names, without the parts that wrappers add."""
        for prefix, root in self.modules.items():
            for name, module in root.named_modules(prefix=prefix):
                yield plain_name(name), module

    def _tensors(self) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
        seen: set[int] = set()
        for path, module in self.named_modules():
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield f"{path}.{key}" if path else key, holder, key, tensor

    def _all_parameters(self) -> Iterator[nn.Parameter]:
        return (s.tensor for s in self._slots.values() if isinstance(s.tensor, nn.Parameter))

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters that have gradients, by name."""
        return {
            name: slot.tensor
            for name, slot in self._slots.items()
            if isinstance(slot.tensor, nn.Parameter) and slot.tensor.requires_grad
        }

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are there now, by name."""
        held = ((name, s.holder.get(s.key), s) for name, s in self._slots.items())
        return {
            name: tensor
            for name, tensor, slot in held
            if tensor is not None and not isinstance(slot.tensor, nn.Parameter)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that are there now, by name."""
        held = ((name, slot.holder.get(slot.key)) for name, slot in self._slots.items())
        return {name: tensor for name, tensor in held if tensor is not None}

    def numbers(self) -> dict[str, float]:
        """Return the numbers that the modules keep in Python, by name."""
        return {name: owner[key] for name, owner, key, _ in self._numbers if key in owner}

    def _python_numbers(self) -> Iterator[tuple[str, dict[str, Any], str, float]]:
        for path, module in self.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, (int, float)) and key != "training":
                    yield f"{path}.{key}" if path else key, vars(module), key, value

    def device(self) -> torch.device:
        """Return the device of the first parameter or buffer; the CPU where there is none."""
        slot = next(iter(self._slots.values()), None)
        return torch.device("cpu") if slot is None else slot.tensor.device

    def start_like(self, other: CheckedStep) -> None:
        """Start every step from the parameters and buffers of another side.

        Raises :class:`InvalidOption` if the two have other names or shapes.
        """
        ours = {name: s.start.shape for name, s in self._slots.items()}
        theirs = {name: s.start.shape for name, s in other._slots.items()}
        differing = [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]
        if differing:
            name = differing[0]
            raise InvalidOption(
                f"verify() compares two steps of one model, and {name} is "
                f"{_shape_text(theirs.get(name))} in the {other.label} step and "
                f"{_shape_text(ours.get(name))} in the {self.label} step. "
                "Give the same model twice, with checkpointing and without."
            )
        self._start = dict(other._start)

    def reset(self) -> None:
        """Restore the state at the start, without gradients."""
        self._write(self._start)
        for parameter in self._all_parameters():
            parameter.grad = None

    def restore(self) -> None:
        """Give the modules back as they were found, gradients too."""
        self._write({name: slot.start for name, slot in self._slots.items()})
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def _write(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, slot in self._slots.items():
                slot.holder[slot.key] = slot.tensor
                slot.tensor.copy_(values[name])
        for _, owner, key, value in self._numbers:
            owner[key] = value


def _shape_text(shape: torch.Size | None) -> str:
    return "missing" if shape is None else f"of shape {tuple(shape)}"


@dataclass(frozen=True)
class Arguments:
    """The arguments of a step, of which every run gets its own copy."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
        """Return copies of the arguments, and their tensors by name."""
        copies: dict[int, Tensor] = {}
        named: dict[str, Tensor] = {}

        def renew(path: Any, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:
                copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
                named[argument_name(path)] = copies[id(value)]
            return copies[id(value)]

        args, kwargs = pytree.tree_map_with_path(renew, (tuple(self.args), dict(self.kwargs)))
        return args, kwargs, named


def argument_name(path: Sequence[Any]) -> str:
    """Return the name of an argument by its place in ``(args, kwargs)``."""
    place, *rest = path
    if place.idx == 0:
        return f"args{pytree.keystr(tuple(rest))}"
    return f"{rest[0].key}{pytree.keystr(tuple(rest[1:]))}"
