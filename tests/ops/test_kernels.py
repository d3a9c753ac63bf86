"""Kernels of ours: the values of torch's ops, and less memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fxckpt
from fxckpt.ops import kernels
from fxckpt.ops.in_place import in_place_form
from fxckpt.ops.kernels import accumulate_mm, cross_entropy_backward

aten = torch.ops.aten
SHAPES = ((1, 1, 1), (7, 5, 3), (2048, 16, 512), (1000, 64, 777), (0, 4, 4), (4, 0, 4))


def operands(rows: int, inner: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return a sum and two matrices, the first one transposed, as in a weight's gradient."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, columns, generator=generator),
        torch.randn(inner, rows, generator=generator).to(dtype).t(),
        torch.randn(inner, columns, generator=generator).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_forms_add_the_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The sum is as near to float64 as a rounded product allows; the forms agree to the bit."""
    total, a, b = operands(*shape, dtype)
    found = accumulate_mm(total, a, b)
    product = a.double() @ b.double()
    error = (found - (total.double() + product)).abs()
    assert (error <= torch.finfo(dtype).eps * product.abs() + 1e-5).all()
    form = in_place_form(accumulate_mm)
    assert form is not None and form.operands == (0,)
    written = total.clone()
    assert form.target(written, a, b) is written
    assert torch.equal(written, found)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let parts take 64 KiB."""
    monkeypatch.setattr(kernels, "PART_BYTES", 1 << 16)
    return 1 << 16


def test_no_whole_product_is_allocated(small_parts: int) -> None:
    """Written into the sum, it takes a part of a product, and that in float32."""
    total, a, b = operands(2048, 64, 256, torch.bfloat16)
    form = in_place_form(accumulate_mm)
    assert form is not None
    form.target(total, a, b)
    peak = fxckpt.measure_peak(lambda: form.target(total, a, b))
    assert peak <= 3 * small_parts < total.numel()


def test_flops_are_those_of_the_product() -> None:
    """torch's counter knows both forms."""
    total, a, b = operands(4, 3, 5, torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        accumulate_mm(total, a, b)
        torch.ops.fxckpt.accumulate_mm_(total, a, b)
    assert counter.get_total_flops() == 2 * (2 * 4 * 3 * 5)


def losses(dtype: torch.dtype, input_dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of the backward of cross entropy, of each reduction."""
    generator = torch.Generator().manual_seed(0)
    rows, classes = 100, 333
    logits = torch.randn(rows, classes, generator=generator).to(input_dtype)
    scores = logits.to(dtype).log_softmax(1)
    target = torch.randint(classes, (rows,), generator=generator)
    target[::7] = 5
    for weight in (None, torch.rand(classes, generator=generator).to(dtype)):
        for reduction in (0, 1, 2):
            for ignored in (-100, 5):
                loss = aten.nll_loss_forward(scores, target, weight, reduction, ignored)
                grad = torch.randn(loss[0].shape, generator=generator).to(dtype)
                yield grad, scores, target, weight, reduction, ignored, loss[1], input_dtype


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("dtype", "input_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_cross_entropy_has_the_bits_of_two_ops(
    dtype: torch.dtype, input_dtype: torch.dtype
) -> None:
    """So has its form that writes over the log-probabilities, where types allow it."""
    form = in_place_form(cross_entropy_backward)
    assert form is not None and 1 in form.operands and form.out == "out"
    for args in losses(dtype, input_dtype):
        of_scores = aten.nll_loss_backward(*args[:7])
        if dtype == input_dtype or torch.cuda.is_available():
            expected = aten._log_softmax_backward_data(of_scores, args[1], 1, input_dtype)
            assert torch.equal(cross_entropy_backward(*args), expected)
        if dtype == input_dtype:
            written = args[1].clone()
            assert form.target(args[0], written, *args[2:], out=written) is written
            assert torch.equal(written, expected)


def test_cross_entropy_stores_some_rows(small_parts: int) -> None:
    """Beside the log-probabilities it takes a part, where the two ops take two wide values."""
    *_, args = losses(torch.float32, torch.float32)
    form = in_place_form(cross_entropy_backward)
    assert form is not None
    peak = fxckpt.measure_peak(lambda: form.target(*args, out=args[1]))
    assert peak <= small_parts < 4 * args[1].numel()
