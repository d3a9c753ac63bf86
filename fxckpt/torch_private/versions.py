"""The versions of torch that fxckpt is tested with, and what is said of others. Nothing here is private to torch: it must import on any version."""

from __future__ import annotations

import functools
import sys
import warnings

import torch

from fxckpt._interrupts import is_command_line

TESTED = ("2.11.0", "2.13.0", "2.15.0")
"""Oldest first; what is older than the first is refused."""


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def is_tested() -> bool:
    """Return whether the installed torch is one of those that fxckpt is tested with."""
    return torch.__version__.split("+")[0] in TESTED


def refuse_older() -> None:
    """Raise ImportError for a torch that lacks what fxckpt needs; on the command line, leave with one line."""
    if _minor(torch.__version__) >= _minor(TESTED[0]):
        return
    said = f"fxckpt needs torch {TESTED[0]} or newer, and torch {torch.__version__} is installed. Install a newer one: pip install -U torch"
    if is_command_line():
        print(f"fxckpt: {said}", file=sys.stderr)
        raise SystemExit(3)
    raise ImportError(said)


@functools.cache
def warn_of_newer() -> None:
    """Warn, once a process, of a torch that is newer than any that fxckpt is tested with."""
    if _minor(torch.__version__) > _minor(TESTED[-1]):
        warnings.warn(
            f"torch {torch.__version__} is newer than any that fxckpt is tested with ({', '.join(TESTED)}): plans may miss their budget. "
            "What fxckpt doctor finds is a first test; a newer fxckpt may know this torch.",
            stacklevel=2,
        )
