"""Channels last: give the images that a backward's convolutions read the layout of the forward's.

Inductor decides for each half whether convolutions get channels-last images, and decides for a
backward by the convolutions recomputed in it: one of them changes the layout of all. (Since torch
2.15 their backwards count too, so that most backwards are laid out like their forward.) Recomputed
values and gradients are then made as they were traced and copied to the layout that a convolution
takes. The forward needs no such copy, so a plan that recomputes a value would pay for two. Inductor
makes an image in the layout that is forced on it instead.

Expects an emitted backward whose forward is laid out channels last. Leaves one that computes the
same; values that it returns keep their layout.
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
"""Number of leading operands that are images: the input, or the gradient and the input."""


def to_channels_last(backward: fx.Graph) -> None:
    """Force channels last on images made in the backward for its convolutions.

    Images of dynamic sizes keep their layout.
    """
    readers = [
        (node, READ_IMAGES[node.target]) for node in backward.nodes if node.target in READ_IMAGES
    ]
    for image in dict.fromkeys(image for node, count in readers for image in node.args[:count]):
        if (
            isinstance(image, fx.Node)
            and image.op != "placeholder"
            and _has_two_layouts(image.meta["val"])
        ):
            _force(image)


def _has_two_layouts(value: torch.Tensor) -> bool:
    """Return whether a value is an image of fixed sizes whose channels-last layout differs."""
    if value.dim() != 4 or not all(isinstance(n, int) for n in value.shape):
        return False
    _, channels, height, width = value.shape
    return channels > 1 and height * width > 1


def _force(image: fx.Node) -> None:
    forced = forced_like(
        image, torch.empty_like(image.meta["val"], memory_format=torch.channels_last)
    )
    # All readers share the forced image, unless they depend on its layout.
    image.replace_all_uses_with(
        forced, delete_user_cb=lambda user: user is not forced and not _depends_on_layout(user)
    )


def forced_like(value: fx.Node, with_layouts: torch.Tensor) -> fx.Node:
    """Return a new node after a value: the same value, laid out like ``with_layouts``."""
    with value.graph.inserting_after(value):
        forced = value.graph.call_function(FORCE_STRIDE_ORDER, (value, list(with_layouts.stride())))
    forced.meta.update(
        (key, of) for key, of in value.meta.items() if key not in (IS_RECOMPUTE, FIRST_RUN_OF)
    )
    forced.meta["val"] = with_layouts
    return forced


def _depends_on_layout(user: fx.Node) -> bool:
    """Return whether a reader, directly or through views, reads memory or promised a layout."""
    if user.target in READ_IMAGES:
        return False
    if not is_torchs_own(user) or "as_strided" in str(user.target):
        return True
    return is_view(user) and any(map(_depends_on_layout, user.users))
