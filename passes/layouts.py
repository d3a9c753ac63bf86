"""Layouts: what a backward's convolutions read is made channels last, as Inductor makes what those of the forward read.

Inductor decides half by half whether convolutions are given their images channels last, and for a backward by the convolutions that run again in it:
one of them turns the layout of all. Values that run again, and gradients, are then made as they were traced, and copied to what the convolution
takes: the forward's first run needed no copy, and a plan that runs a value again would pay for two. Told what a convolution reads is to look like,
Inductor makes it so.

Expects an emitted backward whose forward is given channels last. Leaves one that computes the same; what it returns is laid out as before.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.passes.rematerialize import FIRST_RUN_OF, RUNS_AGAIN
from fxckpt.torch_private.inductor import FORCE_STRIDE_ORDER

READ_IMAGES = {torch.ops.aten.convolution.default: 1, torch.ops.aten.convolution_backward.default: 2}
"""How many of an op's first operands are images: its input, or the gradient and the input."""


def lay_out(backward: fx.GraphModule) -> None:
    """Force channels last on the images that are made in the backward for its convolutions; those whose sizes vary are left alone."""
    readers = [(node, READ_IMAGES[node.target]) for node in backward.graph.nodes if node.target in READ_IMAGES]
    for image in dict.fromkeys(image for node, count in readers for image in node.args[:count]):
        if isinstance(image, fx.Node) and image.op != "placeholder" and _has_two_layouts(image.meta["val"]):
            _force(image)


def _has_two_layouts(value: torch.Tensor) -> bool:
    """Return whether a value is an image, of fixed sizes, that channels last lays out otherwise than row by row."""
    if value.dim() != 4 or not all(isinstance(n, int) for n in value.shape):
        return False
    _, channels, height, width = value.shape
    return channels > 1 and height * width > 1


def _force(image: fx.Node) -> None:
    value = image.meta["val"]
    laid_out = torch.empty_like(value, memory_format=torch.channels_last)
    with image.graph.inserting_after(image):
        forced = image.graph.call_function(FORCE_STRIDE_ORDER, (image, list(laid_out.stride())))
    forced.meta.update((key, of) for key, of in image.meta.items() if key not in (RUNS_AGAIN, FIRST_RUN_OF))
    forced.meta["val"] = laid_out
    # Who returns the image promised its layout; all others read what there is.
    image.replace_all_uses_with(forced, delete_user_cb=lambda user: user.op != "output" and user is not forced)
