"""Versions of torch that fxckpt is tested with, and the messages for others.

Must import on any version of torch, so it uses public names only.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import warnings

import torch

from fxckpt._interrupts import is_command_line

TESTED = ("2.11.0", "2.13.0", "2.15.0")
"""Tested versions, oldest first; any version below the first is refused."""


def _minor(version: str) -> tuple[float, float]:
    """Return the major and minor numbers of a version.

    A build of one's own may have none: it is taken for one newer than all that are tested.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (math.inf, math.inf) if found is None else (int(found[1]), int(found[2]))


def is_tested() -> bool:
    """Return whether fxckpt is tested with the installed torch."""
    return torch.__version__.split("+")[0] in TESTED


def is_newer() -> bool:
    """Return whether torch is newer than any that fxckpt is tested with.

    There the names that Inductor gives to its parts may have changed: halves are compiled by
    torch's own steps, and a plan that cannot be judged by their lowering is made without it.
    """
    return _minor(torch.__version__) > _minor(TESTED[-1])


def refuse_older() -> None:
    """Raise ImportError if the installed torch is older than any that fxckpt is tested with.

    On the command line, print one line and exit with status 3 instead.
    """
    if _minor(torch.__version__) >= _minor(TESTED[0]):
        return
    message = (
        f"fxckpt needs torch {TESTED[0]} or newer, and torch {torch.__version__} is installed. "
        "Install a newer one: pip install -U torch"
    )
    if is_command_line():
        print(f"fxckpt: {message}", file=sys.stderr)
        raise SystemExit(3)
    raise ImportError(message)


@functools.cache
def warn_of_newer() -> None:
    """Warn once per process if torch is newer than any version that fxckpt is tested with."""
    if is_newer():
        warnings.warn(
            f"torch {torch.__version__} is newer than any that fxckpt is tested with "
            f"({', '.join(TESTED)}): a budget for Inductor may be missed. Halves are lowered once "
            "more to be compiled, and what cannot be read of a lowering is planned without it. "
            "What fxckpt doctor finds is a first test; a newer fxckpt may know this torch.",
            stacklevel=2,
        )
