"""Names: what a user calls a value, so that a policy can find it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import fx

from fxckpt.errors import InvalidOption
from fxckpt.torch_private import is_recording, name_op

T = TypeVar("T", torch.Tensor, fx.Proxy)


def name(tensor: T, label: str) -> T:
    """Call ``tensor`` by a name that policies know, and return it unchanged.

    In eager mode this does nothing. Where a graph is captured or ops are recorded, the op ``fxckpt::named(tensor, label)`` is called; it returns
    nothing, so that ``tensor`` stays what it is, and the planner reads it as the name of the value that ``tensor`` is, or is a view of. Raises
    :class:`InvalidOption` for what is no tensor or no text.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from fxckpt.policies import save_only
    >>> def block(x, w):
    ...     return fxckpt.name(x @ w, "product").sin().cos().sum()
    >>> w = torch.randn(8, 8, requires_grad=True)
    >>> fxckpt.plan(block, torch.randn(4, 8), w, policy=save_only("product")).saved
    ('mm',)
    """
    if torch.compiler.is_compiling() or isinstance(tensor, fx.Proxy) or is_recording():
        record(tensor, label)
    return tensor


def record(tensor: Any, label: str) -> None:
    """Tell whoever captures or records."""
    if not isinstance(tensor, (torch.Tensor, fx.Proxy)) or not isinstance(label, str) or not label:
        raise InvalidOption(
            f"name({tensor!r}, {label!r}): give a tensor and a text that is not empty, as in fxckpt.name(t, 'attn_out')."
        )
    name_op(tensor, label)
