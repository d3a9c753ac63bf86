"""Hugging Face: ``transformers`` models whose gradient checkpointing is fxckpt's."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import nn

from fxckpt.eager.api import checkpoint
from fxckpt.errors import InvalidOption

M = TypeVar("M", bound=nn.Module)


def patch_transformers(model: M, **options: Any) -> M:
    """Turn gradient checkpointing on in a ``transformers`` model, by :func:`fxckpt.checkpoint` with ``options``; return the model.

    Every block that the model checkpoints is a region. Parameter names, and what is saved to disk, stay as they are;
    ``model.activation_checkpointing_disable()`` (``gradient_checkpointing_disable`` in older versions) undoes it.
    Raises :class:`InvalidOption` for a model without gradient checkpointing.

    Examples
    --------
    >>> import transformers, fxckpt
    >>> config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, bos_token_id=0, eos_token_id=0)
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
            setattr(
                module, "_gradient_checkpointing_func", functools.partial(checkpoint, **options)
            )  # noqa: B010
    return model
