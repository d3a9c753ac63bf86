"""Hugging Face ``transformers``: gradient checkpointing by fxckpt, in models and their trainers.

A model's own blocks become regions of :func:`fxckpt.checkpoint`. The one method through which
``transformers`` turns checkpointing on is replaced in the model, so that a trainer that turns it on
again gets fxckpt too, with the options that it gives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from fxckpt import budgets
from fxckpt.eager.api import checkpoint
from fxckpt.errors import InvalidOption

M = TypeVar("M", bound=nn.Module)

SETTER = "_set_gradient_checkpointing"
"""Method of ``PreTrainedModel`` that turns checkpointing on and off; remote code overrides it."""
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
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is None or not getattr(model, "supports_gradient_checkpointing", False):
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
    enable({"use_reentrant": False})
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
    # Of two names, the older is deprecated where both exist.
    for kind in ("activation", "gradient"):
        if (is_on := getattr(model, f"is_{kind}_checkpointing", None)) is not None:
            if is_on:
                getattr(model, f"{kind}_checkpointing_disable")()
            return


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
