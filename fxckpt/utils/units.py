"""Units: seconds, FLOPs, tensor types and long names as text for people."""

from __future__ import annotations


def shorten(text: str, width: int) -> str:
    """Return a text of at most ``width`` characters, with the middle of a longer one cut out.

    >>> shorten("transformer.h.11.attn.c_proj", 16)
    'transfo…n.c_proj'
    """
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[-(width - 1 - left) :]}"


def format_seconds(seconds: float) -> str:
    """Return seconds as text.

    >>> format_seconds(0.00125), format_seconds(0)
    ('1.25 ms', '0.0 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def format_flops(flops: float) -> str:
    """Return FLOPs as text.

    >>> format_flops(2.1e9), format_flops(12)
    ('2.1 GFLOP', '12 FLOP')
    """
    for unit in ("", "K", "M", "G", "T"):
        if abs(flops) < 1000:
            return f"{flops:.1f} {unit}FLOP" if unit else f"{flops:.0f} FLOP"
        flops /= 1000
    return f"{flops:.1f} PFLOP"


def format_shape(dtype: str, shape: tuple[int, ...]) -> str:
    """Return a tensor's type as text, in the notation of JAX.

    >>> format_shape("float32", (4, 256)), format_shape("bool", ())
    ('f32[4,256]', 'bool[]')
    """
    short = (
        dtype.replace("bfloat", "bf")
        .replace("float", "f")
        .replace("uint", "u")
        .replace("int", "i")
        .replace("complex", "c")
    )
    return f"{short}[{','.join(map(str, shape))}]"
