"""Numbers and names as text for people."""

from __future__ import annotations

import pytest

from fxckpt.utils.units import format_flops, format_seconds, format_shape, shorten


@pytest.mark.parametrize("width", [3, 8, 15])
def test_shortened_names_have_the_width(width: int) -> None:
    """A longer name loses its middle and keeps both ends; a shorter one is unchanged."""
    text = shorten("transformer.h.11.attn", width)
    assert len(text) == width and text[0] == "t" and text[-1] == "n" and "…" in text
    assert shorten("abc", width) == "abc"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 us"), (9.994e-4, "999.4 us"), (1e-3, "1.00 ms"), (1.0, "1.00 s"), (90, "90.00 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    """The unit is the greatest that leaves a number of at least one."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("flops", "text"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (1e3, "1.0 KFLOP"), (2e12, "2.0 TFLOP"), (3e18, "3000.0 P")],
)
def test_flops(flops: float, text: str) -> None:
    """FLOPs have a decimal prefix; there is none above peta."""
    assert format_flops(flops).startswith(text)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("bfloat16", "bf16[2]"),
        ("float8_e4m3fn", "f8_e4m3fn[2]"),
        ("uint8", "u8[2]"),
        ("int64", "i64[2]"),
        ("complex64", "c64[2]"),
    ],
)
def test_types_are_short(dtype: str, text: str) -> None:
    """Each kind of dtype has its letter."""
    assert format_shape(dtype, (2,)) == text
