"""A fault of Inductor's C++ loops, kept out of what is compiled here.

Loops over the same rows are fused, and what only they read is kept in a buffer of one row (``local_buffer_data``), which the next row
writes over. Where a loop over rows goes by tiles of several (a value that lies with its rows innermost is read by transposing tiles), each
row of a tile writes over the buffer, and all are read as the last one: gradients of LayerNorms over images are wrong by a few thousandths.
Such loops are not fused here, which is what Inductor itself does with loops that are stepped through in different ways.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def whole_rows() -> Iterator[None]:
    """Within this, fused loops that keep a buffer of one row go by one row."""
    from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
    from torch._inductor.virtualized import V

    check = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr

    def checked(node: Any, proxies: list[Any], depth: int) -> bool:
        keeps_rows = bool(V.local_buffer_context.local_buffers)
        if keeps_rows and any(
            loop.steps != 1 for proxy in proxies for loop in proxy.loop_nest.loops[:depth]
        ):
            return False
        return bool(check(node, proxies, depth))

    with mock.patch.object(
        OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", checked
    ):
        yield
