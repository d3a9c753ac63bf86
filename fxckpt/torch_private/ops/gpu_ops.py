"""Ops that a GPU runs in place of the CPU's, for graphs traced without a GPU.

The dispatcher asks the device which attention kernel to call, and a machine without one has no
answer. The rest of a joint graph is the same on both: torch's decompositions under the Python
dispatcher do not ask for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD = 256
"""Largest head dimension of the flash kernel."""
scaled_mm = torch._scaled_mm
"""Product of two matrices of one-byte floats, with a scale for each."""
ALIGNED = 8
"""The flash kernel takes head dimensions that are multiples of it; torch pads others."""


class GpuAttention(TorchFunctionMode):
    """Traces ``scaled_dot_product_attention`` as a GPU of compute capability 8.0 or more would.

    The order is torch's: the flash kernel (half precision, no mask), the memory-efficient one
    (a mask, or float32), the plain formula. cuDNN's kernel, which torch prefers on some devices,
    keeps the same values as the flash kernel.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def autocasts_for_gpu(gm: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo, or one inside it, turns on the autocast of CUDA."""
    graphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    return any(
        node.target is _enter_autocast and node.args[0] == "cuda" and node.args[2] is not False
        for graph in graphs
        for node in graph.nodes
    )


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention by the kernel that a CUDA device would choose."""
    aten = torch.ops.aten
    is_batched = query.dim() == key.dim() == value.dim() == 4 and query.shape[-2] > 0
    repeats_heads = is_batched and query.shape[1] != key.shape[1]
    if is_batched and attn_mask is None and _fits_flash(query, key, value):
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        padded = [
            F.pad(t, (0, -width % ALIGNED)) if width % ALIGNED else t for t in (query, key, value)
        ]
        out = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :width] if width % ALIGNED else out  # type: ignore[no-any-return]
    if is_batched and not repeats_heads and query.dtype in (*FLASH_DTYPES, torch.float32):
        bias = _bias(attn_mask, query, key)
        return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query,
            key,
            value,
            bias,
            _needs_grad(query, key, value, bias),
            dropout_p,
            is_causal,
            scale=scale,
        )[0]
    return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]


def _fits_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.dtype in FLASH_DTYPES
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.shape[-1] <= FLASH_HEAD
    )


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the additive mask of the memory-efficient kernel, one value for each score."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf"))
    return mask.expand(*query.shape[:2], query.shape[-2], key.shape[-2])


def _needs_grad(*operands: torch.Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in operands)
