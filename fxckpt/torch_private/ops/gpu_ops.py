"""Ops that a GPU runs in place of the CPU's, for graphs traced without a GPU.

The dispatcher asks the device which attention kernel to call, and a machine without one has no
answer. An RMS norm is one op where CUDA has a kernel of it, and is taken apart elsewhere: it is
traced as an op that stands in for it. The rest of a joint graph is the same on both: torch's
decompositions under the Python dispatcher do not ask for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format
from torch.amp.autocast_mode import _enter_autocast
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD = 256
"""Largest head dimension of the flash kernel."""
CUDNN_HEAD = 128
"""Largest head dimension that cuDNN's kernel takes on every device where torch prefers it."""
scaled_mm = torch._scaled_mm
"""Product of two matrices of one-byte floats, with a scale for each."""
ALIGNED = 8
"""The flash kernel takes head dimensions that are multiples of it; torch pads others."""


class GpuOps(TorchFunctionMode):
    """Traces attention and RMS norms as a GPU of compute capability 8.0 or more would run them.

    The order of attention is torch's: cuDNN's kernel where torch prefers it (``prefers_cudnn``),
    the flash kernel (half precision, no mask), the memory-efficient one (a mask, or float32), the
    plain formula. The source is ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
    """

    def __init__(self, *, prefers_cudnn: bool = False) -> None:
        super().__init__()
        self._prefers_cudnn = prefers_cudnn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(self._prefers_cudnn, *args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            found = _rms_norm(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


_RMS_NORM, _RMS_NORM_BACKWARD = "fxckpt::_fused_rms_norm", "fxckpt::_fused_rms_norm_backward"
torch.library.define(
    _RMS_NORM,
    "(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    _RMS_NORM_BACKWARD,
    "(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight, "
    "bool[2] output_mask) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _fake_rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    left = input.dim() - len(normalized_shape)
    shape = (*input.shape[:left], *[1] * len(normalized_shape))
    wide = torch.float64 if input.dtype is torch.float64 else torch.float32
    return input.new_empty(input.shape), input.new_empty(shape, dtype=wide)


def _fake_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    of_weight = input.new_empty(normalized_shape if output_mask[1] else 0)
    return input.new_empty(input.shape if output_mask[0] else 0), of_weight


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    input, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(input, output[1], *(() if weight is None else (weight,)))
    ctx.set_materialize_grads(False)


def _rms_norm_backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    input, rstd, *weight = ctx.saved_tensors
    mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    op = torch.ops.fxckpt._fused_rms_norm_backward
    found = op(grad, input, ctx.shape, rstd, weight[0] if weight else None, mask)
    return found[0] if mask[0] else None, None, found[1] if mask[1] else None, None


torch.library.register_fake(_RMS_NORM, _fake_rms_norm)
torch.library.register_fake(_RMS_NORM_BACKWARD, _fake_rms_norm_backward)
torch.library.register_autograd(_RMS_NORM, _rms_norm_backward, setup_context=_keep_for_backward)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    """Return an RMS norm by the op that stands in for CUDA's, None where CUDA has no one op."""
    formats = torch.channels_last, torch.channels_last_3d
    is_mixed = weight is not None and weight.dtype is not input.dtype
    if is_mixed or input.is_complex() or suggest_memory_format(input) in formats:
        return None
    return torch.ops.fxckpt._fused_rms_norm(input, normalized_shape, weight, eps)[0]  # type: ignore[no-any-return]


def restore_ops(graph: fx.Graph) -> None:
    """Replace the ops that stand in for those of a GPU by what they stand in for."""
    own, aten = torch.ops.fxckpt, torch.ops.aten
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):
        for node in graph.find_nodes(op="call_function", target=getattr(own, name).default):
            node.target = getattr(aten, name).default


def autocasts_for_gpu(gm: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo, or one inside it, turns on the autocast of CUDA."""
    graphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    return any(
        node.target is _enter_autocast and node.args[0] == "cuda" and node.args[2] is not False
        for graph in graphs
        for node in graph.nodes
    )


def _attention(
    prefers_cudnn: bool,
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
    if is_batched and attn_mask is None and prefers_cudnn and _fits_cudnn(query, key, value):
        keeps = _needs_grad(query, key, value)
        given = {} if scale is None else {"scale": scale}
        return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
            query, key, value, None, keeps, dropout_p, is_causal, **given
        )[0]
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


def _fits_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    widths = {t.shape[-1] for t in (query, key, value)}
    return query.dtype in FLASH_DTYPES and all(n <= CUDNN_HEAD and n % ALIGNED == 0 for n in widths)


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
