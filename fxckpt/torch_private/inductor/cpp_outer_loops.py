"""Workaround for wrong results of fused C++ loops over tiles of rows.

Inductor fuses loops over the same rows and keeps a value that only they read in a buffer of one row
(``local_buffer_data``), which the next row overwrites. If a loop over rows is tiled (a value stored
with its rows innermost is read by transposing tiles), each row of a tile overwrites the buffer, and
all are read as the last one: gradients of LayerNorms over images are wrong by a few thousandths.
Such loops are not fused here, as Inductor does with loops of different steps. Upstream's fix is
pytorch/pytorch#185855.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def whole_rows() -> Iterator[None]:
    """Provide a context in which fused loops with a buffer of one row step by one row."""
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
