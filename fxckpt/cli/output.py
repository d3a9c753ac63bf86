"""The terminal: how an answer is written where the reader may have left, the disk may be full, or not every character exists."""

from __future__ import annotations

import os
import sys

from fxckpt.errors import FxckptError


class OutputError(FxckptError):
    """The standard output cannot be written."""


def write(text: str) -> None:
    """Write an answer to the standard output. A reader that has seen enough (``head``, a pager) is no error; raises :class:`OutputError`."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard()
    except OSError as error:
        _discard()
        raise OutputError(
            f"cannot write to the standard output: {error.strerror or error}"
        ) from error


def _discard() -> None:
    """Write nothing more, not even what is left in the buffer when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
