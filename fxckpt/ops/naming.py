"""User-given names of values, for policies to select by."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import fx

from fxckpt.errors import InvalidOption
from fxckpt.torch_private import is_recording, name_op

T = TypeVar("T", torch.Tensor, fx.Proxy)


def name(tensor: T, label: str) -> T:
    """Give ``tensor`` a name that policies can select by, and return it unchanged.

    In eager mode this does nothing. While a graph is captured or ops are recorded, it calls the op
    ``fxckpt::named(tensor, label)``, which returns nothing: the planner takes ``label`` for a name
    of the value that ``tensor`` is, or is a view of.

    Parameters
    ----------
    tensor:
        The tensor, or the ``fx.Proxy`` of a symbolic trace.
    label:
        The name, a text that is not empty. A value may have several names.

    Raises
    ------
    InvalidOption
        While capturing or recording, if ``tensor`` is no tensor, or ``label`` no text or empty.

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
    """Call the op ``fxckpt::named``, after checking its arguments."""
    if not isinstance(tensor, (torch.Tensor, fx.Proxy)) or not isinstance(label, str) or not label:
        raise InvalidOption(
            f"name({tensor!r}, {label!r}): give a tensor and a text that is not empty, "
            "as in fxckpt.name(t, 'attn_out')."
        )
    name_op(tensor, label)
