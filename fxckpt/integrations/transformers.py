"""Hugging Face ``transformers``: gradient checkpointing by fxckpt, in models and their trainers.

A model's own blocks become regions of :func:`fxckpt.checkpoint`. The one method through which
``transformers`` turns checkpointing on is replaced in the model, so that a trainer that turns it on
again gets fxckpt too, with the options that it gives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from fxckpt import budgets
from fxckpt.eager.api import checkpoint
from fxckpt.errors import InvalidOption

M = TypeVar("M", bound=nn.Module)
KINDS = ("activation", "gradient")
"""Words for checkpointing in names of methods; the later one is deprecated where both exist."""

SETTER = "_set_gradient_checkpointing"
"""Method of ``PreTrainedModel`` that turns checkpointing on and off; remote code overrides it."""
PATCHED = (SETTER, "_fxckpt_options", "_gradient_checkpointing_func")
"""Attributes of modules that patching a model sets."""
BLOCK = "GradientCheckpointingLayer"
"""Class of the blocks that a model of ``transformers`` checkpoints."""
OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(checkpoint).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)
"""Options of a region."""


def patch_transformers(model: M, **options: Any) -> M:
    """Enable gradient checkpointing in a ``transformers`` model by :func:`fxckpt.checkpoint`.

    Every block that the model checkpoints becomes a region. Parameter names and saved checkpoints
    are unchanged. Whoever enables checkpointing in the model later, as a trainer with
    ``gradient_checkpointing=True`` does, enables fxckpt's; ``gradient_checkpointing_kwargs`` add to
    ``options`` and override them. ``model.activation_checkpointing_disable()`` (older versions:
    ``gradient_checkpointing_disable``) turns it off.

    Parameters
    ----------
    model:
        A ``transformers`` model that supports gradient checkpointing; it is changed.
    options:
        Those of :func:`fxckpt.checkpoint`, for each region.

    Returns
    -------
    The model.

    Raises
    ------
    InvalidOption
        For a model without gradient checkpointing, for an unknown option, and, when checkpointing
        is enabled, for what regions do not have (``offload=True``).

    Examples
    --------
    >>> import transformers, fxckpt
    >>> sizes = dict(n_layer=2, n_embd=8, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0)
    >>> config = transformers.GPT2Config(**sizes)
    >>> model = fxckpt.patch_transformers(transformers.GPT2LMHeadModel(config))
    >>> model.is_gradient_checkpointing
    True
    """
    _check(options)
    is_able = getattr(model, "supports_gradient_checkpointing", False)
    if not is_able or _method(model, "enable") is None:
        raise InvalidOption(
            f"{type(model).__name__} is no transformers model with gradient checkpointing. "
            "Wrap the calls of its blocks yourself: x = fxckpt.checkpoint(block, x)."
        )
    for module in model.modules():
        setter = getattr(type(module), SETTER, None)
        if setter is not None:
            is_old = "value" in inspect.signature(setter).parameters
            # A bound method, so that a copy of the model binds its own.
            setattr(module, SETTER, MethodType(_set_by_module if is_old else _set, module))
            module._fxckpt_options = options  # type: ignore[assignment]
    _enable(model, {"use_reentrant": False})
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: those that it checkpoints, else its layers.

    Layers are the items of an ``nn.ModuleList`` of two and more of one class. No block is inside
    of another.
    """
    named = dict(model.named_modules())
    blocks = {
        name
        for name, module in named.items()
        if any(base.__name__ == BLOCK for base in type(module).__mro__)
    } or {
        f"{name}.{number}" if name else str(number)
        for name, module in named.items()
        if isinstance(module, nn.ModuleList)
        and len(module) > 1
        and len({type(each) for each in module}) == 1
        for number in range(len(module))
    }
    return [
        module
        for name, module in named.items()
        if name in blocks and not any(name.startswith(f"{other}.") for other in blocks)
    ]


def turn_off(model: nn.Module) -> None:
    """Disable the gradient checkpointing of a model, if it is enabled."""
    if is_on(model):
        _method(model, "disable")()


def is_on(model: nn.Module) -> bool:
    """Return whether the gradient checkpointing of a model is enabled."""
    found = (getattr(model, f"is_{kind}_checkpointing", None) for kind in KINDS)
    return bool(next((each for each in found if each is not None), False))


def _method(model: nn.Module, what: str) -> Any:
    """Return the method that enables or disables checkpointing in a model; None if none does."""
    found = (getattr(model, f"{kind}_checkpointing_{what}", None) for kind in KINDS)
    return next((each for each in found if each is not None), None)


def _enable(model: Any, options: Mapping[str, Any]) -> None:
    """Enable the gradient checkpointing of a model, which may be enabled already.

    Enabled twice, it would lose hold of the hooks of the first time.
    """
    if had_hooks := _has_hooks(model):
        model.disable_input_require_grads()
    _method(model, "enable")(dict(options) or None)
    if had_hooks and not _has_hooks(model):
        model.enable_input_require_grads()


def _has_hooks(model: nn.Module) -> bool:
    """Return whether hooks make the results of a model's embedding need gradients."""
    return bool(getattr(model, "_require_grads_hooks", None))


@dataclass(frozen=True)
class Unpatched:
    """A model as it was before :func:`patch_transformers`."""

    attributes: Mapping[str, Mapping[str, Any]]
    """Attributes of its modules, by name, that are to be replaced; methods without their module.

    Nothing here holds the model, so that one whose training failed can be freed.
    """
    is_on: bool
    """Whether its checkpointing was enabled."""
    has_hooks: bool
    """Whether hooks made the results of its embedding need gradients."""

    @classmethod
    def of(cls, model: nn.Module) -> Unpatched:
        """Return the model as it is."""
        attributes = {
            path: {
                name: getattr(vars(module)[name], "__func__", vars(module)[name])
                for name in PATCHED
                if name in vars(module)
            }
            for path, module in model.named_modules()
        }
        return cls(attributes, is_on(model), _has_hooks(model))

    def restore(self, model: Any, options: Mapping[str, Any]) -> None:
        """Leave a model as it was; ``options`` are those of its own checkpointing, if enabled."""
        turn_off(model)
        for path, module in model.named_modules():
            for name in PATCHED:
                vars(module).pop(name, None)
            for name, value in self.attributes.get(path, {}).items():
                setattr(module, name, MethodType(value, module) if name == SETTER else value)
        if self.is_on:
            _enable(model, options)
        elif not self.has_hooks and _has_hooks(model):
            model.disable_input_require_grads()


def _set(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Enable or disable checkpointing in a model, with fxckpt's function in place of torch's."""
    setter = getattr(type(self), SETTER)
    given = inspect.signature(setter).bind(self, *args, **kwargs)
    given.apply_defaults()
    function = given.arguments["gradient_checkpointing_func"]
    if not isinstance(function, functools.partial):
        function = functools.partial(function)
    if (name := getattr(function.func, "__name__", "")) != "checkpoint":
        raise InvalidOption(
            f"gradient checkpointing by {name or function.func!r} was asked for (offload=True, "
            "say), which regions of fxckpt do not have. Leave it out; to send away what they keep: "
            "fxckpt.patch_transformers(model, offload='64GiB')."
        )
    merged = {**_options_of(self), **function.keywords}
    _check(merged)
    given.arguments["gradient_checkpointing_func"] = functools.partial(checkpoint, **merged)
    setter(*given.args, **given.kwargs)


def _set_by_module(self: nn.Module, module: nn.Module, value: bool = False) -> None:
    """Enable or disable checkpointing in one module, of a model of the form before 4.35."""
    getattr(type(self), SETTER)(self, module, value)
    if hasattr(module, "_gradient_checkpointing_func"):
        function = functools.partial(checkpoint, **_options_of(self))
        module._gradient_checkpointing_func = function  # type: ignore[assignment]


def _options_of(model: nn.Module) -> dict[str, Any]:
    options: Any = model.__dict__["_fxckpt_options"]
    return dict(options)


def _check(options: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidOption` for options that regions do not have, before a step runs.

    A region passes other keywords on to its block, which may ignore them.
    """
    for name in options:
        if name not in OPTIONS:
            near = get_close_matches(name, OPTIONS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InvalidOption(
                f"{name}={options[name]!r} is no option of fxckpt.checkpoint.{hint} "
                f"Options: {', '.join(OPTIONS)}."
            )
    budgets.validate(options.get("budget"))
