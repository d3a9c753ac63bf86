"""Targets: ``MODULE:FACTORY`` on a command line, turned into a model and its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fxckpt.errors import FxckptError

FORM = (
    "Give MODULE:FACTORY or FILE.py:FACTORY, where FACTORY() returns (model, inputs); inputs are a tensor, a tuple of arguments, or a dict of "
    "keyword arguments. Example: train.py:make_step"
)

POLICY_FORM = "Give a policy as MODULE:NAME or FILE.py:NAME. Examples: fxckpt.policies:save_matmuls, train.py:my_policy"


class TargetError(FxckptError):
    """A target that does not name a model and its inputs."""


@dataclass(frozen=True)
class Target:
    """A model or function and what it is called with."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def load(text: str) -> Target:
    """Import the module and call the factory. Raises :class:`TargetError` that says what was found instead."""
    factory = attribute(text)
    if not callable(factory):
        raise TargetError(f"{text!r} is {_kind(factory)}, not a function. {FORM}")
    required = [
        p.name
        for p in _parameters(factory)
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        raise TargetError(
            f"{text!r} needs arguments ({', '.join(required)}), but it is called with none. {FORM}"
        )
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"{text!r} raised {type(error).__name__}: {error}{_where(error)}"
        ) from error
    return _checked(text, made)


def attribute(text: str, form: str = FORM) -> Any:
    """Return what ``MODULE:NAME`` names. Raises :class:`TargetError`, which ends with the ``form`` that was expected."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(
            f"{text!r} has no {'module' if colon and not place else 'name after a colon'}. {form}"
        )
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place, form)
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        own = [
            n
            for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__ and not n.startswith("_")
        ]
        found = (
            f"Its functions: {', '.join(own[:12])}." if own else "It has no functions of its own."
        )
        raise TargetError(f"{place!r} has no {name!r}. {found}") from None


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = (
            f"Python files there: {', '.join(near[:8])}."
            if near
            else f"There is no folder {str(path.parent)!r}."
        )
        if path.parent.is_dir() and not near:
            hint = f"There are no Python files in {str(path.parent)!r}."
        raise TargetError(f"there is no file {str(path)!r}. {hint}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What the file defines is looked up by its module's name, and it imports its neighbours.
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"importing {str(path)!r} raised {type(error).__name__}: {error}{_where(error)}"
        ) from error
    return module


def _from_name(name: str, form: str) -> ModuleType:
    if not all(name.split(".")):
        own = ".".join(filter(None, name.split("."))) or "module"
        raise TargetError(
            f"{name!r} is a relative module, and there is no package that it is relative to. Name it in full, as {own!r}. {form}"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(
                f"there is no module {name!r} (looked in {Path.cwd()} and where Python looks). {form}"
            ) from error
        raise TargetError(
            f"importing {name!r} needs the module {error.name!r}, which is not installed{_where(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"importing {name!r} raised {type(error).__name__}: {error}{_where(error)}"
        ) from error


def _parameters(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return []


def _checked(text: str, made: Any) -> Target:
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise TargetError(f"{text!r} returned {_kind(made)}. {FORM}")
    model, inputs = made[0], made[1]
    if isinstance(inputs, Mapping):
        return Target(model, (), dict(inputs))
    args = (
        (inputs,)
        if isinstance(inputs, torch.Tensor)
        else tuple(inputs)
        if isinstance(inputs, (tuple, list))
        else None
    )
    kwargs = made[2] if len(made) == 3 else {}
    if args is None or not isinstance(kwargs, Mapping):
        raise TargetError(
            f"{text!r} returned inputs that are {_kind(inputs if args is None else kwargs)}. {FORM}"
        )
    return Target(model, args, dict(kwargs))


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(type(v).__name__ for v in value)})"
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _where(error: BaseException) -> str:
    """Return the innermost line of the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f
        for f in frames
        if "site-packages" not in f.filename
        and "importlib" not in f.filename
        and f.filename != __file__
    ]
    return f"\n  at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
