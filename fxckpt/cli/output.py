"""Standard output: closed pipes, full disks and encodings that lack a character."""

from __future__ import annotations

import os
import sys

from fxckpt.errors import FxckptError


class OutputError(FxckptError):
    """Raised if the standard output cannot be written."""


def write(text: str) -> None:
    """Write an answer to the standard output.

    Characters that its encoding lacks become ``?``, and a reader that closes the pipe early
    (``head``, a pager) is no error. Raises :class:`OutputError` if the text cannot be written.
    """
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
    """Redirect the standard output to the null device, so that Python flushes nothing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
