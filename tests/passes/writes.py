"""Functions that write into a view, by ops that clone the view's storage."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten
WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": lambda view, row: aten.copy.default(view, row),
    "copy into a transposed view": lambda view, row: aten.copy.default(view.t(), row),
    "copy into what shows an element twice": lambda view, row: aten.copy.default(
        view[:1].expand(4, 4), row
    ),
    "copy into other dtypes' memory": lambda view, row: aten.copy.default(
        view.view(torch.int32), row
    ).view(torch.float32),
    "select_scatter": lambda view, row: aten.select_scatter.default(view, row, 0, 1),
    "slice_scatter": lambda view, row: aten.slice_scatter.default(view, row[None], 0, 1, 2),
    "diagonal_scatter": lambda view, row: aten.diagonal_scatter.default(view, row),
    "as_strided_scatter": lambda view, row: aten.as_strided_scatter.default(view, row, [4], [1], 8),
    "index_put": lambda view, row: aten.index_put.default(view, [torch.tensor([1])], row),
    "a write into what was written": lambda view, row: aten.select_scatter.default(
        aten.copy.default(view, row)[1:3].t()[1:], row[:2], 0, 0
    ),
}
