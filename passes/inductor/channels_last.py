"""Layouts: what an emitted backward makes lies in memory as its readers need it, where Inductor would lay it out otherwise.

:func:`to_channels_last`: what a backward's convolutions read is made channels last, as Inductor makes what those of the forward read.

Inductor decides half by half whether convolutions are given their images channels last, and for a backward by the convolutions that run again in it:
one of them turns the layout of all. Values that run again, and gradients, are then made as they were traced, and copied to what the convolution
takes: the forward's first run needed no copy, and a plan that runs a value again would pay for two. Told what a convolution reads is to look like,
Inductor makes it so.

:func:`keep_strides`: ``as_strided`` reads memory, not values. Where the forward runs it Inductor lays its operand out as it was traced; where
the operand runs again from values that lie otherwise, it would lie as they do, and other numbers would be read.

Both expect an emitted backward, the first one whose forward is given channels last, and leave one that computes the same; what it returns is
laid out as before.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.ops.properties import is_torchs_own
from fxckpt.passes.meta import FIRST_RUN_OF, IS_RECOMPUTE
from fxckpt.torch_private.inductor.default_partitioner import is_view
from fxckpt.torch_private.inductor.layouts import FORCE_STRIDE_ORDER

READ_IMAGES = {
    torch.ops.aten.convolution.default: 1,
    torch.ops.aten.convolution_backward.default: 2,
}
"""How many of an op's first operands are images: its input, or the gradient and the input."""


def to_channels_last(backward: fx.GraphModule) -> None:
    """Force channels last on the images that are made in the backward for its convolutions; those whose sizes vary are left alone."""
    readers = [
        (node, READ_IMAGES[node.target])
        for node in backward.graph.nodes
        if node.target in READ_IMAGES
    ]
    for image in dict.fromkeys(image for node, count in readers for image in node.args[:count]):
        if (
            isinstance(image, fx.Node)
            and image.op != "placeholder"
            and _has_two_layouts(image.meta["val"])
        ):
            _force(image)


def _has_two_layouts(value: torch.Tensor) -> bool:
    """Return whether a value is an image, of fixed sizes, that channels last lays out otherwise than row by row."""
    if value.dim() != 4 or not all(isinstance(n, int) for n in value.shape):
        return False
    _, channels, height, width = value.shape
    return channels > 1 and height * width > 1


def _force(image: fx.Node) -> None:
    forced = _forced(image, torch.empty_like(image.meta["val"], memory_format=torch.channels_last))
    # All others read what there is rather than make it again, but for those to whom it matters how the image lies.
    image.replace_all_uses_with(
        forced, delete_user_cb=lambda user: user is not forced and not _depends_on_layout(user)
    )


def _forced(value: fx.Node, laid_out: torch.Tensor) -> fx.Node:
    """Return a node behind a value that is laid out like another."""
    with value.graph.inserting_after(value):
        forced = value.graph.call_function(FORCE_STRIDE_ORDER, (value, list(laid_out.stride())))
    forced.meta.update(
        (key, of) for key, of in value.meta.items() if key not in (IS_RECOMPUTE, FIRST_RUN_OF)
    )
    forced.meta["val"] = laid_out
    return forced


def _depends_on_layout(user: fx.Node) -> bool:
    """Return whether a reader, or one that reads through it, returns a value whose layout was promised or looks at memory itself."""
    if user.target in READ_IMAGES:
        return False
    if not is_torchs_own(user) or "as_strided" in str(user.target):
        return True
    return is_view(user) and any(map(_depends_on_layout, user.users))
