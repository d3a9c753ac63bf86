"""Global switches by which torch selects kernels."""

from __future__ import annotations

import torch.utils.checkpoint

SWITCHES = (
    "mkldnn_enabled",
    "mkldnn_deterministic",
    "onednn_allow_tf32",
    "nnpack_enabled",
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_allow_tf32",
    "cublas_allow_tf32",
    "flash_sdp_enabled",
    "mem_efficient_sdp_enabled",
    "math_sdp_enabled",
    "cudnn_sdp_enabled",
    "float32_matmul_precision",
    "deterministic_algorithms",
    "blas_preferred_backend",
    "linalg_preferred_backend",
)
"""Switches that select, beside an op's arguments, torch's kernel and thus its memory.

Each is read by ``torch._C._get_<name>``; a version of torch may lack some.
"""


def kernel_switches() -> str:
    """Return the state of torch's kernel switches as text."""
    found = {name: getattr(torch._C, f"_get_{name}", None) for name in SWITCHES}
    return repr({name: str(get()) for name, get in found.items() if get is not None})
