"""Gradient checkpointing of Hugging Face ``transformers`` models by fxckpt."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import nn

from fxckpt.eager.api import checkpoint
from fxckpt.errors import InvalidOption

M = TypeVar("M", bound=nn.Module)


def patch_transformers(model: M, **options: Any) -> M:
    """Enable gradient checkpointing in a ``transformers`` model by :func:`fxckpt.checkpoint`.

    Every block that the model checkpoints becomes a region with ``options``; returns the model.
    Parameter names and saved checkpoints are unchanged. Undo it by
    ``model.activation_checkpointing_disable()`` (older versions:
    ``gradient_checkpointing_disable``).
    Raises :class:`InvalidOption` for a model without gradient checkpointing.

    Examples
    --------
    >>> import transformers, fxckpt
    >>> sizes = dict(n_layer=2, n_embd=8, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0)
    >>> config = transformers.GPT2Config(**sizes)
    >>> model = fxckpt.patch_transformers(transformers.GPT2LMHeadModel(config))
    >>> model.is_gradient_checkpointing
    True
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is None or not getattr(model, "supports_gradient_checkpointing", False):
        raise InvalidOption(
            f"{type(model).__name__} is no transformers model with gradient checkpointing. "
            "Wrap the calls of its blocks yourself: x = fxckpt.checkpoint(block, x)."
        )
    enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            setattr(  # noqa: B010
                module, "_gradient_checkpointing_func", functools.partial(checkpoint, **options)
            )
    return model
