"""Targets: the model and inputs that a ``MODULE:FACTORY`` argument names."""

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
    "Give MODULE:FACTORY or FILE.py:FACTORY, where FACTORY() returns (model, inputs); inputs are a "
    "tensor, a tuple of arguments, or a dict of keyword arguments. Example: train.py:make_step"
)
"""Help for the target argument, which ends its error messages too."""
FORM_OF_SIZE = (
    "Give MODULE:FACTORY or FILE.py:FACTORY, where FACTORY(batch) returns (model, inputs) of that "
    "size, and --over names the parameter. Example: fxckpt fit train.py:make_batch --over batch"
)
"""Help for a factory of one size."""
POLICY_FORM = (
    "Give a policy as MODULE:NAME or FILE.py:NAME. "
    "Examples: fxckpt.policies:save_matmuls, train.py:my_policy"
)
"""Help for the ``--policy`` option in its error messages."""


class TargetError(FxckptError):
    """Raised for a target that does not name a model and its inputs."""


@dataclass(frozen=True)
class ModelCall:
    """A model or function and the arguments of its call."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def load_target(text: str) -> ModelCall:
    """Import ``MODULE:FACTORY``, call the factory and return its model and inputs.

    Raises :class:`TargetError` if any of this fails.
    """
    factory = load_attribute(text)
    if not callable(factory):
        raise TargetError(f"{text!r} is {_type_text(factory)}, not a function. {FORM}")
    required = [
        p.name
        for p in _parameters(factory)
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        raise TargetError(
            f"{text!r} needs arguments ({', '.join(required)}), but it is called with none. {FORM}"
        )
    return _made(text, factory)


def load_factory(text: str, name: str) -> Callable[[int], tuple[Callable[..., Any], Any]]:
    """Import ``MODULE:FACTORY``, and return it as a function of one size, its parameter ``name``.

    What it returns is a model and its inputs. Raises :class:`TargetError` if the factory has no
    such parameter, needs others, or fails.
    """
    factory = load_attribute(text)
    if not callable(factory):
        raise TargetError(f"{text!r} is {_type_text(factory)}, not a function. {FORM_OF_SIZE}")
    parameters = _parameters(factory)
    named = [p.name for p in parameters]
    others = [p.name for p in parameters if p.default is p.empty and p.name != name]
    if name not in named or others:
        raise TargetError(
            f"{text!r} takes ({', '.join(named)}), and it is called with {name} alone. "
            f"{FORM_OF_SIZE}"
        )

    def make(size: int) -> tuple[Callable[..., Any], Any]:
        target = _made(text, factory, **{name: size})
        if target.args and target.kwargs:
            raise TargetError(f"{text!r} returned arguments of both kinds. {FORM_OF_SIZE}")
        return target.model, target.kwargs or target.args

    return make


def _made(text: str, factory: Callable[..., Any], **given: int) -> ModelCall:
    """Call a factory, and return the model and inputs that it made."""
    try:
        result = factory(**given)
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"{text!r} raised {type(error).__name__}: {error}{_user_line(error)}"
        ) from error
    return _parse_result(text, result)


def load_attribute(text: str, form: str = FORM) -> Any:
    """Import the module of ``MODULE:NAME`` or ``FILE.py:NAME`` and return its attribute.

    Raises :class:`TargetError` with ``form``, a description of the expected text.
    """
    source, colon, name = text.rpartition(":")
    if not colon or not source or not name:
        raise TargetError(
            f"{text!r} has no {'module' if colon and not source else 'name after a colon'}. {form}"
        )
    module = _import_file(Path(source)) if source.endswith(".py") else _import_name(source, form)
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
        raise TargetError(f"{source!r} has no {name!r}. {found}") from None


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module; raise :class:`TargetError` if that fails."""
    if not path.is_file():
        raise TargetError(f"there is no file {str(path)!r}. {_siblings(path)}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Pickle and dataclasses look the module up by name, and the file may import its neighbours.
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"importing {str(path)!r} raised {type(error).__name__}: {error}{_user_line(error)}"
        ) from error
    return module


def _siblings(path: Path) -> str:
    """Return a sentence that lists the Python files in the folder of a missing file."""
    if not path.parent.is_dir():
        return f"There is no folder {str(path.parent)!r}."
    files = sorted(str(p) for p in path.parent.glob("*.py"))
    if not files:
        return f"There are no Python files in {str(path.parent)!r}."
    return f"Python files there: {', '.join(files[:8])}."


def _import_name(name: str, form: str) -> ModuleType:
    """Import a module by its name; raise :class:`TargetError` if that fails."""
    if not all(name.split(".")):
        absolute = ".".join(filter(None, name.split("."))) or "module"
        raise TargetError(
            f"{name!r} is a relative module, and there is no package that it is relative to. "
            f"Name it in full, as {absolute!r}. {form}"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(
                f"there is no module {name!r} (looked in {Path.cwd()} and where Python looks). "
                f"{form}"
            ) from error
        raise TargetError(
            f"importing {name!r} needs the module {error.name!r}, which is not installed"
            f"{_user_line(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"importing {name!r} raised {type(error).__name__}: {error}{_user_line(error)}"
        ) from error


def _parameters(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return []


def _parse_result(text: str, result: Any) -> ModelCall:
    """Return the target that a factory returned: (model, inputs) or (model, args, kwargs)."""
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        raise TargetError(f"{text!r} returned {_type_text(result)}. {FORM}")
    model, inputs = result[0], result[1]
    if isinstance(model, type):
        raise TargetError(
            f"{text!r} returned the class {model.__name__} in place of a model of it. {FORM}"
        )
    if isinstance(inputs, Mapping):
        return ModelCall(model, (), dict(inputs))
    kwargs = result[2] if len(result) == 3 else {}
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    for value, expected in ((inputs, (tuple, list)), (kwargs, Mapping)):
        if not isinstance(value, expected):
            raise TargetError(f"{text!r} returned inputs that are {_type_text(value)}. {FORM}")
    return ModelCall(model, tuple(inputs), dict(kwargs))


def _type_text(value: Any) -> str:
    """Return the type of a value with its article: ``an int``, ``a tuple of (Linear, int)``."""
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(type(v).__name__ for v in value)})"
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _user_line(error: BaseException) -> str:
    """Return the innermost line of a traceback that is the user's own code, on a line of its own.

    Lines of installed packages, of the import system and of this module are skipped.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f
        for f in frames
        if "site-packages" not in f.filename
        and "importlib" not in f.filename
        and f.filename != __file__
    ]
    return f"\n  at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
