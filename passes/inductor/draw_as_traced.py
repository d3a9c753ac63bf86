"""Draw as traced: keep the traced layout of operands of random ops that are run twice.

A random op draws for the elements of its operand in the order of memory. Inductor lays the operand
of a plain dropout out as it was traced, and knows nothing of an op inside of a call that saves or
restores a generator state: images would be laid out channels last there, and the draw would be
another than eager mode's, or another in the recomputation than in the first run.

Expects an emitted half. Leaves one that computes the same.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.passes.inductor.channels_last import forced_like
from fxckpt.torch_private import run_and_save_rng_state, run_with_rng_state


def draw_as_traced(half: fx.Graph) -> None:
    """Force the traced strides on the operands of random ops that are run twice.

    Values of dynamic sizes, and those with holes or overlaps, are left alone.
    """
    for node in list(half.nodes):
        if node.target not in (run_and_save_rng_state, run_with_rng_state):
            continue
        skipped = 2 if node.target is run_with_rng_state else 1
        operands = dict.fromkeys(a for a in node.args[skipped:] if isinstance(a, fx.Node))
        for value in operands:
            traced = value.meta.get("val")
            if not isinstance(traced, torch.Tensor) or traced.dim() < 2:
                continue
            if not all(isinstance(n, int) for n in (*traced.shape, *traced.stride())):
                continue
            with_layouts = torch.empty_like(traced)
            if with_layouts.stride() == traced.stride():
                node.replace_input_with(value, forced_like(value, with_layouts))
